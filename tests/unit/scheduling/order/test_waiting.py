"""The rows of waiting jobs are a cache: every plan made with them equals the plan over all jobs, made from
nothing."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from math import ceil
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import MAX_CHANGES, CellState, ChangeLog
from penstock.model.decisions.ledger_events import JobRank
from penstock.model.inputs.external_events import JobProgress, WorkProgressed
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU
from penstock.scheduling.make_room.backfill import by_end
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.remaining_time import attained_s, gpus_of, remaining_s
from penstock.scheduling.stages.protocols import NO_LIMITS, Selection
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock_papers.baselines.preempting.ordered import Ordered
from penstock_papers.baselines.preempting.tiresias import Tiresias
from tests.faults.laboratory.options import Options as RunOptions
from tests.faults.laboratory.run import live
from tests.support.own_settings import limited

Rank = tuple[str, int, bool]
FAULTS = ("steps", "late", "twice", "crash", "wrong_progress")
MOST_RUNS = 50
"""Until there were faults, reports and plans enough: each of two runs has half of that on average, so fifty
never lack it by chance."""
FEWEST_REPORTS = 10
"""Of 64 ± 11 (20 seeds), and of 238 ± 39 changes: it is five standard deviations off."""
FURTHER = 1_000  # the first seed of those that are run only until then


# ----------------------------------------------------------- the plain plans: every job, every node, each
# time


def contenders(state: CellState) -> Iterator[JobState]:
    """In order of submission: waiting, running, or stopped only to make way."""
    for job in state.jobs.values():
        runnable = job.status in (JobStatus.QUEUED, JobStatus.LAUNCHING, JobStatus.RUNNING)
        preempted = job.status is JobStatus.STOPPING and job.stop.reason == "preempted"
        if (runnable and not job.unschedulable and job.held is None) or (preempted and job.held is None):
            yield job


def held(state: CellState, job: JobState) -> int:
    """GPUs that the job holds on nodes where something may be placed."""
    places = [task.place for task in job.tasks.values() if task.status is not TaskStatus.EXITED]
    return sum(len(place.gpus) for place in places if state.nodes[place.node_id].placeable)


def passes_on(state: CellState, job: JobState) -> set[tuple[str, int]]:
    """GPUs of who starts when this one has ended."""
    return {
        (task.place.node_id, gpu)
        for later in state.holding.values()
        if job.job_id in later.succession.after
        for task in later.tasks.values()
        for gpu in task.place.gpus
    }


def selection(state: CellState, chosen: list[JobState], **rest: Any) -> Selection:
    """What changes if these jobs shall run. The stops are in no order."""
    runs = [job for job in state.holding.values() if job.status is not JobStatus.STOPPING]
    return Selection(
        tuple(job.job_id for job in chosen if job not in runs),
        tuple(sorted(job.job_id for job in runs if job not in chosen)),
        **rest,
    )


def plain_ordered(policy: Ordered, state: CellState) -> Selection:
    """From the first claim to the last, with one counter of GPUs; what is being stopped counts as free."""
    contending = list(contenders(state))
    left = sum(max(0, node.free().gpus) for node in state.nodes.values())
    left += len(
        {
            (task.place.node_id, gpu)
            for job in state.holding.values()
            for task in job.tasks.values()
            if task.status is not TaskStatus.EXITED and state.nodes[task.place.node_id].placeable
            for gpu in task.place.gpus
        }
    )

    def runs(job: JobState) -> bool:
        return job.status in (JobStatus.LAUNCHING, JobStatus.RUNNING)

    def key(job: JobState) -> tuple[float, int]:
        stays = runs(job) and (not policy._preemptive or not held(state, job))
        return -1.0 if stays else policy._key(state, job), job.order

    chosen = []
    for job in sorted(contending, key=key):
        need = held(state, job) if runs(job) else gpus_of(job)
        if need <= left:
            left -= need
            chosen.append(job)
    return selection(state, chosen)


def plain_tiresias(policy: Tiresias, state: CellState) -> Selection:
    limits, strict = policy.limits_gpu_s, policy._strict_fifo
    queues: list[list[tuple[int, int, JobState]]] = [[] for _ in range(len(limits) + 1)]
    demoted = []
    for job in contenders(state):
        level, waits, position = job.rank or (0, 1, job.order << 12)
        over = level < len(limits) and attained_s(state, job) * gpus_of(job) >= limits[level]
        if over and (strict or not waits):
            demoted.append((level + 1, job))
        else:
            queues[level].append((waits, position, job))
    for queue in queues:
        queue.sort(key=lambda entry: entry[1] if strict else entry[:2])
    for level, job in demoted:
        queues[level].append((2, 0, job))
    free = sum(state.sound_gpus) - sum(
        gpu not in passes_on(state, job)
        for job in state.stopping.values()
        if job.stop.reason != "preempted" or job.held is not None
        for task in job.tasks.values()
        if task.status is not TaskStatus.EXITED
        for gpu in ((task.place.node_id, gpu) for gpu in task.place.gpus)
    )
    last, first = state.seq << 12, -(state.seq << 12)
    chosen: list[JobState] = []
    ranks: list[JobRank] = []
    wake: list[float] = []
    for level, queue in enumerate(queues):
        runs, waits_on = [], []
        for entry in queue:
            if gpus_of(entry[2]) <= free:
                free -= gpus_of(entry[2])
                runs.append(entry)
            else:
                waits_on.append(entry)
        chosen += [job for _, _, job in runs]
        stopped = [] if strict else [job for old, _, job in waits_on if old == 0]
        first -= len(stopped)
        marked: list[tuple[str, bool, int | None]] = []
        if strict:
            marked = [(job.job_id, True, None) for old, _, job in queue if old == 2]
        else:
            marked = [(job.job_id, True, None) for old, _, job in runs if old != 0]
            marked += [(job.job_id, False, first + number) for number, job in enumerate(stopped)]
            marked += [(job.job_id, False, None) for old, _, job in waits_on if old == 2]
        for job_id, is_chosen, front in marked:
            last += front is None
            place = last if front is None else front
            ranks.append(JobRank(job_id=job_id, level=level, chosen=is_chosen, position=place))
        if level < len(limits):
            wake += [
                ceil(limits[level] / gpus_of(job)) - attained_s(state, job)
                for _, _, job in runs
                if gpus_of(job)
            ]
    wake_ms = state.now_ms + max(1, ceil(min(wake) * 1_000)) if wake else None
    return selection(state, chosen, ranks=tuple(ranks[:1_024]), wake_ms=wake_ms)


PLAIN: dict[type, Callable[[Any, CellState], Selection]] = {Ordered: plain_ordered, Tiresias: plain_tiresias}


# ---------------------------------------------------------------------------------------------- random
# histories


class Telling(SteadyWork):
    """Some jobs report progress when they come, and again while they wait: wrongly, as real ones do."""

    def __init__(self, chance: np.random.Generator) -> None:
        super().__init__(Constant())
        self._draw = chance

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        super().admit(job, now_s)
        if self._draw.random() < 0.5:
            return None
        remaining_s = float(self._draw.integers(1, 8)) * job.duration_s / 4
        return JobProgress(job_id=job.job_id, attained_s=0.0, remaining_s=remaining_s)


def jobs(chance: np.random.Generator, count: int) -> list[TraceJob]:
    """Of all sizes, some without GPUs; many come at once, many are alike, so that keys tie."""
    return [
        TraceJob(
            f"j{number:03}",
            float(chance.integers(0, 20) * 10),
            float(chance.choice([10, 20, 40, 80, 300])),
            int(chance.choice([0, 1, 1, 1, 2, 3, 4, 8, 12])),
        )
        for number in range(count)
    ]


SETTINGS = (
    PlacerSettings(profile="srtf"),
    PlacerSettings(profile="srsf"),
    PlacerSettings(profile="sjf"),
    limited("tiresias", 30.0, 120.0),
    limited("tiresias-fifo", 60.0),
)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Selection]:
    """Every plan that is made; each over whole GPUs is compared with the plain one, and now and then with one
    from an empty cache."""
    found: list[Selection] = []

    def compared(policy: Any, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        plan: Selection = cached[type(policy)](policy, state, at_most)
        found.append(plan)
        if not at_most and not any(
            job.estimate and job.demand.worker.gpu_share_milli < WHOLE_GPU for job in state.jobs.values()
        ):
            assert replace(plan, stops=tuple(sorted(plan.stops))) == PLAIN[type(policy)](policy, state)
        if len(found) % 10 == 0:
            stage = profile_for(state.settings).preempt
            assert plan == cached[type(policy)](stage, load(dump(state)), at_most)
        return plan

    cached = {policy: policy.select for policy in PLAIN}  # type: ignore[attr-defined]
    for policy in PLAIN:
        monkeypatch.setattr(policy, "select", compared)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.profile)
def test_every_plan_is_the_one_made_from_nothing(
    settings: PlacerSettings, seed: int, plans: list[Selection]
) -> None:
    """Jobs of all sizes come, preempt, report and end: the rows are never out of date."""
    chance = np.random.default_rng(seed)
    options = Options(latency=Latency(start_s=2, stop_s=3) if seed % 2 else Latency(), check_every_step=True)
    trace = jobs(chance, 28)
    found = Simulation(nodes_of("2x4+1x8+2x2"), settings, Telling(chance), trace, options)
    while found.step():
        pass
    assert not found.cell.state.jobs
    assert len(plans) >= len({job.submit_s for job in trace}), "each arrival is planned"


@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.profile)
def test_every_plan_is_the_one_made_from_nothing_under_faults(
    settings: PlacerSettings, seeds: tuple[int, ...], plans: list[Selection]
) -> None:
    """Placers die and others take over, and reports of how far waiting jobs are come late, twice and
    wrong."""
    terms = reports = 0
    for number, seed in enumerate(chain(seeds, count(FURTHER))):
        enough = terms > 3 * len(seeds) and reports > 3 * len(seeds) and len(plans) > 50 * len(seeds)
        if number >= len(seeds) and enough:
            break
        assert number < MOST_RUNS, (
            f"{number} runs: {terms} terms, {reports} reports of progress, {len(plans)} plans"
        )
        outcome = live(RunOptions(seed, FAULTS, settings.profile, jobs=20, nodes=3, storm_s=150.0))
        assert not outcome.rule, f"seed {seed}: {outcome.what}"
        terms += outcome.terms
        reports += outcome.happened["wrong_progress"]


def test_rows_follow_progress_of_waiting_and_of_running_jobs() -> None:
    """Rows of waiting jobs do not read the progress of running ones, which is most of all changes; they are
    up to date nevertheless."""
    chance = np.random.default_rng(3)

    def left(state: CellState, job: JobState) -> tuple[tuple[int], float]:
        return (gpus_of(job),), remaining_s(state, job)

    waiting, both = JobRows(left), JobRows(left, by_end)
    settings = PlacerSettings(profile="srtf")
    found = Simulation(nodes_of("2x4+1x8+2x2"), settings, Telling(chance), jobs(chance, 28), Options())
    while found.step():
        state = found.cell.state
        for _ in range(4):
            waiting.update(state)
            both.update(state)
            plain = JobRows(left, by_end)
            plain.update(state)
            assert waiting.waiting == both.waiting == plain.waiting
            assert both.running == plain.running
            _report(state, chance)
    assert state.progress_log.count > FEWEST_REPORTS
    assert state.change_log.count > FEWEST_REPORTS


def _report(state: CellState, chance: np.random.Generator) -> None:
    """Some jobs report how far they are, whether they run or not."""
    names = [job_id for job_id in state.jobs if chance.random() < 0.5]
    reports = [
        JobProgress(job_id=job_id, attained_s=0.0, remaining_s=float(chance.integers(1, 900)))
        for job_id in names
    ]
    evolve(state, WorkProgressed(node_id="n0", jobs=tuple(reports)))


def test_a_cache_that_has_slept_too_long_is_invalidated() -> None:
    """A burst of ten thousand submissions comes between two plans: the rows are made anew, not guessed."""
    notes = ChangeLog()
    notes.add("a")
    notes.add("b")
    read = notes.count
    notes.add("c")
    notes.add("b")
    notes.add("c")
    assert sorted(notes.since(read) or ()) == ["b", "c"]
    assert sorted(notes.since(0) or ()) == ["a", "b", "c"]
    assert notes.since(notes.count) == []
    for number in range(MAX_CHANGES):
        notes.add(f"j{number}")
    assert notes.since(read) is None
    assert len(notes.since(notes.count - MAX_CHANGES) or ()) == MAX_CHANGES
