"""Stories of windows under a profile that regroups: who comes, and what is freed, waits for the batcher's
plan, and for a bounded time."""

from msgspec.structs import replace

from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened
from penstock.model.nouns.transitions import JobStatus
from tests.support.batching.small_stages import FirstFitRegroup, known_as
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.unit.scheduling.regrouping_plans import facts, made_way, plan, unit

WINDOW_MS = 5_000


def test_every_arrival_waits_for_the_plan_or_for_the_window_to_end() -> None:
    """With a window the first job waits for the plan, which starts it; the second one's plan never comes:
    when the time is over it is placed as usual."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(replace(settings, batch_window_ms=WINDOW_MS))
        cell.join(node_spec("n1"), node_spec("n2"))
        step = cell.submit("a", need=estimate(4))
        assert facts(step, BatchWindowOpened)
        assert facts(step, PlacementDecided) == []
        step = cell.feed(plan(unit("a", nodes=["n2"])))
        assert facts(step, BatchWindowClosed)[0].reason == "answered"
        assert [place.node_id for place in facts(step, PlacementDecided)[0].tasks] == ["n2"]
        cell.at(0)
        cell.start("a")
        cell.submit("b", need=estimate(4))
        assert cell.job("b").in_line
        cell.at(WINDOW_MS)
        assert cell.job("b").status is JobStatus.LAUNCHING


def test_an_end_opens_a_window_only_while_somebody_waits_and_not_for_who_made_way() -> None:
    """Two exits: the first with nobody waiting, the second with a job in the queue. What a stopped job leaves
    is the plan's by now."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(replace(settings, batch_window_ms=WINDOW_MS))
        cell.join(node_spec("n1"))
        cell.submit("a", need=estimate(4))
        cell.feed(plan(unit("a", nodes=["n1"]), name="p1"))
        cell.at(0)
        cell.start("a")
        assert facts(cell.exit("a.1.w0"), BatchWindowOpened) == []
        cell.submit("b", need=estimate(4))
        cell.feed(plan(unit("b", nodes=["n1"]), name="p2"))
        cell.at(0)
        cell.start("b")
        cell.submit("c", need=estimate(4))
        cell.feed(plan(unit("c", nodes=["n1"]), stops=["b"], name="p3"))
        cell.at(0)
        assert facts(made_way(cell, "b"), BatchWindowOpened) == []
        cell.start("c")
        assert facts(cell.exit("c.1.w0"), BatchWindowOpened)


def test_a_plan_that_changes_nothing_answers_the_window_and_leaves_the_queue_to_the_next_one() -> None:
    """A GPU is free, but the plan wants nobody on it: the job waits on, until something happens and no plan
    comes in time."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(replace(settings, batch_window_ms=WINDOW_MS))
        cell.join(node_spec("n1"))
        cell.submit("long", need=estimate(1))
        cell.feed(plan(unit("long", nodes=["n1"]), name="first"))
        cell.at(0)
        cell.start("long")
        cell.submit("a", need=estimate(1))
        step = cell.feed(plan(name="stay"))
        assert facts(step, BatchWindowClosed)[0].reason == "answered"
        cell.at(1_000)
        assert cell.job("a").in_line
        cell.submit("b", need=estimate(2))
        cell.at(1_000 + WINDOW_MS)
        assert {cell.job(name).status for name in "ab"} == {JobStatus.LAUNCHING}


def test_a_plan_that_starts_nobody_in_an_empty_cell_holds_up_nobody() -> None:
    """The stage finds no place for a job that fits: nothing would ever happen again, so it starts in the
    order of the profile."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(replace(settings, batch_window_ms=WINDOW_MS))
        cell.join(node_spec("n1"))
        cell.submit("a", need=estimate(1))
        cell.feed(plan(name="nobody"))
        cell.at(0)
        assert cell.job("a").status is JobStatus.LAUNCHING


def test_a_job_without_gpus_waits_for_no_plan() -> None:
    """Nobody plans it: it starts at once, also while what the latest plan said stands."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        cell = CellDriver(replace(settings, batch_window_ms=WINDOW_MS))
        cell.join(node_spec("n1"))
        assert facts(cell.submit("c", need=estimate(0)), PlacementDecided)
