"""Stories of plans under a profile that regroups: running jobs make way, leave one group and join another,
and nobody is stopped in vain."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.groups import GroupDecided
from penstock.model.decisions.ledger_events import (
    JobPreempted,
    JobRank,
    JobsRanked,
    PlacementDecided,
    ProposalAnswered,
)
from penstock.model.decisions.plans import PlanAdopted
from penstock.model.inputs.external_events import JobCancelRequested, JobProgress, WorkProgressed
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.proposals import plan_stops
from penstock.scheduling.groups.group_plan import group_plan as nodes_and_stops
from penstock.scheduling.remaining_time import remaining_s
from penstock.scheduling.stages.regroup import Answer, PlannedGroup
from penstock.why.explain import explain
from penstock_services.gateway.core.forecasts.eta import ends_ms
from tests.support.batching.small_stages import FirstFitRegroup, known_as
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.scheduling.regrouping_plans import facts, made_way, plan, running, timed, turns, unit


@pytest.fixture
def cell() -> Iterator[CellDriver]:
    """Two nodes of four GPUs."""
    with known_as("regroups", regroup=FirstFitRegroup()) as settings:
        driver = CellDriver(settings)
        driver.join(node_spec("n1"), node_spec("n2"))
        yield driver


def test_a_running_job_makes_way_and_the_other_starts_after_it(cell: CellDriver) -> None:
    """`long` has n1. The plan wants `short` there: `long` is stopped in the same record, waits again, and
    `short` is ordered to start after it."""
    running(cell, "long", "other")
    cell.submit("short", need=estimate(4))
    step = cell.feed(plan(unit("short", nodes=["n1"]), stops=["long"]))
    [preempted] = facts(step, JobPreempted)
    assert (preempted.job_id, preempted.by_job_id) == ("long", "short")
    assert preempted.reason == "plan of batcher: alone"
    [placed] = facts(step, PlacementDecided)
    assert (placed.job_id, placed.after) == ("short", ("long",))
    made_way(cell, "long")
    cell.start("short")
    assert cell.job("long").in_line
    assert cell.job("long").retries.infrastructure == 1
    assert cell.job("short").status is JobStatus.RUNNING


def test_nobody_is_stopped_for_somebody_who_cannot_start(cell: CellDriver) -> None:
    """`wide` needs eight cores beyond what the node has even when `long` has ended: its unit is refused, and
    `long` runs on."""
    running(cell, "long", "other")
    cell.submit("wide", need=estimate(4, cores=1_000))
    step = cell.feed(plan(unit("wide", nodes=["n1"]), stops=["long"]))
    assert facts(step, JobPreempted) == []
    [answer] = facts(step, ProposalAnswered)
    assert answer.verdict == "refused"
    assert cell.job("long").status is JobStatus.RUNNING


@pytest.mark.parametrize("named", ["other", "ghost", "short"])
def test_a_stop_that_helps_nobody_is_left_out(cell: CellDriver, named: str) -> None:
    """The plan names who runs elsewhere, who does not exist, who waits: only who stands in the way is
    stopped."""
    running(cell, "long", "other")
    cell.submit("short", need=estimate(4))
    step = cell.feed(plan(unit("short", nodes=["n1"]), stops=[named, "long"]))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["long"]


def test_who_may_not_be_stopped_is_not(cell: CellDriver) -> None:
    """Its owner said so; the unit that counted on its GPUs is refused."""
    cell.submit("firm", job_spec(preemptible=False), estimate(4))
    cell.start("firm")
    running(cell, "other")
    cell.submit("short", need=estimate(4))
    step = cell.feed(plan(unit("short", nodes=["n1"]), stops=["firm"]))
    assert facts(step, JobPreempted) == []
    assert facts(step, ProposalAnswered)[0].verdict == "refused"


def test_of_those_on_a_node_no_more_are_stopped_than_the_unit_needs(cell: CellDriver) -> None:
    """Four small jobs have n1, and the plan names all of them, since it counted on a second unit that has
    ended meanwhile. One GPU is wanted: the first one named makes way, and the answer says that the others run
    on."""
    running(cell, "s1", "s2", "s3", "s4", gpus=1)
    running(cell, "other")
    cell.submit("short", need=estimate(1))
    named = ["s3", "s1", "s2", "s4"]
    step = cell.feed(plan(unit("short", nodes=["n1"]), unit("ghost", nodes=["n1"]), stops=named))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["s3"]
    [answer] = facts(step, ProposalAnswered)
    assert (answer.started, answer.stopped) == (1, 1)
    assert [(found.job_id, found.reason) for found in answer.not_stopped] == [
        (job_id, "infeasible") for job_id in ("s1", "s2", "s4")
    ]
    assert {found.detail for found in answer.not_stopped} == {"no unit that can start needs its place"}


def test_all_members_of_a_group_make_way_where_their_gpus_are_wanted(cell: CellDriver) -> None:
    """`a` and `b` take turns on n1. Who ends first frees no GPU; then `short` is ordered to start after the
    other."""
    running(cell, "a", "other")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    cell.submit("short", need=estimate(4))
    step = cell.feed(plan(unit("short", nodes=["n1"]), stops=["a", "b"]))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["a", "b"]
    assert cell.job("short").in_line
    made_way(cell, "a")
    assert (cell.job("short").status, cell.job("short").succession.after) == (JobStatus.LAUNCHING, ("b",))


def test_of_a_group_the_member_makes_way_whose_place_is_wanted(cell: CellDriver) -> None:
    """`c` is to take turns with `a` in place of `b`: `b` shares the GPUs, is not named in the unit, and is
    stopped though that frees no GPU. `c` need not wait for it."""
    running(cell, "a", "other")
    for job_id in "bc":
        cell.submit(job_id, need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    step = cell.feed(plan(unit("a", "c", nodes=["n1"]), stops=["b"]))
    assert [(fact.job_id, fact.by_job_id) for fact in facts(step, JobPreempted)] == [("b", "a")]
    [decided] = facts(step, GroupDecided)
    assert decided.job_ids == ("a", "c")
    made_way(cell, "b")
    assert set(cell.state.groups[decided.group_id]) == {"a", "c"}
    assert cell.job("a").attempt == 1


def test_each_stop_that_is_refused_has_its_reason(cell: CellDriver) -> None:
    """The plan was computed on another state: who is named has ended, waits, is being stopped already, or may
    not be stopped."""
    cell.submit("firm", job_spec(preemptible=False), estimate(2))
    cell.start("firm")
    running(cell, "leaves", gpus=2)
    running(cell, "long")
    cell.feed(JobCancelRequested(job_id="leaves", reason="enough"))
    cell.submit("short", need=estimate(4))
    named = ["gone", "short", "leaves", "firm", "long"]
    step = cell.feed(plan(unit("short", nodes=["n2"]), stops=named))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["long"]
    [answer] = facts(step, ProposalAnswered)
    assert [(found.reason, found.detail) for found in answer.not_stopped] == [
        ("unknown_job", "gone is unknown"),
        ("wrong_state", "short is queued, and does not run"),
        ("wrong_state", "leaves is being stopped already: cancelled"),
        ("wrong_state", "firm may not be stopped: preemptible is false"),
    ]


def test_a_plan_stops_no_more_than_one_record_holds(
    cell: CellDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes are to be cleared, and one stop is the bound here: the first unit gets its node, the second
    one is told to come again."""
    monkeypatch.setattr(plan_stops, "MAX_STOPS", 1)
    running(cell, "a", "b")
    for job_id in "cd":
        cell.submit(job_id, need=estimate(4))
    both = unit("c", nodes=["n1"]), unit("d", nodes=["n2"])
    step = cell.feed(plan(*both, stops=["a", "b"]))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["a"]
    [answer] = facts(step, ProposalAnswered)
    assert [found.unit for found in answer.refused] == [1]
    assert answer.not_stopped[0].detail.endswith("are stopped in one record; propose it again")


@pytest.mark.parametrize(
    "more", [{"stops": ["long"]}, {"ranks": (JobRank(job_id="long", level=0, chosen=True, position=1),)}]
)
def test_only_the_batcher_says_who_runs(cell: CellDriver, more: dict[str, Any]) -> None:
    """A plan of somebody else may start jobs as ever, and neither stops nor ranks any."""
    running(cell, "long", "other")
    cell.submit("short", need=estimate(4))
    step = cell.feed(replace(plan(unit("short", nodes=["n1"]), **more), proposer="grouper"))
    [answer] = facts(step, ProposalAnswered)
    assert (answer.reason, answer.detail) == (
        "unsupported",
        "only plans of batcher stop running jobs, or rank jobs",
    )
    assert cell.job("long").status is JobStatus.RUNNING


def test_turns_of_strangers_are_refused(cell: CellDriver) -> None:
    """A batcher with a bug names a job that has ended, or that is in no group: the unit is refused, and the
    placer goes on."""
    running(cell, "a", "other")
    cell.submit("b", need=estimate(4))
    ghost = replace(unit("a", "b", nodes=["n1"]), turns=turns("a", "ghost"))
    alone = replace(unit("b", nodes=["n1"]), turns=turns("b", "a"))
    for number, wrong in enumerate((ghost, alone)):
        [answer] = facts(cell.feed(plan(wrong, name=f"wrong-{number}")), ProposalAnswered)
        assert (answer.verdict, answer.reason) == ("refused", "invalid")
    assert cell.job("b").in_line


def test_who_stay_take_other_turns_when_one_of_them_leaves(cell: CellDriver) -> None:
    """`a`, `b` and `c` take turns on n1, and n2 has become free: `c` moves there, and in the same record `a`
    and `b` have the turns of two. Where `c` cannot move, it stays, and so do the turns of three."""
    running(cell, "a", "other")
    for job_id in "bc":
        cell.submit(job_id, need=estimate(4))
    cell.feed(plan(unit("a", "b", "c", nodes=["n1"]), name="p0"))
    for job_id in "bc":
        cell.start(job_id)
    wanted = unit("a", "b", nodes=["n1"]), unit("c", nodes=["n2"])
    step = cell.feed(plan(*wanted, stops=["c"], name="p1"))
    assert facts(step, GroupDecided) == facts(step, JobPreempted) == []
    cell.exit("other.1.w0")
    step = cell.feed(plan(*wanted, stops=["c"], name="p2"))
    assert [fact.job_ids for fact in facts(step, GroupDecided)] == [("a", "b")]
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["c"]
    assert cell.job("a").sharing.turns == turns("a", "b")
    made_way(cell, "c")
    assert cell.job("c").status is JobStatus.LAUNCHING


def test_the_same_turns_again_change_nothing(cell: CellDriver) -> None:
    """The batcher proposes once more what has been done: refused, and no fact is written."""
    running(cell, "a", "other")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    step = cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p1"))
    assert facts(step, GroupDecided) == []
    assert facts(step, ProposalAnswered)[0].detail == "they share these GPUs already, in these turns"


def test_people_are_told_with_whom_a_job_takes_turns(cell: CellDriver) -> None:
    """`penstock why a`: the group, the rotation, the efficiency, its own speed, and what else was
    considered."""
    running(cell, "a", "other")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    group = cell.job("a").sharing.group
    assert explain(cell.state, "a").text == (
        f"It runs on n1. It takes turns there with b, as {group}, in the order a, b. One iteration of "
        "each takes 100 ms, efficiency 0.70. Expected: 50% of its speed alone. Considered: apart: 10 % less."
    )


def test_the_end_of_a_member_is_expected_by_its_speed(cell: CellDriver) -> None:
    """`a` needs 100 s alone and runs at half speed from the beginning: it is expected to end after 200 s,
    also when half of that is over."""
    running(cell, "other")
    cell.submit("a", need=replace(estimate(4), run_ms=100_000))
    cell.start("a")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n2"]), name="p0"))
    began_ms = cell.state.now_ms
    assert ends_ms(cell.job("a"), began_ms) == began_ms + 200_000
    assert ends_ms(cell.job("a"), began_ms + 100_000) == began_ms + 200_000


def test_a_plan_with_stops_is_refused_where_the_profile_does_not_regroup() -> None:
    """Under `fifo` a proposer may not stop anybody."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    running(cell, "long")
    cell.submit("short", need=estimate(4))
    step = cell.feed(plan(unit("short", nodes=["n1"]), stops=["long"]))
    [answer] = facts(step, ProposalAnswered)
    assert (answer.verdict, answer.reason) == ("refused", "unsupported")
    assert cell.job("long").status is JobStatus.RUNNING


def test_a_job_leaves_its_group_and_joins_another(cell: CellDriver) -> None:
    """`a` and `b` take turns on n1, `c` has n2. The plan wants `b` with `c`: `b` alone is stopped, `a` and
    `c` run on, and `b` starts beside `c` when it has ended."""
    running(cell, "a", "c")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    assert cell.job("a").pace.speed == 0.5
    step = cell.feed(plan(unit("c", "b", nodes=["n2"]), stops=["b"]))
    assert [(fact.job_id, fact.by_job_id) for fact in facts(step, JobPreempted)] == [("b", "c")]
    assert facts(step, ProposalAnswered)[0].waiting == 1
    assert load(dump(cell.state)).planned == cell.state.planned
    step = made_way(cell, "b")
    [decided] = facts(step, GroupDecided)
    assert decided.job_ids == ("c", "b")
    assert decided.turns == turns("c", "b")
    [placed] = facts(step, PlacementDecided)
    assert [place.node_id for place in placed.tasks] == ["n2"]
    cell.start("b")
    assert {job_id: cell.job(job_id).pace.speed for job_id in "abc"} == {"a": 1.0, "b": 0.5, "c": 0.5}
    assert cell.job("a").attempt == cell.job("c").attempt == 1


def test_two_who_run_alone_share_so_that_a_third_has_room(cell: CellDriver) -> None:
    """`a` has n1, `b` has n2, `big` waits for four GPUs. `b` joins `a`, and `big` gets n2: one restart, in
    one plan."""
    running(cell, "a", "b")
    cell.submit("big", need=estimate(4))
    step = cell.feed(plan(unit("a", "b", nodes=["n1"]), unit("big", nodes=["n2"]), stops=["b"]))
    assert [fact.job_id for fact in facts(step, JobPreempted)] == ["b"]
    made_way(cell, "b")
    for job_id in ("b", "big"):
        cell.start(job_id)
    assert cell.job("b").sharing.group == cell.job("a").sharing.group != ""
    assert [task.place.node_id for task in cell.job("big").tasks.values()] == ["n2"]
    assert cell.job("a").attempt == 1


def test_a_unit_is_given_up_where_a_member_was_done_before_its_stop(cell: CellDriver) -> None:
    """`b` ends by itself just before SIGTERM reaches it: nothing is kept for the group that it was to
    join."""
    running(cell, "a", "b")
    cell.submit("big", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), stops=["b"]))
    cell.exit("b.1.w0", 0)
    assert "b" not in cell.state.jobs
    assert not cell.state.planned


def test_a_cancelled_member_that_makes_way_frees_what_was_kept(cell: CellDriver) -> None:
    """Its user cancels `b` while it saves: the unit is given up when it has ended, and others may have the
    node."""
    running(cell, "a", "b")
    cell.submit("big", need=estimate(4))
    cell.feed(plan(unit("b", nodes=["n2"]), unit("big", nodes=["n2"]), stops=["b"]))
    cell.feed(JobCancelRequested(job_id="b", reason="not needed"))
    made_way(cell, "b")
    assert all(unit.job_id != "b" for unit in cell.state.planned.values())


def test_other_turns_of_the_same_members_are_only_written_down(cell: CellDriver) -> None:
    """A new profile of a member changes the rotation: one fact, nobody is touched."""
    running(cell, "a", "c")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    other = replace(unit("a", "b", nodes=["n1"]), turns=turns("b", "a", speed=0.8))
    step = cell.feed(plan(other))
    [decided] = facts(step, GroupDecided)
    assert (decided.group_id, decided.turns) == (cell.job("a").sharing.group, other.turns)
    assert facts(step, PlacementDecided) == []
    assert cell.job("b").pace.speed == 0.8


def test_what_is_left_of_a_member_falls_at_its_own_speed(cell: CellDriver) -> None:
    """`a` needs 100 s alone. After 10 s `b` joins it and both run at half speed: after 20 s more `a` has done
    20 s of work; when `b` has ended it is as fast as before."""
    running(cell, "c")
    cell.submit("a", need=replace(estimate(4), run_ms=100_000))
    cell.start("a")
    cell.submit("b", need=estimate(4))
    cell.at(10_000)
    cell.feed(plan(unit("a", "b", nodes=["n2"]), name="p0"))
    cell.start("b")
    cell.at(30_000)
    cell.exit("b.1.w0", 0)
    assert remaining_s(cell.state, cell.job("a")) == pytest.approx(80)
    cell.at(40_000)
    cell.submit("later", need=estimate(4))
    assert remaining_s(cell.state, cell.job("a")) == pytest.approx(70)
    cell.feed(
        WorkProgressed(node_id="n2", jobs=(JobProgress(job_id="a", attained_s=40.0, remaining_s=65.0),))
    )
    assert remaining_s(cell.state, cell.job("a")) == pytest.approx(65)


def test_the_order_of_the_stage_is_written_down(cell: CellDriver) -> None:
    """Ranks of a plan without units: the next plan finds them; jobs that have ended meanwhile are passed
    over."""
    running(cell, "a")
    ranks = [JobRank(job_id=job_id, level=0, chosen=True, position=7) for job_id in ("a", "gone")]
    step = cell.feed(plan(ranks=tuple(ranks)))
    assert facts(step, JobsRanked) == [JobsRanked(ranks=(ranks[0],))]
    assert cell.job("a").rank == (0, 0, 7)


def test_groups_become_nodes_and_as_few_stops_as_possible(cell: CellDriver) -> None:
    """The answer wants `a` with `b` and `big` alone: `b` joins `a` where `a` is, and `big` gets what `b`
    leaves. Carried out, the same answer asks for nothing more."""
    running(cell, "a", "b")
    cell.submit("big", need=estimate(4))
    answer = Answer((PlannedGroup(("a", "b"), turns("a", "b")), PlannedGroup(("big",))))
    found = nodes_and_stops(cell.state, answer)
    assert tuple(found.stops) == ("b",)
    assert [[job.job_id for job in one.jobs] for one in found.units] == [["a", "b"], ["big"]]
    cell.feed(plan(*found.units, stops=found.stops))
    made_way(cell, "b")
    for job_id in ("b", "big"):
        cell.start(job_id)
    again = nodes_and_stops(cell.state, answer)
    assert (list(again.units), tuple(again.stops)) == ([], ())


def test_two_who_share_move_apart(cell: CellDriver) -> None:
    """`a` and `b` take turns on n1, and n2 has become free: one of them stays, the other one starts on n2."""
    running(cell, "a", "c")
    cell.submit("b", need=estimate(4))
    cell.feed(plan(unit("a", "b", nodes=["n1"]), name="p0"))
    cell.start("b")
    cell.exit("c.1.w0")
    found = nodes_and_stops(cell.state, Answer((PlannedGroup(("a",)), PlannedGroup(("b",)))))
    assert tuple(found.stops) == ("b",)
    assert [[(job.job_id, job.nodes) for job in one.jobs] for one in found.units] == [[("b", ("n2",))]]
    cell.feed(plan(*found.units, stops=found.stops))
    made_way(cell, "b")
    cell.start("b")
    assert cell.job("a").pace.speed == cell.job("b").pace.speed == 1.0


def test_small_jobs_move_together_so_that_a_large_one_fits(cell: CellDriver) -> None:
    """A GPU of each node is taken, so nowhere are four free, though six are: the plan moves one of the small
    jobs beside the other."""
    running(cell, "a", gpus=1)
    cell.submit("filler", need=estimate(3))
    cell.start("filler")
    running(cell, "b", gpus=1)
    cell.exit("filler.1.w0")
    cell.submit("big", need=estimate(4))
    answer = Answer((PlannedGroup(("a",)), PlannedGroup(("b",)), PlannedGroup(("big",))))
    found = nodes_and_stops(cell.state, answer)
    assert len({task.place.node_id for job_id in "ab" for task in cell.job(job_id).tasks.values()}) == 2
    [moved] = found.stops
    [goes] = [job.nodes for one in found.units for job in one.jobs if job.job_id == moved]
    stays = "b" if moved == "a" else "a"
    assert goes == tuple(task.place.node_id for task in cell.job(stays).tasks.values())
    cell.feed(plan(*found.units, stops=found.stops))
    made_way(cell, moved)
    for job_id in (moved, "big"):
        cell.start(job_id)


def test_an_answer_that_is_out_of_date_stops_nobody(cell: CellDriver) -> None:
    """Everybody whom it wants to run has ended: there is nothing to make way for."""
    running(cell, "a", "b")
    answer = Answer((PlannedGroup(("ghost",)), PlannedGroup(("a",))))
    found = nodes_and_stops(cell.state, answer)
    assert (list(found.units), tuple(found.stops)) == ([], ())
    assert PlanAdopted not in {type(fact) for fact in cell.feed(plan(name="p9")).facts}


def test_reservations_bind_all_plans_but_those_of_the_batcher() -> None:
    """The default profile has reserved both nodes for a gang that has waited for weeks. The batcher's plan is
    for the whole cell, in an order in which the gang has its place, so it may form a group there; a plan of
    another proposer may not."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1"), node_spec("n2"))
    for job_id in ("runs", "other"):
        cell.submit(job_id, job_spec(checkpoint="signal"), timed(3, 10_000_000))
        cell.start(job_id)
    cell.submit("gang", job_spec(workers=2, checkpoint="signal"), timed(4, 60_000))
    cell.at(cell.now_ms + 1_000 * 3_600_000)
    for job_id in ("a", "b"):
        cell.submit(job_id, job_spec(checkpoint="signal"), timed(1, 60_000))
    assert cell.state.planned["gang"].expected_ms is not None
    assert not cell.job("a").tasks
    proposed = plan(unit("a", "b", nodes=["n1"]))
    step = cell.feed(replace(proposed, proposer="another"))
    assert "is reserved for gang" in facts(step, ProposalAnswered)[0].detail
    step = cell.feed(replace(proposed, proposal_id="p2"))
    assert facts(step, ProposalAnswered)[0].verdict == "accepted"
    assert {placed.job_id for placed in facts(step, PlacementDecided)} == {"a", "b"}
