"""The digest of the folded state: the same for all who folded the same, another one for who did not."""

from msgspec.structs import replace

from penstock.ledger.record.record import Draft, Head, read_valid, write
from penstock.ledger.replica import digest as digests
from penstock.ledger.replica.digest import DIGEST_EVERY, WINDOW, difference, digest, restated, round_of
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.external_events import NodeCordoned
from tests.support.cluster.driver import CellDriver, job_spec, node_spec

JOBS = 3 * WINDOW + 7


def cell_of(jobs: int) -> CellDriver:
    cell = CellDriver()
    cell.join(node_spec("n1", 4), node_spec("n2", 2))
    for number in range(jobs):
        cell.submit(f"j{number}", job_spec())
    return cell


def test_placer_reader_and_snapshot_have_the_same() -> None:
    """A placer decides, a reader folds its records, a third one starts from a snapshot: each in its own
    way."""
    cell = cell_of(9)
    cell.start("j0")
    cell.exit("j0.1.w0", 0)
    read = Replica()
    for offset, value in enumerate(cell.values):
        read.take(value, offset)
    assert digest(read.state) == digest(cell.state) == digest(load(dump(cell.state)))


def test_whatever_differs_shows_within_a_round() -> None:
    """One field of one job, anywhere in a queue that is larger than a window."""
    state = cell_of(JOBS).state
    other = load(dump(state))
    for number in (0, WINDOW - 1, WINDOW, JOBS - 1):
        job = other.jobs[f"j{number}"]
        job.backfill_count += 1
        seen = 0
        for turn in range(round_of(state) // DIGEST_EVERY):
            state.seq = other.seq = turn * DIGEST_EVERY
            seen += digest(other) != digest(state)
        assert seen == 1, number
        job.backfill_count -= 1
    assert digest(other) == digest(state)


def test_a_reader_compares_what_its_placer_states() -> None:
    """Only a digest of its own format, and not where an operator has amended the record."""
    cell = cell_of(2)
    stated = digest(cell.state)
    _, value = write(
        Head(0, "0" * 32, 1), Draft(1, 1, {"timer_id": "x"}, "committed", None, (), digest=stated)
    )
    assert b'"digest":"' in value
    found = read_valid(Head(0, "0" * 32, 1), value)
    assert found is not None
    record = found[1]
    assert difference(cell.state, record) == ""
    cell.feed(NodeCordoned(node_id="n1", by="ada", reason="fans"))
    assert difference(cell.state, record) == digest(cell.state) != stated
    assert difference(cell.state, replace(record, amended=b"{}")) == ""
    assert difference(cell.state, replace(record, digest="41-0123456789abcdef-00")) == ""
    assert restated(cell.state, "") == ""


def test_a_record_without_a_digest_is_written_as_before() -> None:
    """Ledgers of earlier versions are decided again byte for byte."""
    assert b'"digest"' not in b"".join(cell_of(1).values)
    assert digests.DIGEST_EVERY > len(cell_of(1).values)
