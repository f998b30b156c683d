"""`poisson/<n>-per-hour`: a synthetic day of a shared cluster with Poisson arrivals, for users who have no
trace at hand.

Assumptions, of the shape that the public traces show (most jobs small and short, few large and long):
arrivals are Poisson; 70, 15, 10 and 5 % of the jobs ask for 1, 2, 4 and 8 GPUs; run times are log-normal with
a median of 20 minutes and σ = 1.2, within a minute and a day.
"""

import re
from collections.abc import Sequence

from penstock.simulator.generators.base import Family, Generator, poisson_arrivals, rng_of
from penstock.simulator.traces.jobs import TraceJob

NAME = re.compile(r"poisson/([1-9][0-9]{0,3})-per-hour")
HOURS = 24.0
GPUS, OF_JOBS = (1, 2, 4, 8), (0.70, 0.15, 0.10, 0.05)
MEDIAN_S, SIGMA = 1_200.0, 1.2
LEAST_S, MOST_S = 60.0, 86_400.0
OWNERS = 5


def poisson(per_hour: int) -> Generator:
    """`per_hour` > 0."""

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, f"poisson/{per_hour}")
        return [
            TraceJob(
                job_id=f"poisson-{index}",
                submit_s=submit_s,
                duration_s=min(MOST_S, max(LEAST_S, MEDIAN_S * float(rng.lognormal(0.0, SIGMA)))),
                gpus=int(rng.choice(GPUS, p=OF_JOBS)),
                owner=f"user-{int(rng.integers(OWNERS))}",
            )
            for index, submit_s in enumerate(poisson_arrivals(rng, per_hour, HOURS))
        ]

    return Generator(f"a day with {per_hour} jobs an hour, mostly small and short", "8x8", "constant", make)


def _other(name: str) -> Generator | None:
    found = NAME.fullmatch(name)
    return None if found is None else poisson(int(found[1]))


POISSON = Family({f"poisson/{per_hour}-per-hour": poisson(per_hour) for per_hour in (10, 60)}, _other)
"""Any rate of up to 9,999 jobs an hour; two are listed."""
