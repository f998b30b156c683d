"""Stories of waiting jobs: when one is expected to start, on whom it waits, and what is not known."""

from msgspec.structs import replace

from penstock.ledger.replica.snapshot import dump
from penstock.model.inputs.external_events import NodeCordoned
from penstock.model.proposals import MigrationProposed
from penstock.why.forecast import Holder, expected_start
from tests.support.cluster.driver import CellDriver, estimate, node_spec


def test_a_waiting_job_starts_when_enough_has_ended() -> None:
    """Two jobs hold the node: the one that waits for both starts with the later end, the one behind it after
    its own run."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=2))
    for name in ("a", "b"):
        cell.submit(name, need=estimate(1))
        cell.start(name)
    cell.submit("wide", need=replace(estimate(2), run_ms=30_000))
    cell.submit("next", need=estimate(2))
    state, now_ms = cell.state, cell.state.now_ms
    before = dump(state)
    ends_ms = {"a": now_ms + 10_000, "b": now_ms + 20_000}
    wide = expected_start(state, state.jobs["wide"], ends_ms, now_ms)
    assert wide is not None
    assert wide.starts_ms == now_ms + 20_000
    assert wide.holders == (
        Holder("a", "unknown", 1, now_ms + 10_000),
        Holder("b", "unknown", 1, now_ms + 20_000),
    )
    behind = expected_start(state, state.jobs["next"], ends_ms, now_ms)
    assert behind is not None
    assert behind.starts_ms == now_ms + 50_000
    late = expected_start(state, state.jobs["wide"], ends_ms | {"a": now_ms - 5_000}, now_ms)
    assert late is not None
    assert late.starts_ms == now_ms + 20_000, "overdue ones are taken to end now"
    assert dump(state) == before, "a question changes nothing"
    assert expected_start(state, state.jobs["a"], ends_ms, now_ms) is None, "it does not wait"


def test_what_is_not_known_is_named() -> None:
    """One of the running jobs reports nothing and was never seen before."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=2))
    for name in ("a", "b"):
        cell.submit(name, need=estimate(1))
        cell.start(name)
    cell.submit("wide", need=estimate(2))
    cell.submit("small", need=estimate(1))
    state, now_ms = cell.state, cell.state.now_ms
    found = expected_start(state, state.jobs["wide"], {"a": now_ms + 10_000}, now_ms)
    assert found is not None
    assert (found.starts_ms, found.unknown) == (
        None,
        "the remaining time of 1 of 2 running jobs is not known",
    )
    assert [holder.ends_ms for holder in found.holders] == [now_ms + 10_000, None]
    small = expected_start(state, state.jobs["small"], {"a": now_ms + 10_000}, now_ms)
    assert small is not None
    assert small.starts_ms == now_ms + 10_000, "what does not fit holds nothing up"


def test_a_target_that_is_kept_for_a_move_is_free_when_its_job_has_ended() -> None:
    """A job moves to the only node that could hold the one that waits: that one waits for the end of the job,
    not for ever."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=2), node_spec("n2", gpus=4))
    cell.submit("b", need=estimate(4))
    cell.start("b")
    cell.submit("a", need=estimate(2))
    cell.start("a")
    cell.exit("b.1.w0")
    about = {"proposal_id": "m", "proposer": "migrator", "reason": "its fans are loud"}
    cell.feed(MigrationProposed(**about, job_id="a", nodes=("n2",)))
    cell.feed(NodeCordoned(node_id="n1", by="ops/ana", drain=False, reason="its fans are loud"))
    cell.submit("wide", need=estimate(4))
    state, now_ms = cell.state, cell.state.now_ms
    found = expected_start(state, state.jobs["wide"], {"a": now_ms + 10_000}, now_ms)
    assert found is not None
    assert found.starts_ms == now_ms + 10_000
    assert found.holders == (Holder("a", "unknown", 2, now_ms + 10_000),)
