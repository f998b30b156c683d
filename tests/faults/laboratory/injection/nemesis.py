"""Nemesis: the fault injector. Chooses one fault after another until the calm phase."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tests.faults.laboratory.injection.machine_faults import MachineFaults
from tests.faults.laboratory.injection.message_faults import MessageFaults
from tests.faults.laboratory.injection.service_faults import ServiceFaults

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory


class Nemesis(ServiceFaults, MachineFaults, MessageFaults):
    """Acts on a laboratory every so often; `happened` counts by name."""

    def __init__(self, lab: "Laboratory", faults: tuple[str, ...], every_s: float) -> None:
        super().__init__(lab)
        self._every_s = every_s
        self._faults = [name for name in FAULTS if name in faults and name not in RATES]
        self.happened: dict[str, int] = {}
        if self._faults:
            self._next()

    def _next(self) -> None:
        self._world.at(self._world.within(0, 2 * self._every_s), self._strike)

    def _strike(self) -> None:
        if self._world.calm:
            return
        name = self._faults[int(self._world.rng.integers(len(self._faults)))]
        self.happened[name] = self.happened.get(name, 0) + 1
        FAULTS[name](self)
        self._next()


def _rate(nemesis: Nemesis) -> None:
    """Is there all the time; see `Rates`."""


RATES = ("late", "twice", "steps", "append", "policy", "extremes")
FAULTS: Mapping[str, Callable[[Nemesis], None]] = MappingProxyType(
    dict.fromkeys(RATES, _rate)
    | {
        name: getattr(Nemesis, name)
        for name in (
            "crash",
            "upgrade",
            "zombie",
            "rival",
            "duel",
            "clock",
            "years",
            "outage",
            "retention",
            "inputs",
            "ledger",
            "reboot",
            "power",
            "gone",
            "vanish",
            "silence",
            "hang",
            "disk",
            "full",
            "sync",
            "false_report",
            "gpu",
            "cards",
            "shim",
            "launcher",
            "drain",
            "cordon",
            "garbage",
            "wrong_progress",
            "duplicate",
            "cancel",
            "hold",
            "sleeper",
            "stranger",
            "propose",
            "stall",
            "adjust",
            "move",
            "group",
            "save",
            "overtake",
            "slow_start",
        )
    }
    | {"prelaunch": _rate}
)
"""All kinds of faults, by the names that `--faults` takes. `steps`: services are killed between any two
steps."""
