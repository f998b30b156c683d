"""Many lives at once, over all cores; what failed comes back with the command that replays it."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from tests.faults.lab.judge import Violation
from tests.faults.lab.life import Options, Outcome, live

MAX_LIFE_CPU_S = 60.0  # a life takes a tenth of a second; a core that never returns would stop everything
COMMAND = "python -m tests.faults.lab"


class Summary(NamedTuple):
    """What came of many lives."""

    lives: int
    failures: tuple[dict[str, Any], ...]
    """seed, profile, judge, what, command; by seed."""
    records: int
    void: int
    terms: int
    jobs: int
    virtual_s: float
    profiles: dict[str, int]
    happened: dict[str, int]


def guarded(options: Options, cpu_s: float = MAX_LIFE_CPU_S) -> Outcome:
    """One life, in the main thread of its process; ended when it takes far more processor time than any sound one."""
    before = signal.signal(signal.SIGVTALRM, _too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        return live(options)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _too_long(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Violation("liveness", "a life does not come to its end: too much processor time")


def live_all(lives: Sequence[Options], workers: int) -> Iterator[Outcome]:
    """Outcomes as they come. With one worker in this process."""
    if workers == 1 or len(lives) == 1:
        yield from map(guarded, lives)
        return
    with multiprocessing.get_context().Pool(workers, initializer=_ignore_interrupts) as pool:
        yield from pool.imap_unordered(guarded, lives, chunksize=4)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the process that gathers the outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gather(outcomes: Iterator[Outcome], told: Callable[[Outcome], None], rest: Options) -> Summary:
    """Adds up until the lives end or Ctrl-C comes. `rest`: the options that all of them share."""
    found: list[Outcome] = []
    try:
        for outcome in outcomes:
            found.append(outcome)
            told(outcome)
    except KeyboardInterrupt:
        told_interrupted(found)
    profiles: dict[str, int] = {}
    happened: dict[str, int] = {}
    for outcome in found:
        profiles[outcome.profile] = profiles.get(outcome.profile, 0) + 1
        for name, count in outcome.happened.items():
            happened[name] = happened.get(name, 0) + count
    failures = sorted((outcome for outcome in found if outcome.judge), key=lambda outcome: outcome.seed)
    return Summary(
        lives=len(found),
        failures=tuple(
            {
                "seed": outcome.seed,
                "profile": outcome.profile,
                "judge": outcome.judge,
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


def told_interrupted(found: Sequence[Outcome]) -> None:
    """Says that what follows is a part."""
    print(f"stopped by Ctrl-C after {len(found)} lives; what follows is of those", file=sys.stderr)
