"""The contention-guard of a simulated cell: its own core, beside the placer's state. It takes no time."""

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.scheduling.acting.telemetry_windows import NodeWindow, matters, merged, window_of
from penstock.simulator.services.simulated_proposer import SimulatedProposer
from penstock_services.contention_guard.core.guard import Adjusting, ContentionGuard


class SimulatedGuard(SimulatedProposer[Adjusting]):
    """Implements `penstock.simulator.services.simulated_services.SimulatedService`."""

    def __init__(self) -> None:
        self.guard = ContentionGuard()
        super().__init__(self.guard)
        self._windows: dict[str, NodeWindow] = {}
        """The latest window of each node."""
        self._samples = 0

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
