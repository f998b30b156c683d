"""The contention-guard of a simulated cell: its own core, beside the placer's state. It takes no time."""

from penstock.ledger.state import CellState
from penstock.model.external_events import TelemetrySampled
from penstock.policies.telemetry_windows import NodeWindow, matters, merged, window_of
from penstock_services.contention_guard.core.guard import Adjusting, ContentionGuard
from penstock_services.placer.core.step import Step


class SimulatedGuard:
    """Implements `penstock.simulator.simulated_services.SimulatedService`."""

    def __init__(self) -> None:
        self.guard = ContentionGuard()
        self._windows: dict[str, NodeWindow] = {}
        """The latest window of each node."""
        self._samples = 0

    def see(self, state: CellState, step: Step) -> None:
        """See `SimulatedService`."""
        if step.outcome == "committed":
            for fact in step.facts:
                self.guard.see(state, fact, state.now_ms)

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """See `SimulatedService`."""
        if not matters(sample):
            return
        begin_ms = window_of(now_ms)
        window = self._windows.get(sample.node_id)
        if window is None or window.begin_ms != begin_ms:
            window = NodeWindow(sample.node_id, begin_ms)
        self._samples += 1
        window = merged(window, f"{self._samples:020}", now_ms, sample)
        self._windows[sample.node_id] = window
        self.guard.observe(state, window, now_ms)

    def next_s(self, state: CellState) -> float | None:
        """See `SimulatedService`."""
        due_ms = self.guard.due_ms(state)
        return None if due_ms is None else due_ms / 1_000

    def due(self, state: CellState, now_s: float, now_ms: int) -> Adjusting | None:
        """See `SimulatedService`."""
        return self.guard.next(state, now_ms)
