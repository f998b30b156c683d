"""Virtual time, random numbers, fault rates and the trace of one run.

Everything happens on one event loop whose time jumps, and every random number comes from one seeded
generator: a seed is a run, byte for byte.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import NamedTuple

import numpy as np

from tests.faults.rules.findings import Violation

TRACE_LINES = 60  # of what happened last, shown with a failure
CALM_DELAY_S = 0.002
UNEXPECTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a service raises that has a bug."""


class Rates(NamedTuple):
    """Fault rates that hold all the time; probabilities per step or message, seconds."""

    crash: float = 0.0
    """Per step of a service (an append, a read, a journal write, a failpoint): it is killed instead."""
    append: float = 0.0
    """Per append: it fails before, after or in the middle of the write, or lands later than its failure is
    known."""
    late: float = 0.0
    longest_s: float = 5.0
    usual_s: float = 0.05
    twice: float = 0.0
    """Per message of a user or a watcher: it is sent once more."""
    policy: float = 0.0
    """Per question to a policy: it raises."""


def rates_of(rng: np.random.Generator, faults: tuple[str, ...]) -> Rates:
    """Of a run with these faults."""
    rates = Rates(
        crash=float(rng.choice([0.0, 0.0005, 0.002, 0.005])),
        append=float(rng.choice([0.0, 0.02, 0.1])),
        late=float(rng.uniform(0, 0.3)),
        longest_s=float(rng.choice([0.5, 3.0, 10.0])),
        usual_s=float(rng.choice([0.01, 0.05, 0.3])),
        twice=float(rng.uniform(0, 0.4)),
    )
    return rates._replace(
        crash=rates.crash if "steps" in faults else 0.0,
        append=rates.append if "append" in faults else 0.0,
        late=rates.late if "late" in faults else 0.0,
        twice=rates.twice if "twice" in faults else 0.0,
    )


class World:
    """One run's time, random numbers and trace."""

    def __init__(self, seed: int, rates: Rates) -> None:
        self.rates = rates
        self.calm = False
        """Set for the second phase: no faults, no delays worth the name."""
        self.rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0x1AB))))
        self.lines: deque[str] = deque(maxlen=TRACE_LINES)
        self.loop = asyncio.get_running_loop()
        self.context = copy_context()
        """Of nobody's process: what happens by itself reads the right time."""
        self.failed: asyncio.Future[Violation] = self.loop.create_future()

    @property
    def now_s(self) -> float:
        return self.loop.time()

    def at(self, after_s: float, act: Callable[[], object]) -> None:
        """Calls `act` so much later. What it raises ends the run."""
        self.loop.call_later(after_s, self.guarded, act, context=self.context)

    def guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (Violation, *UNEXPECTED) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the run; the first failure counts. An exception that is not a `Violation` is one of rule
        `crash`."""
        if not self.failed.done():
            crash = Violation("crash", f"{type(error).__name__}: {error}")
            self.failed.set_result(error if isinstance(error, Violation) else crash)

    def happens(self, probability: float) -> bool:
        """Never in the calm phase."""
        return not self.calm and bool(self.rng.random() < probability)

    def delay_s(self) -> float:
        """How long a message takes."""
        if self.calm:
            return CALM_DELAY_S
        longest_s = self.rates.longest_s if self.rng.random() < self.rates.late else self.rates.usual_s
        return float(self.rng.random()) * longest_s

    def within(self, low: float, high: float) -> float:
        return low + float(self.rng.random()) * (high - low)

    def trace(self, text: str) -> None:
        """One line of the trace."""
        self.lines.append(f"{self.now_s:10.3f} s  {text}")
