"""`specon/<schedule>`: short jobs on nodes without GPUs that share their cores (SpeCon, §VI).

| schedule | jobs | submitted | models | nodes |
|---|---|---|---|---|
| `fixed` | 20 | every 50 s | one | 4 |
| `random-20` | 20 | in [0, 300] s | any | 4 |
| `random-20-one` | 20 | in [0, 300] s | one | 4 |
| `random-30` | 30 | in [0, 600] s | any | 4 |
| `random-50` | 50 | in [0, 1,200] s | any | 8 |

A model is one of the measured loss curves of a character model, stretched to a run of 1 – 6.5 minutes alone
on a node, sampled uniformly, once for each model (decision 64). Nodes have 8 cores; each job asks for one,
and gets its proportion of the node's speed while it runs (job model `shared-node`). `random-20-one` is the
workload of table III.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.simulator.generators.base import Family, Generator, rng_of, source
from penstock.simulator.job_models.measurements.tables import read_charrnn
from penstock.simulator.traces.jobs import TraceJob

SHORTEST_S, LONGEST_S = 60.0, 390.0
ITERATIONS = 2_000  # points of a curve
JOB_MODEL = "shared-node(convergence)"


class Schedule(NamedTuple):
    """One schedule. `within_s`: span of the submissions; None: one every 50 s."""

    jobs: int
    within_s: float | None
    one_model: bool
    nodes: int


EVERY_S = 50.0
SCHEDULES: Mapping[str, Schedule] = {
    "fixed": Schedule(20, None, one_model=True, nodes=4),
    "random-20": Schedule(20, 300.0, one_model=False, nodes=4),
    "random-20-one": Schedule(20, 300.0, one_model=True, nodes=4),
    "random-30": Schedule(30, 600.0, one_model=False, nodes=4),
    "random-50": Schedule(50, 1_200.0, one_model=False, nodes=8),
}


def specon(name: str) -> Generator:
    """The generator of one of `SCHEDULES`."""
    schedule = SCHEDULES[name]

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, f"specon/{name}")
        curves = sorted(read_charrnn(source("specon", "charrnn")))
        alone_s = {curve: float(rng.uniform(SHORTEST_S, LONGEST_S)) for curve in curves}
        if schedule.one_model:
            curves = [curves[int(rng.integers(len(curves)))]]
        times = [EVERY_S * index for index in range(schedule.jobs)]
        if schedule.within_s is not None:
            times = sorted(rng.uniform(0.0, schedule.within_s, schedule.jobs).tolist())
        models = [curves[int(rng.integers(len(curves)))] for _ in times]
        return [
            TraceJob(
                job_id=f"specon-{index}",
                submit_s=submit_s,
                duration_s=alone_s[model],
                gpus=0,
                model=model,
                owner="specon",
                cores=1,
                iterations=ITERATIONS,
            )
            for index, (submit_s, model) in enumerate(zip(times, models, strict=True))
        ]

    when = "every 50 s" if schedule.within_s is None else f"within {schedule.within_s:g} s"
    text = f"SpeCon's {schedule.jobs} jobs {when}, sharing the cores of {schedule.nodes} nodes"
    return Generator(text, f"{schedule.nodes}x0x8", JOB_MODEL, make)


SPECON = Family({f"specon/{name}": specon(name) for name in SCHEDULES})
