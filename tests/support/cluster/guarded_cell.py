"""A cell whose contention-guard sees each fact at once, with nodes that obey and publish telemetry."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from penstock.model.decisions.adjustments import Enforcement, TaskAdjusted
from penstock.model.decisions.orders import SetBandwidth, SetCores
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.nodes import BandwidthCap, Isolation, NodeSpec
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting.telemetry_windows import WINDOW_MS, NodeWindow, merged, window_of
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, node_spec


class GuardedCell(CellDriver):
    """`obeys`: whether nodes answer orders, and can do what these ask for. `sends_first`: the guard sends all
    proposals of a moment before it reads an answer, as the service does; else each is answered at once, as in
    the simulator."""

    def __init__(
        self,
        contention: Contention | None = Contention(),  # noqa: B008 - immutable
        profile: str = "fifo",
    ) -> None:
        self.guard = ContentionGuard()
        self.obeys = True
        self.sends_first = False
        self.log_ahead_ms = 0
        """By how much the clock of telemetry's log is ahead of the ledger's."""
        self.windows: dict[tuple[str, int], NodeWindow] = {}
        self.proposals: list[CoresProposed | ThrottleProposed] = []
        self.samples = 0
        super().__init__(PlacerSettings(profile=profile, contention=contention))

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        for fact in step.facts:
            self.guard.see(self.state, fact, self.state.now_ms)
        return step

    def runs(self, job_id: str, *, gpus: int = 1, cores: int = 4) -> str:
        """Its task's id."""
        self.submit(job_id, need=estimate(gpus, cores=cores))
        self.start(job_id)
        return f"{job_id}.1.w0"

    def cores(self, task_id: str) -> int:
        """Which it may use."""
        return len(self.job(task_id.split(".")[0]).tasks[task_id].used_cores)

    def sends(self, node_id: str, task_id: str | None = None, **values: float | None) -> None:
        """A node publishes a sample now."""
        fields: dict[str, Any] = {"node_id": node_id, "task_id": task_id, **values}
        sample = TelemetrySampled(**fields, at_ms=0)
        self.samples += 1
        at_ms = self.now_ms + self.log_ahead_ms
        key = node_id, window_of(at_ms)
        before = self.windows.get(key, NodeWindow(*key))
        self.windows[key] = merged(before, f"s{self.samples}", at_ms, sample)
        self.guard.observe(self.state, self.windows[key], self.now_ms)

    def acts(self) -> list[CoresProposed | ThrottleProposed]:
        """What the guard proposes at this moment, each answered by the placer, and by the node if it
        obeys."""
        found: list[CoresProposed | ThrottleProposed] = []
        while sent := self._sent():
            found += sent
            assert len(found) < 1_000, "it proposes for ever"
            for proposal in sent:
                self.feed(proposal)
                if self.obeys:
                    self.obey()
        self.proposals += found
        return found

    def _sent(self) -> list[CoresProposed | ThrottleProposed]:
        """Proposals that are sent before the next answer."""
        found: list[CoresProposed | ThrottleProposed] = []
        while (proposal := self.guard.next(self.state, self.now_ms)) is not None:
            found.append(proposal)
            assert len(found) < 1_000, "it proposes for ever"
            if not self.sends_first:
                break
        return found

    def obey(self) -> None:
        for order in self.orders():
            if not isinstance(order, SetCores | SetBandwidth):
                continue
            cores = isinstance(order, SetCores)
            self.feed(
                TaskAdjusted(
                    node_id=order.node_id,
                    task_id=order.task_id,
                    token=self.job(order.task_id.split(".")[0]).token,
                    order_token=order.token,
                    what="cores" if cores else "memory_bandwidth",
                    enforced="cpuset" if cores else self.mechanism(order.node_id),
                )
            )

    def mechanism(self, node_id: str) -> Enforcement:
        """By which the node caps memory bandwidth; empty: it can't."""
        found = self.state.nodes[node_id].spec.bandwidth_cap
        return "" if found == "none" else found

    def passes(self, ms: int = WINDOW_MS) -> None:
        self.now_ms += ms
        self.feed_timers()

    def feed_timers(self) -> None:
        """Time passes for the ledger, too."""
        self.at(self.now_ms - 1_000_000)

    def trains(self, task_id: str, step_ms: Callable[[int], float], windows: int = 90) -> None:
        """It reports a step time in each window, by the cores that it may use; the guard acts after each."""
        for _ in range(windows):
            self.passes()
            place = self.job(task_id.split(".")[0]).tasks[task_id].place
            self.sends(place.node_id, task_id, step_ms=step_ms(self.cores(task_id)))
            self.acts()


def node(node_id: str = "n1", cores: int = 24, gpus: int = 4, *, caps: BandwidthCap = "none") -> NodeSpec:
    found = node_spec(node_id, gpus, cores=cores)
    isolation = Isolation(exits="pid_namespace", files=True, bandwidth=caps)
    return found if caps == "none" else replace(found, isolation=isolation)
