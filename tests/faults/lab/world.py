"""Virtual time, chance, clocks that disagree, and services that live in turns.

Everything that happens in a life is a call on one heap, ordered by time and then by who asked first; every draw
comes from one generator. So a seed is a life, byte for byte.
"""

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np

EPOCH_MS = 1_700_000_000_000  # so that no clock is ever below zero, however wrong it goes
STORY_LINES = 60  # of what happened last, told with a failure
CALM_DELAY_S = 0.002


class Rates(NamedTuple):
    """How bad the weather is; probabilities per turn or message, seconds."""

    crash: float = 0.0
    """Per turn of a service: it dies instead."""
    late: float = 0.0
    longest_s: float = 5.0
    usual_s: float = 0.05
    twice: float = 0.0
    """Per message of a user or a watcher: it is sent once more."""


class World:
    """One life's time, chance and story."""

    def __init__(self, seed: int, rates: Rates) -> None:
        self.now_s = 0.0
        self.rates = rates
        self.calm = False
        """Set for the liveness phase: no faults, no delays worth the name."""
        self.rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0x1AB))))
        self.steps = 0
        self.story: deque[str] = deque(maxlen=STORY_LINES)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, after_s: float, act: Callable[[], None]) -> None:
        """Calls `act` so much later."""
        heapq.heappush(self._due, (self.now_s + after_s, next(self._order), act))

    def step(self) -> bool:
        """The next call; False when there is none."""
        if not self._due:
            return False
        self.now_s, _, act = heapq.heappop(self._due)
        self.steps += 1
        act()
        return True

    def next_s(self) -> float | None:
        """When the next call is due."""
        return self._due[0][0] if self._due else None

    def chance(self, probability: float) -> bool:
        """Never in calm weather."""
        return not self.calm and bool(self.rng.random() < probability)

    def delay_s(self) -> float:
        """How long a message or a turn of a service takes to come."""
        if self.calm:
            return CALM_DELAY_S
        longest_s = self.rates.longest_s if self.rng.random() < self.rates.late else self.rates.usual_s
        return float(self.rng.random()) * longest_s

    def within(self, low: float, high: float) -> float:
        return low + float(self.rng.random()) * (high - low)

    def tell(self, text: str) -> None:
        """One line of the story."""
        self.story.append(f"{self.now_s:10.3f} s  {text}")


class Clock:
    """One machine's wall clock. It is wrong, and may jump; only its own machine ever reads it."""

    def __init__(self, world: World, wrong_ms: int = 0) -> None:
        self._world = world
        self.wrong_ms = wrong_ms

    def wall_ms(self) -> int:
        return EPOCH_MS + self.wrong_ms + round(self._world.now_s * 1_000)

    def monotonic_s(self) -> float:
        return self._world.now_s


class Life:
    """One service from a start to its death. `died` is told once, by whoever dies by chance."""

    def __init__(self, world: World, name: str, died: Callable[[], None]) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.stalled_until_s = 0.0
        self._died = died

    def crash(self, why: str) -> None:
        """Ends this life; everything that it holds in memory is gone."""
        if self.alive:
            self.alive = False
            self.world.tell(f"{self.name} dies: {why}")
            self._died()

    def may_crash(self, why: str) -> bool:
        """Dies here by chance; True if so."""
        if self.world.chance(self.world.rates.crash):
            self.crash(why)
            return True
        return False


class Loop:
    """A coroutine of a service: `kick` gives it one turn, later; kicks before that turn are the same one."""

    def __init__(self, life: Life, turn: Callable[[], None], name: str) -> None:
        self.life = life
        self._turn = turn
        self._name = name
        self._pending = False
        self.stalled_until_s = 0.0

    def kick(self) -> None:
        if not self._pending:
            self._pending = True
            self.life.world.at(self.life.world.delay_s(), self._run)

    def _run(self) -> None:
        life, world = self.life, self.life.world
        if not life.alive:
            return
        until_s = max(life.stalled_until_s, self.stalled_until_s)
        if world.now_s < until_s and not world.calm:
            world.at(until_s - world.now_s, self._run)
            return
        self._pending = False
        if not life.may_crash(f"before {self._name}"):
            self._turn()
