"""Who takes turns, in the pictures of a ledger: members beside each other for as long as they share, and one
period of their group."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import GroupDecided, Turns
from penstock.model.nouns.types import StageTimes
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.simulator.report.charts import sections
from penstock.simulator.report.turns_chart import shares
from penstock.simulator.results.series import series_of
from penstock.simulator.results.sharings import ALONE, Sharings
from penstock.simulator.results.timeline import EXITED, SHARED, STILL, Timeline
from tests.support.cluster.driver import CellDriver, estimate, node_spec

LOADS = StageTimes(storage_ms=30.0, cpu_ms=10.0, gpu_ms=10.0, network_ms=0.0, iteration_ms=50.0)
COMPUTES = StageTimes(storage_ms=5.0, cpu_ms=5.0, gpu_ms=40.0, network_ms=0.0, iteration_ms=50.0)
TURNS = Turns(
    job_ids=("computes", "loads"),
    period_ms=70.0,
    efficiency=0.36,
    speeds=(0.7, 0.6),
    alternative="one after the other: 100 ms",
)


@pytest.fixture
def ledger() -> CellDriver:
    """Two jobs share a GPU from 10 s on; at 40 s one is done, and the other has the GPU alone until 60 s."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1))
    for job_id, stages in (("loads", LOADS), ("computes", COMPUTES)):
        cell.submit(job_id, need=msgspec.structs.replace(estimate(1), stages=stages))
    cell.start("loads")
    cell.at(10_000)
    together = tuple(ProposedJob(job_id=job_id, nodes=("n1",)) for job_id in ("loads", "computes"))
    unit = ProposedUnit(kind="group", jobs=together, turns=TURNS, explanation="they complement each other")
    step = cell.feed(PlanProposed(proposal_id="p", proposer="test", units=(unit,)))
    assert any(isinstance(fact, GroupDecided) for fact in step.facts)
    cell.start("computes")
    cell.at(40_000)
    cell.exit("loads.1.w0")
    cell.at(60_000)
    cell.submit("later")
    return cell


def test_members_lie_beside_each_other_as_long_as_they_share(ledger: CellDriver) -> None:
    timeline = Timeline()
    for value in ledger.values:
        timeline.take(value)
    series = series_of(timeline)
    gantt = series.gantt
    columns = (gantt.job, gantt.start_s, gantt.end_s, gantt.place, gantt.parts, gantt.how)
    bars = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert bars == [
        (0, 0.0, 10.0, 0, 1, SHARED),
        (0, 10.0, 40.0, 1, 2, EXITED),
        (1, 10.0, 40.0, 0, 2, SHARED),
        (1, 40.0, 60.0, 0, 1, STILL),
    ]
    told = sorted(shares(gantt, series.jobs))
    assert told[:2] == ["", ""]
    assert told[2].startswith(
        "job computes → job loads; efficiency 0.36; it runs at 60% of its speed alone; instead:"
    )
    [turns] = [section for section in sections([series]) if section.key == "turns"]
    [panel] = turns.drawings[0].panels
    assert panel.title == "A job computes (70%), B job loads (60%)"
    assert panel.caption.startswith("shared for 30 s")


def test_the_picture_is_one_period_of_equation_3(ledger: CellDriver) -> None:
    """Nobody has to wait for a resource that the other one uses."""
    timeline = Timeline()
    for value in ledger.values:
        timeline.take(value)
    [turns] = [section for section in sections([series_of(timeline)]) if section.key == "turns"]
    [panel] = turns.drawings[0].panels
    drawn = panel.chart.to_dict()
    [rows] = drawn["datasets"].values()
    for resource in ("storage", "CPU", "GPU"):
        spans = sorted((row["x"], row["x2"], row["member"]) for row in rows if row["resource"] == resource)
        assert {member for *_, member in spans} == {"A", "B"}
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=8), st.integers(0, 60), st.integers(0, 60)
)
def test_pieces_cover_the_time_without_gaps(changes: list[tuple[int, bool]], one: int, other: int) -> None:
    """Whoever comes and goes beside it."""
    sharings, cell = Sharings(), CellDriver()
    for job_id in ("a", "b"):
        cell.submit(job_id)
    jobs, state = cell.state.jobs, CellState()
    for at_ms, together in sorted(changes):
        state.groups = {"g": {name: jobs[name] for name in ("a", "b")}} if together else {}
        sharings.note(state, "g", at_ms)
    start, end = min(one, other), max(one, other)
    pieces = list(sharings.pieces("a", start, end))
    assert (pieces[0].start_ms, pieces[-1].end_ms) == (start, end)
    assert all(first.end_ms == second.start_ms for first, second in pairwise(pieces))
    assert all(piece.parts == (1 if piece.sharing == ALONE else 2) for piece in pieces)
