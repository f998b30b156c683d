"""Rows that are short of what they have to reach, and why: expected failures of `python -m tests.papers`,
which ends with 1 where another row is short, or one of these is not.

The discussion, with figures, is in the README beside.
"""

from collections.abc import Mapping, Sequence

KNOWN: Mapping[str, Sequence[str]] = {
    "table genie-gain: the best baseline has so many tasks in time that no policy could gain so much": (
        "genie-gain: most",
    ),
    "table genie-makespan-gain: tasks arrive until shortly before the best baseline is over": (
        "genie-makespan-gain: most",
    ),
    "within 0.7 % of the best: who protects those that can be in time lets the others wait": (
        "genie-makespan: 10/h: GENIE",
        "genie-makespan: 10/h: ours",
        "genie-makespan: 20/h: ours",
        "genie-scale-makespan: 16 GPUs: ours",
        "genie-scale-makespan: 32 GPUs: ours",
        "genie-scale-makespan: 64 GPUs: GENIE",
        "genie-scale-makespan: 64 GPUs: ours",
        "genie-scale-makespan: 128 GPUs: GENIE",
        "genie-scale-makespan: 128 GPUs: ours",
    ),
    (
        "where GPUs are left over, a choice that is predicted to be just in time has poorer odds than all "
        "GPUs that help"
    ): (
        "genie-scale-qos: 64 GPUs: GENIE",
        "genie-scale-qos: 128 GPUs: GENIE",
    ),
    "table balance-bound: where a node's speed is shared in proportion, free moves bring no more": (
        "balance: fixed: average",
        "balance: fixed: makespan",
        "balance: fixed: best job",
        "balance: random-20: average",
        "balance: random-20: makespan",
        "balance: random-20: best job",
        "balance: random-30: average",
        "balance: random-30: makespan",
        "balance: random-30: best job",
        "balance: random-50: average",
        "balance: random-50: makespan",
        "balance: random-50: best job",
    ),
    "one run of 20: a job that comes after a move": (
        "balance: fixed: average of the worst run",
        "balance: random-50: average of the worst run",
    ),
    "single seeds; what is due to noise and what to starts stands in the README": (
        "interleave-mixes: one GPU 0%, load 1.0, noise 1.0, run times known",
        "interleave-mixes: one GPU 90%, load 1.0, noise 1.0, run times known",
        "interleave-mixes: one GPU 90%, load 1.5, noise 1.0, run times known",
    ),
    "equal within its interval: at this load hardly any job waits": (
        "mixes-known: 50 % on 1 GPU, load 50 %, penstock",
        "mixes-known-noise-0.5: 50 % on 1 GPU, load 50 %, penstock",
        "mixes-known-noise-1: 50 % on 1 GPU, load 50 %, penstock",
    ),
    "without any waiting it would be 1.27: at a load of 50 % few jobs wait (remarks of the same rows)": (
        "interleave-mixes: geometric mean",
    ),
    (
        "a quarter of the cluster, of which a job of four GPUs takes more; the whole has them (table "
        "coda-days-coda)"
    ): (
        "coda-coda-best: GPUs free that waiting trainings could use",
        "coda-coda-best: trainings that start at once",
    ),
    (
        "the published loss takes ten times the contention that its text describes: the same table has it "
        "with that much"
    ): (
        "coda-eliminator: 0.5 % of the CPU jobs with high demand, all models; cores are halved: the same "
        "while jobs wait",
    ),
    "rows `bound` of the same table: no placement is faster": (
        "liquid-immediate: liquid vs even",
        "liquid-immediate: liquid vs hived",
    ),
    "both put a server without a GPU beside its two workers on one node: no placement is faster": (
        "liquid-immediate-servers: liquid vs hived",
    ),
    (
        "table sharing-ablation: on Gavel's pairs two of a kind leave each other little more than half of "
        "their speed"
    ): (
        "sharing-k80: CNN-MNIST*8, fits",
        "sharing-k80: NeuMF*4, fits",
        "sharing-k80: Mixed*4, fits",
        "sharing-p100: CNN-MNIST*8, fits",
        "sharing-p100: NeuMF*4, fits",
        "sharing-p100: Mixed*4, fits",
        "sharing-v100: NeuMF*4, fits",
        "sharing-v100: Mixed*4, fits",
    ),
    (
        "with `--alone`, an ablation without groups: Tiresias itself is worse there with finer queues "
        "(decision 115)"
    ): ("interleave-alone: trace4, first 400, run times unknown",),
    (
        "with `--long`: of equally heavy matchings another one is taken, which moves this percentile by up "
        "to a tenth"
    ): (
        "fig9-long: trace4, 99th percentile of JCTs, over srtf",
        "fig9-long: trace4, 99th percentile of JCTs, over srsf",
    ),
    "with `--long`: an accident of the trace's list, which is gone where that is shuffled": (
        "fig10-long: trace4_pr, mean JCT, over tiresias",
        "fig12-long: trace4_pr, mean JCT, at most 4",
        "muri-seconds-long: trace4_pr, muri-l, mean JCT",
    ),
}
"""Why → rows, as `table: label`."""
