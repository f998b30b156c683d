"""Processes of services: started, killed at any step, put to sleep and started again, each with its machine's
clock.

A process runs the service's own `run`. Whatever it does to the outside (log, journal, machine) passes `step`
or `gate`. A killed process does nothing any more: its ports raise `Killed` before its tasks are cancelled, so
that no `finally` of the service cleans up what a `kill -9` would leave behind.
"""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context

from tests.faults.laboratory.world import World
from tests.faults.rules.findings import Violation

PROCESS: ContextVar["Process | None"] = ContextVar("PROCESS", default=None)
CALM_PAUSE_S = 0.05  # between an end and the next start


class Killed(BaseException):
    """This process is dead."""


class Clock:
    """The error of one machine's wall clock, which may jump, and the rate of its boot-time clock."""

    def __init__(self, error_ms: int = 0, rate: float = 1.0) -> None:
        self.error_ms = error_ms
        self.rate = rate


def clock_error_ms() -> int:
    """Of the process that runs now; 0 outside of all."""
    process = PROCESS.get()
    return process.service.clock.error_ms if process is not None else 0


def clock_rate() -> float:
    """Of the boot-time clock of the process that runs now; 1 outside of all."""
    process = PROCESS.get()
    return process.service.clock.rate if process is not None else 1.0


class Process:
    """One process of a service, from its start to its end."""

    def __init__(self, service: "Service") -> None:
        self.service = service
        self.world = service.world
        self.alive = True
        self.stop = asyncio.Event()
        self.asleep_until_s: dict[str, float] = {}
        """Per kind of step ("append ledger", "read inputs", …; "" is all)."""
        self.at_death: list[Callable[[], None]] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.task = self.world.loop.create_task(self._run(), context=self.context)

    async def _run(self) -> None:
        """What ends the service otherwise than by us is a finding."""
        try:
            await self.service.work(self)
        except (Killed, asyncio.CancelledError):
            if self.alive:
                self.world.fail(Violation("crash", f"{self.service.name} was cancelled"))
        except BaseException as error:  # noqa: BLE001 - a finding, whatever it is
            if self.alive:
                self.world.fail(error)
        finally:
            if self.alive:
                self._ended("ended")

    def kill(self, why: str) -> None:
        """As by SIGKILL: what it holds in memory is gone."""
        if self.alive:
            self._ended(f"is killed: {why}")
            self.world.loop.call_soon(self.task.cancel, context=self.world.context)

    def _ended(self, how: str) -> None:
        self.alive = False
        self.world.trace(f"{self.service.name} {how}")
        for act in self.at_death:
            act()
        self.service.process_ended()

    def step(self, what: str) -> None:
        """A place where it may be killed. Raises `Killed` when it was."""
        if self.alive and self.world.happens(self.world.rates.crash):
            self.kill(what)
        if not self.alive:
            raise Killed

    async def gate(self, what: str) -> None:
        """A step at which it may also be asleep."""
        self.step(what)
        while not self.world.calm:
            until_s = max(self.asleep_until_s.get("", 0.0), self.asleep_until_s.get(what, 0.0))
            if until_s <= self.world.now_s:
                break
            await asyncio.sleep(min(1.0, until_s - self.world.now_s))
        if not self.alive:
            raise Killed

    def sleep(self, until_s: float, *kinds: str) -> None:
        """All of it, or steps of these kinds alone."""
        for kind in kinds or ("",):
            self.asleep_until_s[kind] = until_s


class Service:
    """A supervised service on one machine: whenever its process ends, the next one starts after a pause."""

    def __init__(
        self,
        world: World,
        name: str,
        clock: Clock,
        work: Callable[[Process], Coroutine[object, object, None]],
        longest_pause_s: float,
    ) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.work = work
        self.longest_pause_s = longest_pause_s
        self.process: Process | None = None
        self.processes = 0
        self.enabled = True
        """False while its machine is down."""
        self.gone = False
        """It has died for good."""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def asleep(self) -> bool:
        """Whole, or at one kind of step."""
        process = self.process
        return (
            process is not None
            and process.alive
            and any(until_s > self.world.now_s for until_s in process.asleep_until_s.values())
        )

    def start(self) -> None:
        """Nothing, if it runs, its machine is down, or it has died for good."""
        if self.enabled and not self.gone and not self.alive:
            self.processes += 1
            self.process = Process(self)

    def kill(self, why: str) -> None:
        if self.process is not None:
            self.process.kill(why)

    def end_for_good(self) -> None:
        """Nobody starts it any more."""
        self.gone = True
        self.kill("for good")

    def come_back(self) -> None:
        """After its end for good."""
        self.gone = False
        self.start()

    def terminate(self) -> None:
        """As by SIGTERM: it ends in good order."""
        if self.process is not None:
            self.process.stop.set()

    def process_ended(self) -> None:
        calm = self.world.calm
        pause_s = CALM_PAUSE_S if calm else self.world.within(CALM_PAUSE_S, self.longest_pause_s)
        self.world.at(pause_s, self.start)
