"""Performs one simulation run to its end, Ctrl-C or SIGTERM, with progress reports and a result."""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Durations, Simulation, Unsound
from penstock.simulator.job_models.model import NotMeasured
from penstock.simulator.meter import Figures
from penstock.simulator.results.series import Reals, RunSeries, Stopwatch, series_of
from penstock.simulator.results.timeline import Timeline

STEPS_PER_REPORT = 16  # with --check a step of a long queue takes tens of milliseconds
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Sink = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. `share`: of its events, 0 … 1."""

    share: float
    finished: int
    events: int
    wall_s: float


OnProgress = Callable[[Progress], bool]
"""Callback with a run's progress; it returns False to stop the run."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run."""

    name: str
    """Name of the variant: its profile, with the source of run times if it runs with several."""
    profile: str
    durations: Durations
    """Source of the policy's run times."""
    seed: int
    settings: PlacerSettings
    jobs: int
    figures: Figures
    used_rng: bool
    """Whether a policy used random numbers: if not, and the trace does not depend on the seed, every seed
    gives the same."""
    jct_s: Reals
    """Completion times of finished jobs, ascending; as exact as the figures."""
    queue_s: Reals
    series: RunSeries | None = None
    interrupted: bool = False
    problem: str = ""
    """Why the run was aborted; empty: it was not."""

    @property
    def whole(self) -> bool:
        return not self.interrupted and not self.problem


class Recorder:
    """Passes each record to a file and to a timeline, if there is one."""

    def __init__(self, file: Sink | None = None, *, draws: bool = False) -> None:
        self.timeline = Timeline() if draws else None
        self.stopwatch = Stopwatch() if draws else None
        self._file = file

    def take(self, value: bytes) -> None:
        if self._file is not None:
            self._file(value)
        if self.timeline is not None:
            self.timeline.take(value)

    def watch(self, simulation: Simulation) -> None:
        """Observes a simulation; call it before the first step."""
        if self.stopwatch is not None:
            simulation.cell.watch(self.stopwatch.note)


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables Python's cyclic garbage collector, which takes a fifth of the time: a run makes no cycles."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def perform(
    simulation: Simulation,
    recorder: Recorder,
    report: OnProgress,
    *,
    endless: bool = False,
    name: str = "",
) -> Result:
    """Runs to the end, or until `report` returns False. The recorder's `take` is the simulation's sink.

    `endless`: its jobs only arrive. `name`: of the variant; by default the profile.
    """
    recorder.watch(simulation)
    wall, busy = time.perf_counter(), time.process_time()
    interrupted, problem, steps = False, "", 0

    def keep_going() -> bool:
        meter = simulation.meter
        share = meter.events / (simulation.jobs * (1 if endless else 2))
        return report(Progress(share, meter.finished, meter.events, time.perf_counter() - wall))

    try:
        with no_collection():
            while simulation.step():
                steps += 1
                if steps % STEPS_PER_REPORT == 0 and not keep_going():
                    interrupted = True
                    break
    except (Unsound, NotMeasured) as error:
        problem = str(error)
    figures = simulation.figures(time.perf_counter() - wall, time.process_time() - busy)
    lives = [life for life in simulation.meter.lives.values() if life.end_s is not None]
    settings = simulation.cell.state.settings
    return Result(
        name=name or settings.profile,
        profile=settings.profile,
        durations=simulation.durations,
        seed=settings.seed,
        settings=settings,
        jobs=simulation.jobs,
        figures=figures,
        used_rng=simulation.cell.core.decider.used_rng,
        jct_s=np.sort(np.array([life.jct_s for life in lives])),
        queue_s=np.sort(np.array([life.jct_s - life.ran_s for life in lives])),
        series=None
        if recorder.timeline is None
        else series_of(recorder.timeline, recorder.stopwatch, name=name),
        interrupted=interrupted,
        problem=problem,
    )


@contextmanager
def first_interrupt_waits() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C or SIGTERM only sets a flag, so that a run ends between two steps and
    its figures are consistent; the second interrupts at once. Yields a function that returns the flag. In the
    main thread only.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
