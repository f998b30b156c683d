"""Weights of jobs in the search for groups (`penstock.scheduling.groups.search.group_search`), the value of
running each: w_i = own_i + g_i / G · (jobs behind i).

For a job with a known run time own_i is 1, and the jobs behind it are those that come later in the order.

For jobs whose run time is not known three things differ.

- Nothing distinguishes jobs of the same queue by attained service, so position alone does not put one behind
  another: each counts as at the mean position of its queue. Otherwise the job that came first would have a
  larger weight than many later ones, and one large gang a larger one than all jobs that fit in its place.
- Waiting jobs that are too many to be listed count, too: those of earlier queues are not behind it, of its
  own queue half. With known run times this gives mean completion times longer by 1 % where thousands wait, so
  all unlisted ones count as behind.
- own_i is `SOON` for each queue that jobs are in after its own: a job of an earlier queue is more likely to
  end soon. Source: own; by Gittins' index it would be inverse to the expected service, but that is a guess,
  and then every new job would stop others.
"""

from collections.abc import Hashable, Sequence

from msgspec import Struct

SOON = 1.5
"""1.25 to 2 give the same completion times within 4 %; restarts rise with it."""


class Job(Struct, frozen=True, gc=False):
    """A job that runs or could run."""

    gpus: int
    """≥ 1."""
    shape: Hashable
    """Only jobs of the same shape share GPUs; equal shapes have the same number of GPUs."""
    kind: int | None
    """Its kind for `Speeds`; None: it cannot share."""
    fixed: bool = False
    """Whether it runs and may not be stopped."""
    memory_mib: int = 0
    """On each of its GPUs."""
    queue: int | None = None
    """Its queue by attained service, from 0; None: its run time is known."""
    new: bool = True
    """Whether it arrived after the plan of the current groups."""
    ahead: float = 0.0
    """Unlisted waiting jobs ahead of it (ties count 1/2); 0 where its run time is known."""


def weights(jobs: Sequence[Job], behind: int, gpus: int) -> list[float]:
    """w of each job, > 0. `jobs`: in order of priority; `behind`: number of further waiting jobs, of which
    `Job.ahead` come before a job; `gpus`: of the cell."""
    behind += len(jobs) - 1
    places: dict[int, list[int]] = {}
    for number, job in enumerate(jobs):
        if job.queue is not None:
            places.setdefault(job.queue, []).append(number)
    mean = {queue: sum(numbers) / len(numbers) for queue, numbers in places.items()}
    last = max(places, default=0)
    return [
        1.0 + job.gpus / gpus * (behind - number)
        if job.queue is None
        else SOON ** (last - job.queue) + job.gpus / gpus * (behind - mean[job.queue] - job.ahead)
        for number, job in enumerate(jobs)
    ]
