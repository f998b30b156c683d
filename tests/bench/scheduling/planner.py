"""The planner of groups: one plan for many jobs, by Muri's algorithm and by ours, in ms of the processor.
`python -m tests.bench.scheduling.planner`.

`few kinds`: 1,000 jobs of one GPU and 8 stage profiles on as many GPUs as a fourth of them needs, so that all
are candidates and two rounds of matching are needed. `all different`: as many of which no two have the same
profile. `weight`: of one matching of 200 such jobs, as a share of what rustworkx's matching of all jobs has.
"""

from time import process_time

import numpy as np
import rustworkx
import scipy.optimize  # noqa: F401 - as the batcher's planning process, before its first plan

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.groups.interleaving import times_of
from penstock.scheduling.stages.regroup import Candidate, Question, Regroup
from penstock_papers.muri.authors import authors
from penstock_papers.muri.many_efficiencies import Unit, union_efficiencies
from penstock_papers.muri.matching import match_distinct, match_kinds
from penstock_papers.muri.muri import muri_s
from penstock_papers.settings import Grouping

KINDS = 8
GPUS_PER_NODE = 8
MATCHED = 200


def question(jobs: int, kinds_of_jobs: int = KINDS) -> Question:
    """The same in every run."""
    rng = np.random.Generator(np.random.PCG64(1))
    kinds = [
        StageTimes(
            storage_ms=storage,
            cpu_ms=cpu,
            gpu_ms=gpu,
            network_ms=network,
            iteration_ms=storage + cpu + gpu + network,
        )
        for storage, cpu, gpu, network in rng.uniform(1, 100, (kinds_of_jobs, 4)).tolist()
    ]
    nodes = max(1, jobs // 4 // GPUS_PER_NODE)
    return Question(
        stage="bench",
        jobs=tuple(
            Candidate(
                job_id=f"job-{number}",
                gpus=1,
                shape=(1, 1, 0, 0),
                stages=kinds[number % kinds_of_jobs],
                remaining_s=100.0 + number,
                attained_s=0.0,
                order=number,
                rank=None,
                group="",
                movable=True,
                stop_cost_s=0.0,
                gpu_memory_mib=0,
            )
            for number in range(jobs)
        ),
        node_gpus=(GPUS_PER_NODE,) * nodes,
        gpu_memory_mib=0,
        now_ms=0,
    )


def plan_ms(make: type[Interleave] | None, jobs: int, repeats: int, kinds: int = KINDS) -> float:
    """The best of several first plans, each by a stage that has cached nothing. `make` None: Muri's."""
    found = []
    for _ in range(repeats):
        stage: Regroup = muri_s(Grouping(), group_plan) if make is None else make(group_plan)
        asked = question(jobs, kinds)
        began = process_time()
        answer = stage.solve(asked)
        found.append((process_time() - began) * 1_000)
        assert answer.groups
    return min(found)


def weight(seed: int = 1) -> float:
    """Share of the full matching's weight, 0 – 1."""
    rng = np.random.Generator(np.random.PCG64(seed))
    half = rng.random((KINDS, KINDS))
    weights = half + half.T
    counts = rng.multinomial(MATCHED, [1 / KINDS] * KINDS).tolist()
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    graph = rustworkx.PyGraph()
    graph.add_nodes_from(kinds)
    graph.add_edges_from(
        [
            (one, other, round(float(weights[kinds[one], kinds[other]]) * 1e9))
            for one in range(len(kinds))
            for other in range(one)
        ]
    )
    full = sum(
        weights[kinds[one], kinds[other]]
        for one, other in rustworkx.max_weight_matching(graph, weight_fn=int)
    )
    pairs = match_kinds(counts, weights.tolist())
    return float(sum(weights[pair] * count for pair, count in pairs.items()) / full)


def measure(jobs: int, repeats: int) -> tuple[float, float, float]:
    """(ms of Muri's plan, ms of ours, least share of the weight)."""
    return (
        plan_ms(None, jobs, repeats),
        plan_ms(Interleave, jobs, repeats),
        min(weight(seed) for seed in range(1, repeats + 1)),
    )


def weight_distinct(nodes: int) -> float:
    """As `weight`, of a matching of nodes that all differ: γ of pairs of jobs, as the planner has them."""
    units = [Unit((times_of(job.stages),), False, 0) for job in question(nodes, nodes).jobs if job.stages]
    weights = union_efficiencies(authors(), units, MAX_GROUP_MEMBERS, 0)
    graph = rustworkx.PyGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(
        [
            (one, other, round(float(weights[one, other]) * 1e9))
            for one in range(nodes)
            for other in range(one)
        ]
    )
    full = sum(weights[pair] for pair in rustworkx.max_weight_matching(graph, weight_fn=int))
    return float(sum(weights[pair] for pair in match_distinct(weights)) / full)


def main() -> None:
    exact, ours, share = measure(1_000, 3)
    print(f"1,000 jobs of {KINDS} kinds: muri-s {exact:.1f} ms, interleave {ours:.1f} ms; weight {share:.4%}")
    distinct = plan_ms(None, 1_000, 1, 1_000)
    ours_distinct = plan_ms(Interleave, 1_000, 1, 1_000)
    print(
        f"1,000 jobs, all different: muri-s {distinct:.0f} ms, interleave {ours_distinct:.0f} ms; weight "
        f"{weight_distinct(MATCHED):.4%}"
    )


if __name__ == "__main__":
    main()
