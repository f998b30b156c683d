"""Nodes that are kept for a job that was passed often: so long as it waits, and by the end that is expected
now."""

from penstock.model.inputs.external_events import JobHoldRequested
from penstock.model.nouns.settings import PlacerSettings
from tests.support.cluster.driver import CellDriver, estimate, eta, node_spec

HOUR_MS = 3_600_000


def kept() -> CellDriver:
    """A large job waits behind one that has 100 hours left, while small ones pass it for days."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 4))
    cell.submit("long", need=estimate(4))
    cell.start("long")
    cell.join(node_spec("n3", 4))
    cell.submit("other", need=estimate(4))
    cell.start("other")
    cell.join(node_spec("n2", 1))
    cell.feed(eta("other", cell.now_ms, 900 * HOUR_MS))
    cell.feed(eta("long", cell.now_ms, 100 * HOUR_MS))
    cell.submit("waits", need=estimate(4))
    for hour in range(1, 60):
        small(cell, hour)
    assert cell.state.planned["waits"].nodes == ("n1",)
    return cell


def small(cell: CellDriver, hour: int) -> None:
    cell.at(hour * HOUR_MS)
    cell.submit(f"small{hour}", need=estimate(1))
    cell.start(f"small{hour}")
    cell.exit(f"small{hour}.1.w0")


def test_nodes_are_kept_no_longer_for_a_job_that_is_held() -> None:
    """Its user stops it for a week; the next job that comes ends the reservation."""
    cell = kept()
    cell.feed(JobHoldRequested(job_id="waits", by="ada"))
    small(cell, 61)
    assert not cell.state.planned


def test_other_nodes_are_kept_where_the_first_do_not_come_free_as_expected() -> None:
    """The long job takes five times as long as it said, and another one will end before it."""
    cell = kept()
    cell.feed(eta("other", cell.now_ms, 100 * HOUR_MS))
    cell.at(110 * HOUR_MS)
    cell.feed(eta("long", cell.now_ms, 500 * HOUR_MS))
    small(cell, 120)
    assert cell.state.planned["waits"].nodes == ("n3",)
