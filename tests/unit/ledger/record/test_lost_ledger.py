"""A ledger that has lost records: noticed by whoever has read more, and no node of before it is proven dead
by it."""

import asyncio

import pytest

from penstock.errors import ConfigurationError
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.state.lease import lease_of
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import LedgerAccepted
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.schema.topics import Topic
from penstock.runtime.following.snapshots import Written
from penstock_services.placer.shell.history import check_ledger
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog

LEDGER = Partition(Topic.LEDGER, 0)


def cell() -> CellDriver:
    found = CellDriver()
    found.feed(NodeJoined(node=node_spec("n1"), incarnation=1, leases=True))
    found.submit("j")
    return found


@pytest.mark.parametrize("left", [1, 2])
def test_a_placer_that_has_read_more_than_there_is_does_not_go_on(left: int) -> None:
    """The volume is restored from last night: the ledger ends early, or with another record at that
    offset."""
    history = cell()
    broker = MemoryBroker()
    broker.create({str(Topic.LEDGER): 1})
    log = MemoryLog(broker)
    values = history.values[:left]
    broker.append("placer", [Message(LEDGER, value) for value in values])
    seen = Written(history.head, len(history.values) - 1, 0)
    with pytest.raises(
        ConfigurationError, match=r"has lost records: record 4 .* where there is no record now"
    ):
        asyncio.run(check_ledger(log, LEDGER, 0, [seen]))
    others = len(history.values) - left
    broker.append("placer", [Message(LEDGER, history.values[0])] * others)
    with pytest.raises(ConfigurationError, match="has lost records"):
        asyncio.run(check_ledger(log, LEDGER, 0, [seen]))


def test_a_node_that_has_not_joined_since_is_not_proven_dead() -> None:
    """A restored ledger knows nothing of what the node was ordered in the records that are lost: its longest
    lease is unknown until it joins anew."""
    history = cell()
    state = history.state
    assert lease_of(state.nodes["n1"], state) == state.settings.lease_ms
    evolve(state, LedgerAccepted(epoch=1, nodes_offset=1, reason="restored"))
    assert lease_of(state.nodes["n1"], state) is None
