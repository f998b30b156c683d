"""The administrator of a run: reads the remedy in a placer's last error, and carries it out."""

import re
from typing import TYPE_CHECKING

from penstock.errors import ConfigurationError, LogError
from penstock.model.schema.topics import Topic
from penstock.runtime.keys.signatures import SEED_BYTES
from penstock_services.placer.shell import service as placer
from penstock_services.placer.shell.accept import accept_input, accept_ledger
from penstock_services.placer.shell.term import Fenced
from tests.faults.laboratory.machines.log import Connection
from tests.faults.rules.findings import Violation

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

COMMAND = re.compile(r"`penstock-placer (accept-input (\S+) --from (\d+)|accept-ledger --epoch (\d+))`")
MAX_ACCEPTED = 40  # in one run, whose faults need 25 at most
READS_WITHIN_S = (1.0, 20.0)


class Administrator:
    """One for all placers; does one thing at a time."""

    def __init__(self, lab: "Laboratory") -> None:
        self._lab = lab
        self._world = lab.world
        self._busy = False
        self.accepted = 0

    def reads(self, error: ConfigurationError) -> None:
        """A placer ended with this message."""
        found = COMMAND.search(str(error))
        if found is None:
            raise Violation("crash", f"a placer stops, and names no remedy: {error}")
        if not self._busy:
            self._busy = True
            after_s = self._world.within(*READS_WITHIN_S)
            self._world.at(after_s, lambda: self._begin(*found.groups()))

    def _begin(self, what: str, topic: str | None, offset: str | None, epoch: str | None) -> None:
        self._world.trace(f"an operator enters: {what}")
        self._task = self._world.loop.create_task(
            self._accept(topic, offset, epoch), context=self._world.context
        )
        self._task.add_done_callback(lambda task: self._world.guarded(task.result))

    async def _accept(self, topic: str | None, offset: str | None, epoch: str | None) -> None:
        """What fails is said again by the next placer."""
        lab = self._lab
        start = placer.Start(
            f"operator-{self.accepted}",
            False,
            lab.load_replica,
            lab.newest_projected,
            bytes(SEED_BYTES),
            None,
        )
        try:
            log = Connection(lab.broker)
            if topic is None or offset is None:
                await accept_ledger(lab.settings, int(epoch or 0), "", log, start)
            else:
                await accept_input(lab.settings, Topic(topic), int(offset), "", log, start)
        except (ConfigurationError, Fenced, LogError) as error:
            self._world.trace(f"the operator's command fails: {error}")
            return
        finally:
            self._busy = False
        self.accepted += 1
        if self.accepted > MAX_ACCEPTED:
            raise Violation("liveness", "what operators accept is refused again and again")
        lab.resubmit()
        for service in (lab.estimator, *(node.reporter for node in lab.nodes.values())):
            service.kill("restarted by its operator")
