"""Job model `muri`: the job model of Muri's simulator, its quirks included (Zhao et al., SIGCOMM '22).

Ideal: a job needs `iterations` iterations of its measured time, and loses its start-up time at each start.
The source departs from that, and its published numbers depend on each departure:
- An iteration alone takes 1.5 % longer than measured.
- Time is booked only at *moments*: arrivals and completions (and, with `limits_gpu_s`, the moment at which a
  job's service reaches a limit). The start-up time is lost once between any two moments by every job that
  runs, whether or not it was just started.
- A completion is predicted without that loss, so a job may count as complete with work left.
- Completions within a relative 1e-9 are one moment (with `limits_gpu_s`: only exactly equal ones). Under the
  source's grouping policies an arrival and a completion within a relative 1e-9, or 0.1 ms, are one moment,
  too: that of the arrival.
- Jobs that hold the same GPUs are a group: each of them needs the group's period, stretched by a factor of
  its size, for an iteration, and loses the start-up times of all of them. Stage times in the period are as
  measured, not 1.5 % longer.
Doubles, in the order of operations of the source: ties decide the schedule, and they depend on the last bit.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import ceil, inf

import msgspec

from penstock.model.inputs.external_events import JobProgress
from penstock.simulator.job_models.model import End, Instant, Placement, Work
from penstock.simulator.traces.jobs import Stages, TraceJob
from penstock_papers.job_models.muri_period import iteration_together_s

SLOWER_THAN_MEASURED = 1.015
SAME_MOMENT = 1e-9
SAME_MOMENT_S = 1e-4  # of an arrival and a completion


def iteration_s(stages: Stages) -> float:
    """Time of an iteration alone. Scaled first, then converted to seconds: another rounding breaks ties
    differently (trace4_pr, 0.05 %)."""
    return stages.iteration_ms * SLOWER_THAN_MEASURED / 1_000


Held = tuple[tuple[str, tuple[int, ...]], ...]
"""(node, its held GPUs), node by node."""


class _Run:
    __slots__ = (
        "alone_s",
        "attained_s",
        "duration_s",
        "gpus",
        "iteration_s",
        "job_id",
        "left",
        "level",
        "lost_s",
        "stages",
        "start_up_s",
    )

    def __init__(self, job: TraceJob, start_up_s: float) -> None:
        assert job.stages is not None, job
        assert job.iterations is not None, job
        self.job_id = job.job_id
        self.gpus = job.gpus
        self.left = float(job.iterations)
        self.stages = job.stages
        self.duration_s = job.duration_s
        self.alone_s = self.iteration_s = iteration_s(job.stages)
        """`alone_s`: time of an iteration alone; `iteration_s`: in its group, if it is in one."""
        self.start_up_s = self.lost_s = start_up_s
        """`start_up_s`: its own; `lost_s`: time lost at each moment, the sum over its group."""
        self.attained_s = 0.0
        self.level = 0

    def progress(self) -> JobProgress:
        return JobProgress(
            job_id=self.job_id,
            attained_s=self.attained_s,
            remaining_s=self.left * self.alone_s if self.left > 0 else 0.0,
        )


class MuriWork(Work):
    """`start_up_s`: per (model, GPUs). `limits_gpu_s`: GPU seconds of service at which jobs report, for
    Tiresias; () for none. `as_submitted`: a job that has not run yet reports the trace's duration as its
    remaining time, as for Muri-S. `matched`: groups were found by matching; otherwise the source has another
    factor. `arrivals_s`: times of submission, ascending, with which completions may coincide; () for none."""

    def __init__(
        self,
        start_up_s: Mapping[tuple[str, int], float],
        limits_gpu_s: Sequence[float] = (),
        *,
        as_submitted: bool = False,
        matched: bool = True,
        arrivals_s: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self._arrivals_s = arrivals_s
        self._start_up_s = start_up_s
        self._limits = tuple(limits_gpu_s)
        self._as_submitted, self._matched = as_submitted, matched
        self._groups: dict[Held, dict[str, _Run]] = {}
        """Jobs that hold these GPUs, in the order of their starts."""
        self._places: dict[str, Held] = {}
        self._regrouped: set[Held] = set()
        """GPUs whose group has changed since the last moment."""
        self._all: dict[str, _Run] = {}
        self._running: dict[str, _Run] = {}
        self._moment_s = 0.0
        self._next: tuple[float, list[str]] | None = None
        """The predicted moment and the jobs that complete then; None: to be predicted anew."""

    def alone_s(self, job: TraceJob) -> float:
        assert job.stages is not None, job
        return (job.iterations or 0) * iteration_s(job.stages)

    def start_up_s(self, job: TraceJob) -> float:
        return self._start_up_s[job.model, job.gpus]

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        run = _Run(job, self._start_up_s[job.model, job.gpus])
        self._all[job.job_id] = run
        first = run.progress()
        return msgspec.structs.replace(first, remaining_s=run.duration_s) if self._as_submitted else first

    def started(self, job_id: str, placement: Placement, now_s: float) -> None:
        run = self._running[job_id] = self._all[job_id]
        held = tuple((node_id, there.gpus) for node_id, there in placement.items() if there.gpus)
        held = self._places[job_id] = held or ((job_id, ()),)
        self._groups.setdefault(held, {})[job_id] = run
        self._regrouped.add(held)
        self._next = None

    def stopped(self, job_id: str, now_s: float) -> None:
        if self._running.pop(job_id, None) is not None:
            self._leave(job_id)
        self._next = None

    def _leave(self, job_id: str) -> None:
        held = self._places.pop(job_id)
        members = self._groups[held]
        del members[job_id]
        if not members:
            del self._groups[held]
        self._regrouped.add(held)

    def _take_turns(self) -> None:
        """Computes the iteration times of changed groups."""
        for held in self._regrouped:
            runs = list(self._groups.get(held, {}).values())
            alone = len(runs) == 1
            together_s = (
                0.0
                if alone or not runs
                else iteration_together_s(tuple(sorted(run.stages for run in runs)), matched=self._matched)
            )
            lost_s = sum(run.start_up_s for run in runs)
            for run in runs:
                run.iteration_s = run.alone_s if alone else together_s
                run.lost_s = lost_s
        self._regrouped.clear()

    def next_s(self) -> float | None:
        if not self._running:
            return None
        if self._next is None:
            self._next = self._predict()
        return self._next[0]

    def _predict(self) -> tuple[float, list[str]]:
        self._take_turns()
        batches: list[tuple[float, list[str]]] = []
        now_s = self._moment_s
        best_s = -1.0
        same = 0.0 if self._limits else SAME_MOMENT
        for run in self._running.values():
            end_s = now_s + run.left * run.iteration_s
            if best_s >= 0 and end_s > best_s * (1 + 2 * same):
                continue  # it cannot be in the earliest batch
            for first_s, members in batches:
                if abs(end_s - first_s) <= same * end_s:
                    members.append(run.job_id)
                    break
            else:
                batches.append((end_s, [run.job_id]))
                best_s = end_s if best_s < 0 else min(best_s, end_s)
        first = min(batches, key=lambda batch: batch[0])
        for run in self._running.values() if self._limits else ():
            if run.level < len(self._limits):
                reached_s = ceil(self._limits[run.level] / run.gpus) - run.attained_s + now_s
                if reached_s < first[0]:
                    first = (reached_s, [])
        arrival_s = self._next_arrival_s()
        if abs(arrival_s - first[0]) <= max(SAME_MOMENT * arrival_s, SAME_MOMENT_S):
            first = (arrival_s, first[1])
        return first

    def _next_arrival_s(self) -> float:
        """The first one after this moment, of those with which completions may coincide;
        −infinite: there is none."""
        following = bisect_right(self._arrivals_s, self._moment_s)
        return self._arrivals_s[following] if following < len(self._arrivals_s) else -inf

    def advance(self, now_s: float) -> Instant:
        self._take_turns()
        found = self._next if self._running else None
        ended = found[1] if found is not None and found[0] <= now_s else []
        for job_id in ended:
            del self._running[job_id]
            del self._all[job_id]
            self._leave(job_id)
        before_s, limits = self._moment_s, self._limits
        passed_s = now_s - before_s
        for run in self._running.values():
            if (trained_s := passed_s - run.lost_s) > 0.0:
                run.left -= trained_s / run.iteration_s
            run.attained_s = (run.attained_s + now_s) - before_s
            if run.level < len(limits) and run.attained_s * run.gpus >= limits[run.level]:
                run.level += 1
        self._moment_s = now_s
        self._next = None
        return Instant(
            [End(job_id, now_s) for job_id in ended], [run.progress() for run in self._running.values()]
        )
