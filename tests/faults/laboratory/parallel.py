"""Many runs at once, over all cores; what failed comes back with the command that replays it.

Tests run their seeds in their own process, one after the other, for other tests are beside them.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import Pool
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import tests.faults.laboratory.bugs.adjustment_mutants
import tests.faults.laboratory.bugs.checkpoint_mutants
import tests.faults.laboratory.bugs.group_mutants
import tests.faults.laboratory.bugs.move_mutants
import tests.faults.laboratory.bugs.next_mutants
import tests.faults.laboratory.bugs.plan_mutants  # noqa: F401 - it enters its own
from tests.faults.laboratory.options import Options
from tests.faults.laboratory.patching import FIRST_SEEDS, MUTANTS, SCENARIOS
from tests.faults.laboratory.run import Outcome, live
from tests.support.background import give_way
from tests.support.virtual_time import Endless

MAX_RUN_CPU_S = 60.0  # a run takes one or two seconds; a service that never returns would stop everything
GC_THRESHOLD = 50_000  # allocations; 700 by default, which took a sixth of a run's processor time
MUTANT_SEEDS = 100  # runs until a mutant counts as a survivor; most are noticed in the first ten
ARGUMENTS = "positional argument"
"""In the message of a call that does not fit."""
COMMAND = "python -m tests.faults.laboratory"
FORK = multiprocessing.get_context("fork")
Given = TypeVar("Given")
Result = TypeVar("Result")


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


def guarded(options: Options) -> Outcome:
    """One run, in the main thread of its process; ended when it takes far more turns or processor time than
    any sound one."""
    try:
        with bounded():
            return live(options)
    except Endless as error:
        return Outcome(
            options.seed, options.profile or "", "liveness", str(error), 0, 0, 0, 0, 0.0, "", {}, ()
        )


@contextmanager
def bounded(cpu_s: float = MAX_RUN_CPU_S) -> Iterator[None]:
    """In the main thread: raises `Endless` when the block takes more processor time."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _too_long(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Endless("no end within its processor time")


def run_all(options: Sequence[Options], workers: int) -> Iterator[Outcome]:
    """Outcomes as they come. With one worker in this process."""
    yield from spread(guarded, options, workers)


def spread(run: Callable[[Given], Result], given: Sequence[Given], workers: int) -> Iterator[Result]:
    """What the function returns for each, as it comes. With one worker in this process."""
    if workers == 1 or len(given) == 1:
        yield from map(run, given)
        return
    with _pool(workers) as pool:
        yield from pool.imap_unordered(run, given, chunksize=4)


@contextmanager
def _pool(workers: int, **given: Any) -> Iterator[Pool]:
    """Of forked processes."""
    with rarely_collecting(), FORK.Pool(workers, initializer=_set_up_worker, **given) as pool:
        yield pool


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """A run makes little garbage: look for cycles rarely, and not at what is there by now, of which a forked
    process would copy every page."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def apart(function: Callable[..., Any], *given: Any) -> Any:
    """What the function returns, in a forked process of its own. Raises `RuntimeError` if that dies."""
    receiving, sending = FORK.Pipe(duplex=False)
    with rarely_collecting(), receiving:
        process = FORK.Process(target=lambda: sending.send(function(*given)))
        process.start()
        sending.close()
        try:
            return receiving.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"{given}: the process died with {process.exitcode}") from None
        finally:
            process.join()


def _set_up_worker() -> None:
    """Ctrl-C is for the process that gathers the outcomes."""
    give_way()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def command_of(options: Options) -> str:
    """What repeats a run."""
    return f"{COMMAND} {options.arguments()}"


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
                "command": command_of(rest._replace(seed=outcome.seed)),
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


# -------------------------------------------------------------------------------------------------------
# mutants


def hunt(name: str, seeds: int = MUTANT_SEEDS, *, directed: bool = True) -> Hunt:
    """Runs in this process, which is spoilt afterwards, until a rule is violated. `directed`: in its
    scenario; of that only who dies for good always counts.

    Raises `LookupError` for a mutant that does not fit the code any more.
    """
    MUTANTS[name]()
    scenario = {field: value for field, value in SCENARIOS[name].items() if directed or field == "lost"}
    first = [FIRST_SEEDS[name]] if directed and FIRST_SEEDS[name] else []
    for seed in (*first, *range(seeds)):
        outcome = guarded(Options(seed, **scenario))
        if ARGUMENTS in outcome.what:
            raise LookupError(f"{name}: the function that it breaks has other arguments now: {outcome.what}")
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
    """Mutants whose function is not in the product any more, with what is missing. All are put into this
    process."""
    return [found for name in names if (found := _fits(name))]
