"""Many runs at once, over all cores; what failed comes back with the command that replays it."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import Pool
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import tests.faults.laboratory.adjustment_mutants
import tests.faults.laboratory.checkpoint_mutants
import tests.faults.laboratory.group_mutants
import tests.faults.laboratory.move_mutants
import tests.faults.laboratory.next_mutants
import tests.faults.laboratory.plan_mutants  # noqa: F401 - it enters its own
from tests.faults.laboratory import hold_mutants, lease_mutants, mutants, node_mutants, shell_mutants  # noqa: F401 - they enter theirs
from tests.faults.laboratory.cell import Options
from tests.faults.laboratory.patching import FIRST_SEEDS, MUTANTS, SCENARIOS
from tests.faults.laboratory.run import Outcome, live
from tests.support.background import give_way

MAX_RUN_CPU_S = 60.0  # a run takes half a second; a service that never returns would stop everything
MUTANT_CPU_S = 8.0  # of a run in which a mutant goes round in circles
GC_THRESHOLD = 50_000  # allocations; 700 by default, which took a sixth of a run's processor time
MUTANT_SEEDS = 100  # runs until a mutant counts as a survivor; most are noticed in the first ten
COMMAND = "python -m tests.faults.laboratory"


class Endless(KeyboardInterrupt):
    """Too much processor time. Of this kind, since an event loop lets nothing else through."""


class Summary(NamedTuple):
    """What came of many runs."""

    runs: int
    failures: tuple[dict[str, Any], ...]
    """seed, profile, rule, what, command; by seed."""
    records: int
    void: int
    terms: int
    jobs: int
    virtual_s: float
    profiles: dict[str, int]
    happened: dict[str, int]


class Hunt(NamedTuple):
    """Which rule noticed a mutant, and at which seed; `rule` is empty for a survivor."""

    name: str
    rule: str
    seed: int
    what: str


def guarded(options: Options, cpu_s: float = MAX_RUN_CPU_S) -> Outcome:
    """One run, in the main thread of its process; ended when it takes far more processor time than any sound one."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, 1.0)
    try:
        return live(options)
    except Endless:
        what = f"no end within {cpu_s:g} s of processor time"
        return Outcome(options.seed, options.profile or "", "liveness", what, 0, 0, 0, 0, 0.0, "", {}, ())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _too_long(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Endless


def run_all(options: Sequence[Options], workers: int) -> Iterator[Outcome]:
    """Outcomes as they come. With one worker in this process."""
    if workers == 1 or len(options) == 1:
        yield from map(guarded, options)
        return
    with _pool(workers) as pool:
        yield from pool.imap_unordered(guarded, options, chunksize=4)


@contextmanager
def _pool(workers: int, **given: Any) -> Iterator[Pool]:
    """Of forked processes. What this one holds is frozen meanwhile: a collector that looks at it copies every page."""
    gc.freeze()
    try:
        with multiprocessing.get_context("fork").Pool(workers, initializer=_set_up_worker, **given) as pool:
            yield pool
    finally:
        gc.unfreeze()


def _set_up_worker() -> None:
    """Ctrl-C is for the process that gathers the outcomes. A run makes little garbage: look for cycles rarely."""
    give_way()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(GC_THRESHOLD)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gather(outcomes: Iterator[Outcome], progress: Callable[[Outcome], None], rest: Options) -> Summary:
    """Adds up until the runs end or Ctrl-C comes. `rest`: the options that all of them share."""
    found: list[Outcome] = []
    try:
        for outcome in outcomes:
            found.append(outcome)
            progress(outcome)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C after {len(found)} runs; what follows is of those", file=sys.stderr)
    profiles: dict[str, int] = {}
    happened: dict[str, int] = {}
    for outcome in found:
        profiles[outcome.profile] = profiles.get(outcome.profile, 0) + 1
        for name, count in outcome.happened.items():
            happened[name] = happened.get(name, 0) + count
    failures = sorted((outcome for outcome in found if outcome.rule), key=lambda outcome: outcome.seed)
    return Summary(
        runs=len(found),
        failures=tuple(
            {
                "seed": outcome.seed,
                "profile": outcome.profile,
                "rule": outcome.rule,
                "what": outcome.what,
                "command": f"{COMMAND} {rest._replace(seed=outcome.seed).arguments()}",
            }
            for outcome in failures
        ),
        records=sum(outcome.records for outcome in found),
        void=sum(outcome.void for outcome in found),
        terms=sum(outcome.terms for outcome in found),
        jobs=sum(outcome.jobs for outcome in found),
        virtual_s=sum(outcome.virtual_s for outcome in found),
        profiles=dict(sorted(profiles.items())),
        happened=dict(sorted(happened.items())),
    )


# ------------------------------------------------------------------------------------------------------- mutants


def hunt(name: str, seeds: int = MUTANT_SEEDS, *, directed: bool = True) -> Hunt:
    """Runs in this process, which is spoilt afterwards, until a rule is violated. `directed`: in its scenario."""
    MUTANTS[name]()
    scenario = SCENARIOS[name] if directed else {}
    first = [FIRST_SEEDS[name]] if directed and FIRST_SEEDS[name] else []
    for seed in (*first, *range(seeds)):
        outcome = guarded(Options(seed, **scenario), MUTANT_CPU_S)
        if outcome.rule:
            return Hunt(name, outcome.rule, seed, outcome.what)
    return Hunt(name, "", seeds, "")


def _hunt(given: tuple[str, int, bool]) -> Hunt:
    name, seeds, directed = given
    return hunt(name, seeds, directed=directed)


def hunt_all(
    names: Sequence[str], seeds: int, progress: Callable[[Hunt], None], *, directed: bool = True
) -> list[Hunt]:
    """Each mutant in a process of its own."""
    with _pool(cores(), maxtasksperchild=1) as pool:
        found: dict[str, Hunt] = {}
        for result in pool.imap_unordered(_hunt, [(name, seeds, directed) for name in names]):
            progress(result)
            found[result.name] = result
    return [found[name] for name in names]


def _fits(name: str) -> str:
    try:
        MUTANTS[name]()
    except (AttributeError, LookupError) as error:
        return f"{name}: {error}"
    return ""


def misfits(names: Sequence[str]) -> list[str]:
    """Mutants whose function is not in the product any more, with what is missing. All are put into one process."""
    with _pool(1) as pool:
        return [found for found in pool.map(_fits, names) if found]
