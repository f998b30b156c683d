"""Search for the number of cores of one running training: which number its workers have, the measured speeds,
and how it ends.

A search changes nothing before the speed at the start has settled. After a probe it waits for its nodes'
answers, then for the speed to settle (`penstock.scheduling.acting.settling`). It ends where the stage decides
so, or at the start's cores: when the speed never settles, a node cannot obey, a probe is refused, or other
jobs come to share its GPUs in turns. A restart in between gives back the cores of the placement.
"""

from dataclasses import dataclass, field

from penstock.ledger.derived.succession import followers
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import MAX_CORE_CHANGES, MAX_CORE_PROBES
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU
from penstock.proposals.validate_adjustments import Running, running, usable_cores
from penstock.scheduling.acting.core_search import Next, Seen
from penstock.scheduling.acting.eliminator import Change
from penstock.scheduling.acting.guard import Guard, Step, set_by_operator
from penstock.scheduling.acting.settling import Settling, Speed
from penstock.scheduling.acting.telemetry_windows import TaskWindow
from penstock.text.counting import count

MEASURES_MS, MEASURES_STEPS = 120_000, 32
"""A probe whose speed has not settled after so long and so many steps never does."""


@dataclass(slots=True)
class Search:
    """Of one attempt. All of its workers have the same number of cores."""

    attempt: int
    workers: tuple[str, ...]
    """Ids of the tasks with GPUs, in order of rank; the first one's speed counts."""
    step: Step
    start: int
    least: int
    """As `Guard.least_of`."""
    most: int
    """Cores that each worker could have at the latest check."""
    settling: Settling | None
    """None: the wanted cores are not in force yet."""
    cores: int = 0
    """Cores in force or wanted."""
    seen: list[Seen] = field(default_factory=list)
    ended: str = ""
    """Why it ended; empty: it goes on."""
    by_steps: bool | None = None
    until_ms: int | None = None
    """The probe ends then, settled or not; None: nothing was changed yet, so waiting costs nothing."""

    def __post_init__(self) -> None:
        self.cores = self.cores or self.start

    def observe(self, begin_ms: int, window: TaskWindow, now_ms: int) -> None:
        """Takes a window of its first worker."""
        if self.settling is not None and not self.ended:
            self.settling.observe(begin_ms, window, now_ms)

    def advance(self, now_ms: int) -> None:
        """Goes on where the speed has settled, will never settle, or has not settled in time."""
        if self.settling is None or self.ended:
            return
        speed = self.settling.settled(now_ms)
        if speed is None:
            if self.settling.gave_up:
                self.end(self.start, f"its speed does not settle at {self.cores} cores")
            elif self.until_ms is not None and now_ms >= self.until_ms:
                self.end(self.start, f"no speed settled at {self.cores} cores in time")
            return
        if self.by_steps not in (None, speed.by_steps):
            self.end(self.start, "it reports its steps no more")
            return
        self.by_steps = speed.by_steps
        self.seen.append(Seen(self.cores, speed.per_s))
        most = max(self.most, *(one.cores for one in self.seen))
        self._go_on(self.step(self.start, self.seen, most, self.least))

    def _go_on(self, following: Next) -> None:
        self.settling, self.until_ms = None, None
        if following.settled or len(self.seen) > MAX_CORE_PROBES or following.cores > self.most:
            cores = following.cores if following.settled else self._best()
            self.end(cores, f"it ran with {self._measured()}")
        else:
            self.cores = following.cores

    def _best(self) -> int:
        return min(self.seen, key=lambda one: (-one.speed, one.cores)).cores

    def _measured(self) -> str:
        unit = "iterations/s" if self.by_steps else "% of its GPU"
        return ", ".join(f"{count(one.cores, 'core')} at {one.speed:.4g} {unit}" for one in self.seen)

    def end(self, cores: int, why: str) -> None:
        """Ends the search at this number of cores."""
        self.cores, self.ended, self.settling, self.until_ms = cores, why, None, None

    @property
    def due_ms(self) -> int | None:
        """When `advance` has something to do, unless a window arrives before; None: nothing."""
        settles_ms = None if self.settling is None or self.ended else self.settling.due_ms
        times = [at_ms for at_ms in (settles_ms, self.until_ms) if at_ms is not None]
        return min(times, default=None)

    def wanted(self, job: JobState) -> list[Change]:
        """Changes that its workers do not have yet."""
        tasks = [(task_id, job.tasks[task_id]) for task_id in self.workers]
        if self.ended:
            why = f"its cores are settled: {self.ended}"
            return [
                Change(task_id, "settled", why, self.cores)
                for task_id, task in tasks
                if not task.cores.settled
            ]
        if self.settling is not None:
            return []
        why = f"to measure its speed; {self._measured()}"
        return [
            Change(task_id, "probe", why, self.cores)
            for task_id, task in tasks
            if len(task.used_cores) != self.cores
        ]

    def answered(self, job: JobState, latest_ms: int, now_ms: int) -> None:
        """Begins to measure if all nodes have applied the wanted cores. `latest_ms`: begin of the node's
        latest window."""
        if self.ended or self.settling is not None:
            return
        adjusted = [job.tasks[task_id].cores.adjusted for task_id in self.workers]
        if problem := next((one.problem for one in adjusted if one is not None and one.problem), ""):
            self.end(self.start, f"its node cannot give it {self.cores} cores: {problem}")
        elif all(one is None or one.enforced for one in adjusted) and all(
            len(job.tasks[task_id].used_cores) == self.cores for task_id in self.workers
        ):
            self.settling = Settling(latest_ms)
            step_ms = 1_000 / self.seen[0].speed if self.by_steps and self.seen[0].speed > 0 else 0.0
            self.until_ms = now_ms + max(MEASURES_MS, int(MEASURES_STEPS * step_ms))

    def refused(self, why: str) -> None:
        """A probe is not possible: the best measured number of cores stays. An end with fewer cores is not,
        since the settings have changed: the start's stay."""
        if self.ended:
            self.cores = max(self.cores, self.start)
        else:
            self.end(self._best() if self.seen else self.start, f"{self.cores} cores were refused ({why})")


def search_of(state: CellState, job: JobState, guard: Guard, latest_ms: int) -> Search | None:
    """The search for a running job's cores that begins now; None: there is nothing to search for."""
    step = guard.step_of(job)
    workers = tuple(task_id for task_id, task in job.tasks.items() if task.place.gpus)
    tasks = [job.tasks[task_id] for task_id in workers]
    if step is None or not tasks or any(task.cores.settled for task in tasks) or not _may_change(state, job):
        return None
    if any(set_by_operator(task.cores.adjusted) for task in tasks):
        return None
    most = most_of(state, workers)
    if any(task.cores.probes for task in tasks):
        found = Search(job.attempt, workers, step, tasks[0].cores.placed, 1, most, None)
        found.end(tasks[0].cores.placed, "the search was interrupted")
        return found
    cores = {len(task.used_cores) for task in tasks}
    left = MAX_CORE_CHANGES * job.spec.workers - job.adjustments.core_changes
    if len(cores) != 1 or left < len(workers) * (MAX_CORE_PROBES + 1) or not 0 < min(cores) <= most:
        return None
    (start,) = cores
    least = guard.least_of(job, start, max(len(task.place.gpus) for task in tasks))
    return Search(job.attempt, workers, step, start, least, most, Settling(latest_ms))


def takes_ms(speed: Speed) -> int:
    """How long a search may take for a training of that speed: the start and each probe until it has settled.
    A training that ends before gains nothing."""
    return (1 + MAX_CORE_PROBES) * speed.quiet_ms


def alone(job: JobState) -> bool:
    """Whether its speed is its own: it neither takes turns with other jobs nor shares a GPU."""
    places = (task.place for task in job.tasks.values())
    return not job.sharing.group and all(place.gpu_share_milli == WHOLE_GPU for place in places)


def _may_change(state: CellState, job: JobState) -> bool:
    """Members of groups hold their cores together,
    and the speed of a job that shares a GPU is not its own."""
    return (
        job.status is JobStatus.RUNNING
        and alone(job)
        and not followers(state, job)
        and all(task.status is TaskStatus.RUNNING for task in job.tasks.values())
    )


def most_of(state: CellState, workers: tuple[str, ...]) -> int:
    """Cores that each of them could have: the free cores of a node are divided among its workers. 0: they may
    not be changed now."""
    found = [running(state, task_id) for task_id in workers]
    tasks = [one for one in found if isinstance(one, Running)]
    if len(tasks) < len(workers):
        return 0
    on = [one.task.place.node_id for one in tasks]
    return min(
        len(one.task.place.cores)
        + (usable_cores(state, one) - len(one.task.place.cores)) // on.count(one.task.place.node_id)
        for one in tasks
    )
