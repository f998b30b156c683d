"""Services of a fault cell that must run, and the failpoints that each new process is armed with."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.runtime.failpoints import NAMES
from tests.faults.processes.zygote import Process

MAX_PASSAGE = 12  # a failpoint kills at its 1st … 12th passage
EARLY_PASSAGE = 3  # the latest at which it kills for the first time: so each point is visited soon
ONCE = frozenset({"placer.term_appended"})  # passed once in a process's life


@dataclass(slots=True)
class Slot:
    """One service that must run."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    failpoints: Iterator[str] | None = None
    """What to arm each new process with; None: nothing."""
    keep: bool = True
    may_exit: bool = False
    """During outages of its servers a service may give up; otherwise that is a crash."""
    process: Process | None = None
    armed: str | None = None
    hit_by: str | None = None
    """What we killed it for: `random`."""
    keeper: "asyncio.Task[None] | None" = None

    @property
    def settled(self) -> bool:
        """Whether it is ready and nobody has killed it, or it was stopped and has ended."""
        process = self.process
        if process is None or process.ended.is_set():
            return process is not None and not self.keep
        return process.ready.is_set() and self.hit_by is None


def failpoint_cycle(prefix: str, rng: np.random.Generator, kills: Mapping[str, int]) -> Iterator[str]:
    """The failpoints of one service, those with the fewest `kills` first, at varying passages."""
    names = sorted(name for name in NAMES if name.startswith(f"{prefix}."))
    assert names, prefix
    while True:
        name = min(map(str, rng.permutation(names)), key=lambda name: kills.get(name, 0))
        latest = MAX_PASSAGE if kills.get(name, 0) else EARLY_PASSAGE
        yield f"{name}:{1 if name in ONCE else int(rng.integers(1, latest + 1))}"
