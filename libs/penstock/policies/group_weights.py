"""What running each job is worth to a search for groups (`penstock.policies.group_search`): w_i = own_i + g_i / G · (jobs behind i).

Where a job's run time is known own_i is 1, and jobs behind it are those that come later in the order.

Of jobs whose run time is not known two things differ.

- Jobs of the same queue by attained service are equal in all that is known of them, so none is behind another for its place alone: each counts as at the mean place of its
  queue. Otherwise who came first is worth more than many who came later, and one large gang more than all that fit in its place.
- own_i is √g_i · (E / e_i)^0.3 with the service e_i that its queue is expected to need and the largest such service E. By Gittins' index it would be g_i / e_i, the chance that
  it ends soon, if jobs needed the same service whatever their GPUs; who counted g_i would stop others for each larger gang that comes, so the
  root; and what a queue is expected to need is a guess, so the power. Source: own.
"""

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import NamedTuple

SOON = 0.3
"""0.2 to 0.5 give the same completion times within 1 %; restarts rise with it."""


class Job(NamedTuple):
    """One that runs or could."""

    gpus: int
    """≥ 1."""
    shape: Hashable
    """Only jobs of the same one share; the same number of GPUs in each."""
    kind: int | None
    """As `Speeds` knows it; None: it shares with no other."""
    fixed: bool = False
    """It runs and may not be stopped."""
    memory_mib: int = 0
    """On each of its GPUs."""
    queue: int | None = None
    """By attained service, 0 first; None: how long it runs is known."""
    soon: float = 1.0
    """By how much its end is sooner expected than in the last queue, ≥ 1, where that is not known: E / e_i."""
    new: bool = True
    """It came since the plan by which the groups run that are there."""


def weights(jobs: Sequence[Job], behind: int, gpus: int) -> list[float]:
    """w of each job, > 0. `jobs`: in order of priority; `behind`: how many further ones wait, all of them behind these; `gpus`: of the cell."""
    behind += len(jobs) - 1
    places: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        if job.queue is not None:
            places.setdefault(job.queue, []).append(number)
    mean = {queue: sum(numbers) / len(numbers) for queue, numbers in places.items()}
    return [
        1.0 + job.gpus / gpus * (behind - number)
        if job.queue is None
        else sqrt(job.gpus) * job.soon**SOON + job.gpus / gpus * (behind - mean[job.queue])
        for number, job in enumerate(jobs)
    ]
