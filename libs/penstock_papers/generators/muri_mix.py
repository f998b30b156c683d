"""`muri-mix/<p>-percent-1-gpu-load-<l>`: jobs as in Muri's traces, with another mix of sizes and another load
(Zhao et al., SIGCOMM '22).

Models, their stage times and start-ups are measured (`stage_profiles.csv`): each job is one of the eight
models, evenly. Assumed, of the shape that Muri's traces show: arrivals are Poisson; `p` percent of the jobs
ask for one GPU, the others evenly for 2, 4 or 8; run times are log-normal with a median of an hour and σ =
1.5, from a minute to a day. The load is the demand of all jobs in GPU seconds alone, over the capacity of the
cluster's 64 GPUs until the last arrival: at 100 and more the queue grows for as long as jobs come.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.files.csv_import import Row
from penstock.simulator.generators.base import Family, Generator, rng_of, source
from penstock.simulator.job_models.measurements.measured import read_all
from penstock.simulator.job_models.measurements.tables import STAGE_PROFILES
from penstock.simulator.traces.jobs import Stages, TraceJob

NAME = re.compile(r"muri-mix/(100|[1-9]?[0-9])-percent-1-gpu-load-([1-9][0-9]{0,2})")
JOBS = 400
CLUSTER, GPUS = "8x8", 64
# job model `muri` charges a start-up at each event: with such frequent events groups would do little else
JOB_MODEL = "measured-phases(turns)"
LARGER = (2, 4, 8)
MEDIAN_S, SIGMA = 3_600.0, 1.5
LEAST_S, MOST_S = 60.0, 86_400.0


class _Profile(NamedTuple):
    model: str
    gpus: int
    batch_size: int
    stages: Stages


def muri_mix(share: int, load: int) -> Generator:
    """The generator. `share`: percent of the jobs that ask for one GPU, 0 – 100; `load`: percent of the
    cluster, > 0."""
    name = f"muri-mix/{share}-percent-1-gpu-load-{load}"

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, name)
        by_gpus: dict[int, list[_Profile]] = {}
        for profile in _profiles():
            by_gpus.setdefault(profile.gpus, []).append(profile)
        jobs: list[TraceJob] = []
        for number in range(JOBS):
            gpus = 1 if rng.random() * 100 < share else int(rng.choice(LARGER))
            profile = by_gpus[gpus][int(rng.integers(len(by_gpus[gpus])))]
            wanted_s = min(MOST_S, max(LEAST_S, MEDIAN_S * float(rng.lognormal(0.0, SIGMA))))
            iterations = max(1, round(wanted_s * 1_000 / profile.stages.iteration_ms))
            jobs.append(
                TraceJob(
                    job_id=f"mix-{number}-{profile.model}",
                    submit_s=0.0,
                    duration_s=iterations * profile.stages.iteration_ms / 1_000,
                    gpus=gpus,
                    model=profile.model,
                    batch_size=profile.batch_size,
                    owner="muri",
                    iterations=iterations,
                    stages=profile.stages,
                )
            )
        asked_s = sum(job.duration_s * job.gpus for job in jobs)
        last_s = asked_s / (GPUS * load / 100)
        gaps = rng.exponential(1.0, JOBS)
        times = (gaps.cumsum() / gaps.sum() * last_s).tolist()
        return [job._replace(submit_s=time) for job, time in zip(jobs, times, strict=True)]

    text = f"{JOBS} jobs of Muri's models, {share} % of them on one GPU, that ask for {load} % of the cluster"
    return Generator(text, CLUSTER, JOB_MODEL, make)


def _profiles() -> Sequence[_Profile]:
    def read(row: Row) -> _Profile:
        stages = Stages(
            row.number("iteration_ms", above=0),
            row.number("storage_cpu_ms"),
            row.number("gpu_ms"),
            row.number("network_ms"),
        )
        batch_size = row.whole("batch_size", least=1)
        return _Profile(row.name("model"), row.whole("num_gpu", least=1), batch_size, stages)

    columns = {"model", "num_gpu", "batch_size", "iteration_ms", "storage_cpu_ms", "gpu_ms", "network_ms"}
    return read_all(source("muri-mix", f"muri/{STAGE_PROFILES}"), columns, read)


def _other(name: str) -> Generator | None:
    found = NAME.fullmatch(name)
    return None if found is None else muri_mix(int(found[1]), int(found[2]))


MURI_MIX = Family(
    {f"muri-mix/{share}-percent-1-gpu-load-100": muri_mix(share, 100) for share in (0, 50, 100)}, _other
)
"""Any share and load; three are listed."""
