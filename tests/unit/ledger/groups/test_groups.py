"""Stories of groups: jobs that hold the same GPUs and cores and run on them in turns. Nobody else gets in,
and who runs is not restarted."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.cli.queries.tables import gpu_state
from penstock.cluster.reasons import Refusal
from penstock.cluster.view import ClusterView
from penstock.ledger.check.check import check
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.views import gpu_use
from penstock.model.decisions.adjustments import CoresDecided
from penstock.model.decisions.groups import GroupDecided
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered
from penstock.model.decisions.orders import Companion, StartTask
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    NodeChanged,
    NodeCordoned,
    NodeJoined,
)
from penstock.model.nouns.nodes import Isolation
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.proposals import (
    CoresProposed,
    MigrationProposed,
    PlanProposed,
    ProposedJob,
    ProposedUnit,
)
from penstock.model.schema.event import Event
from penstock.scheduling.groups.validate_groups import formed
from penstock_services.placer.core.orders import start_orders
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


class Cell(CellDriver):
    """A cell that is asked for groups."""

    def group(self, *job_ids: str, nodes: Sequence[str]) -> Step:
        jobs = tuple(ProposedJob(job_id=job_id, nodes=tuple(nodes)) for job_id in job_ids)
        unit = ProposedUnit(jobs=jobs, kind="group", explanation="they take turns")
        return self.feed(PlanProposed(proposal_id=f"p{self.head.seq}", proposer="batcher", units=(unit,)))

    def formed(self, *job_ids: str, nodes: Sequence[str]) -> list[Event]:
        step = self.group(*job_ids, nodes=nodes)
        assert answer_in(step).verdict == "accepted", answer_in(step)
        return list(step.facts[1:])

    def refused(self, *job_ids: str, nodes: Sequence[str]) -> tuple[str, str]:
        answer = answer_in(self.group(*job_ids, nodes=nodes))
        assert answer.verdict == "refused"
        return answer.reason, answer.detail


def answer_in(step: Step) -> ProposalAnswered:
    return next(fact for fact in step.facts if isinstance(fact, ProposalAnswered))


def needs(gpus: int = 2, **more: Any) -> Estimate:
    fields = {"cores": 4, "host_memory_mib": 1_000, "gpu_memory_mib": 4_000, "bandwidth_mbps": 100}
    worker = ResourceVector(gpus=gpus, **fields | more)
    return Estimate(worker=worker, confidence=1.0, tier="user", source="a test")


@pytest.fixture
def cell() -> Cell:
    """Two nodes of two GPUs with 32 cores; gang `a` of two tasks runs on all of the GPUs."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 2), node_spec("n2", 2))
    cell.submit("a", job_spec(workers=2), needs())
    cell.start("a")
    return cell


BOTH = ("n1", "n2")


def free(cell: Cell, node_id: str = "n1") -> tuple[int, int, int, int]:
    """(GPUs, cores, MiB, Mbit/s)."""
    node = cell.state.nodes[node_id]
    return (
        node.free_gpu_mask.bit_count(),
        node.free_core_mask.bit_count(),
        node.free_host_memory_mib,
        node.free_bandwidth_mbps,
    )


def waits(cell: Cell, job_id: str, **more: Any) -> None:
    cell.submit(job_id, job_spec(workers=2), needs(**more))
    assert cell.job(job_id).status is JobStatus.QUEUED


def test_a_waiting_gang_joins_one_that_runs_and_nobody_is_restarted(cell: Cell) -> None:
    """Every GPU is taken. The batcher finds that `b` computes while `a` reads: they take turns, on the same
    GPUs and cores."""
    before = cell.job("a").tasks["a.1.w0"]
    waits(cell, "b", cores=6, bandwidth_mbps=250)
    decided, placed, *_ = cell.formed("a", "b", nodes=BOTH)
    assert isinstance(decided, GroupDecided)
    assert decided.job_ids == ("a", "b")
    assert isinstance(placed, PlacementDecided)
    assert (placed.job_id, placed.group) == ("b", decided.group_id)
    assert [(place.node_id, place.gpus, place.cores) for place in placed.tasks] == [
        ("n1", (0, 1), (0, 1, 2, 3, 4, 5)),
        ("n2", (0, 1), (0, 1, 2, 3, 4, 5)),
    ]
    assert cell.job("a").tasks["a.1.w0"] == before
    assert (cell.job("a").sharing.jobs, cell.job("b").sharing.jobs) == (("b",), ("a",))
    assert free(cell) == (0, 32 - 6, 131_072 - 2_000, 10_000 - 250)
    starts = [order for order in cell.orders() if isinstance(order, StartTask)]
    assert [order.task_id for order in starts] == ["b.1.w0", "b.1.w1"]
    token = cell.job("a").token
    assert starts[0].companions == (Companion(task_id="a.1.w0", token=token),)
    assert starts[1].companions == (Companion(task_id="a.1.w1", token=token),)
    assert [order.gpu_memory_limit_mib for order in starts] == [4_000, 4_000], "what the group booked for it"


def test_all_tasks_of_all_members_on_a_node_name_the_same_gpus(cell: Cell) -> None:
    """Two tasks of a gang are on one node: they and those of who joins meet in one folder there, which their
    GPUs name. Where a gang has one task on a node, and for a part of a GPU, no more than the task's own is
    said."""
    cell.join(node_spec("n3", 4))
    for job_id in ("c", "d"):
        cell.submit(job_id, job_spec(workers=2), needs())
    orders = list(cell.orders())
    cell.start("c")
    cell.formed("c", "d", nodes=("n3", "n3"))
    cell.join(node_spec("n4", 2))
    cell.submit("e", need=needs())
    starts = [order for order in (*orders, *cell.orders()) if isinstance(order, StartTask)]
    found = {order.task_id: order.job_gpu_uuids for order in starts if order.node_id == "n3"}
    uuids = cell.state.nodes["n3"].gpu_uuids
    assert found == dict.fromkeys(("c.1.w0", "c.1.w1", "d.1.w0", "d.1.w1"), tuple(uuids))
    assert {order.job_gpu_uuids for order in starts if order.job_id == "e"} == {()}


@pytest.mark.parametrize("first", ["a", "b"])
def test_whoever_ends_first_the_rest_stays_held_until_the_last_has_ended(cell: Cell, first: str) -> None:
    """What only the one that ended needed is free at once; the other runs on, alone, under its old
    attempt."""
    waits(cell, "b", cores=6, bandwidth_mbps=250)
    cell.formed("a", "b", nodes=BOTH)
    cell.start("b")
    cell.exit(f"{first}.1.w0")
    last = "b" if first == "a" else "a"
    cores, mbps = (6, 250) if last == "b" else (4, 100)
    assert free(cell) == (0, 32 - cores, 131_072 - 1_000, 10_000 - mbps)
    assert free(cell, "n2") == (0, 32 - 6, 131_072 - 2_000, 10_000 - 250)
    cell.exit(f"{first}.1.w1")
    assert (cell.job(last).sharing.group, cell.state.groups) == ("", {})
    assert (cell.job(last).attempt, cell.job(last).status) == (1, JobStatus.RUNNING)
    cell.exit(f"{last}.1.w0")
    cell.exit(f"{last}.1.w1")
    assert free(cell) == (2, 32, 131_072, 10_000)


def test_a_stranger_never_gets_in(cell: Cell) -> None:
    """A small job waits beside a group, and gets a GPU when all of it has ended, not before."""
    waits(cell, "b")
    cell.formed("a", "b", nodes=BOTH)
    cell.submit("x", need=estimate(gpus=1))
    for task in ("a.1.w0", "a.1.w1", "b.1.w0"):
        assert cell.job("x").status is JobStatus.QUEUED
        if task == "b.1.w0":
            cell.start("b")
        cell.exit(task)
    assert cell.job("x").status is JobStatus.LAUNCHING
    [placed] = cell.job("x").tasks.values()
    assert placed.place.node_id == "n1"


def behind_a_head() -> Cell:
    """As `cell`, with a free node n3; jobs `b` and `c` wait behind a gang of three that is first."""
    cell = Cell(PlacerSettings(profile="fifo-strict"))
    cell.join(node_spec("n1", 2), node_spec("n2", 2), node_spec("n3", 2))
    cell.submit("a", job_spec(workers=2), needs())
    cell.start("a")
    cell.submit("head", job_spec(workers=3), needs())
    for job_id in "bc":
        cell.submit(job_id, need=needs())
        assert cell.job(job_id).status is JobStatus.QUEUED
    return cell


def test_waiting_jobs_form_a_group_of_their_own() -> None:
    """Two small jobs start together on a free node while the head waits: the two orders name each other."""
    cell = behind_a_head()
    decided, b, _, c, *_ = cell.formed("c", "b", nodes=("n3",))
    assert isinstance(decided, GroupDecided)
    assert decided.job_ids == ("b", "c")
    assert isinstance(b, PlacementDecided)
    assert isinstance(c, PlacementDecided)
    assert (b.job_id, b.tasks[0].gpus, b.tasks[0].cores) == ("b", (0, 1), (0, 1, 2, 3))
    assert (c.job_id, c.tasks[0].gpus, c.tasks[0].cores) == ("c", (0, 1), (0, 1, 2, 3))
    assert free(cell, "n3") == (0, 28, 131_072 - 2_000, 9_900)
    assert cell.job("head").backfill_count == 0
    starts = {order.task_id: order for order in cell.orders() if isinstance(order, StartTask)}
    for one, other in (("b", "c"), ("c", "b")):
        named = starts[f"{one}.1.w0"].companions
        assert [known.task_id for known in named] == [f"{other}.1.w0"]


@pytest.mark.parametrize(
    ("joins", "fields", "reason", "detail"),
    [
        ({"gpus": 1}, {}, "invalid", "workers x GPUs + parameter servers differ: a 2 x 2 + 0, b 2 x 1 + 0"),
        ({}, {"workers": 3}, "invalid", "b has 3 tasks, 2 nodes are named"),
        (
            {"gpu_memory_mib": 12_385},
            {},
            "infeasible",
            "task 0 of b on n1: all members need 16385 MiB of each GPU, which has 16384",
        ),
        (
            {"host_memory_mib": 130_073},
            {},
            "infeasible",
            "task 0 of b on n1: 130072 MiB of memory are free, 130073 more needed",
        ),
        ({"cores": 33}, {}, "infeasible", "task 0 of b on n1: 28 cores are free, 29 more needed"),
        (
            {"bandwidth_mbps": 10_001},
            {},
            "infeasible",
            "task 0 of b on n1: 9900 Mbit/s are free, 9901 more needed",
        ),
        (
            {},
            {"models": ("A100",)},
            "infeasible",
            "task 0 of b on n1: its GPUs are of another model or have too little memory",
        ),
    ],
)
def test_who_does_not_fit_is_refused(
    cell: Cell, joins: dict[str, Any], fields: dict[str, Any], reason: str, detail: str
) -> None:
    """The batcher computed from estimates that were wrong, or from another state."""
    cell.join(node_spec("big", 8, model="A100", cores=64), node_spec("big2", 8, model="A100", cores=64))
    for name in ("big", "big2"):
        cell.feed(NodeCordoned(node_id=name, by="ops/ana", drain=False, reason="new image"))
    cell.submit("b", job_spec(**{"workers": 2} | fields), needs(**joins))
    assert cell.refused("a", "b", nodes=BOTH) == (reason, detail)


def test_a_part_of_a_gpu_is_no_member(cell: Cell) -> None:
    """Parts of GPUs are shared in another way: they add up to a whole."""
    cell.join(node_spec("n3", 1))
    cell.submit("b", job_spec(), needs(1))
    cell.submit("c", job_spec(), needs(1, gpu_share_milli=500))
    detail = "c has a part of a GPU: members of a group share whole ones"
    assert cell.refused("b", "c", nodes=("n3",)) == ("unsupported", detail)


def test_workers_that_do_not_wait_for_each_other_are_in_no_group(cell: Cell) -> None:
    """With parameter servers the second worker would train on out of turn; a single one is the chief,
    whatever servers it has."""
    server = ResourceVector(cores=1)
    cell.join(node_spec("n3", 2))
    for name in "bc":
        cell.submit(name, job_spec(workers=2, ps=1), replace(needs(1), parameter_server=server))
    reason, detail = cell.refused("b", "c", nodes=("n3",) * 3)
    assert reason == "unsupported"
    assert detail.startswith("b: its 2 workers do not wait for each other at parameter servers")
    cell.feed(JobCancelRequested(job_id="c"))
    cell.join(node_spec("n4", 1))
    for name in "de":
        cell.submit(name, job_spec(ps=1), replace(needs(1), parameter_server=server))
    where = [task.place.node_id for task in cell.job("d").tasks.values()]
    assert isinstance(cell.formed("d", "e", nodes=where)[0], GroupDecided)


def test_nodes_jobs_and_numbers_that_do_not_suit_are_refused(cell: Cell) -> None:
    """Each refusal names the job or the node, and what is wrong with it."""

    def said(*members: tuple[str, Sequence[str]]) -> str:
        found = formed(cell.state, members, ClusterView(cell.state))
        assert isinstance(found, Refusal), found
        return found.detail

    for job_id in "bcdef":
        waits(cell, job_id)
    assert said(("a", BOTH)) == "a group has 2 to 4 members, 1 are named"
    assert said(*((job_id, BOTH) for job_id in "abcde")) == "a group has 2 to 4 members, 5 are named"
    assert said(("a", BOTH), ("a", BOTH)) == "a job is named twice in one group"
    assert said(("a", BOTH), ("z", BOTH)) == "z is unknown"
    assert said(("a", BOTH), ("b", ("n2", "n1"))) == "b and a are not on the same nodes, rank by rank"
    assert (
        said(("a", ("n2", "n1")), ("b", ("n2", "n1")))
        == "a runs on n1, n2: a group does not move running members"
    )
    assert said(("b", BOTH), ("c", BOTH)) == "task 0 of b on n1: 0 GPUs are free, 2 needed"
    cell.formed("a", "b", nodes=BOTH)
    assert said(("a", BOTH), ("b", BOTH)) == "all of them run: a group forms when a job joins"
    assert (
        said(("a", BOTH), ("c", BOTH))
        == "b runs on the same GPUs and is not named; name it, or stop it before"
    )
    cell.formed("a", "b", "c", "d", nodes=BOTH)
    cell.feed(JobCancelRequested(job_id="c"))
    assert (
        said(*((job_id, BOTH) for job_id in "abde"))
        == "1 more members are still being stopped; wait for their exits"
    )
    cell.feed(GpuFaulted(node_id="n1", gpu=1, fault="xid", detail=""))
    cell.exit("c.1.w0", None, cause="stopped", signal=15)
    cell.exit("c.1.w1", None, cause="stopped", signal=15)
    assert (
        said(*((job_id, BOTH) for job_id in "abde"))
        == "task 0 of e on n1: of GPUs (0, 1) some are faulted or gone"
    )


def test_where_an_end_cannot_be_proven_nobody_joins() -> None:
    """What hides from its node could still use the GPU when its companion is told that it has it alone."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(replace(node_spec("n1", 2), isolation=Isolation(exits="none", files=False)))
    cell.submit("a", need=needs())
    cell.submit("b", need=needs())
    _, detail = cell.refused("a", "b", nodes=("n1",))
    assert detail == "task 0 of b on n1: it cannot prove a task's end, so a GPU has one task there"


def test_members_come_and_go_and_the_group_is_the_same(cell: Cell) -> None:
    """`b` joins `a`; `a` ends; `c` joins `b`: `b` has run all the time, with two companions after each
    other."""
    waits(cell, "b")
    [decided, *_] = cell.formed("a", "b", nodes=BOTH)
    cell.start("b")
    waits(cell, "c")
    [again, *_] = cell.formed("b", "a", "c", nodes=BOTH)
    assert isinstance(decided, GroupDecided)
    assert isinstance(again, GroupDecided)
    assert (again.group_id, again.job_ids) == (decided.group_id, ("a", "b", "c"))
    for task in ("a.1.w0", "a.1.w1"):
        cell.exit(task)
    assert list(cell.state.groups) == [decided.group_id]
    cell.start("c")
    for task in ("c.1.w0", "c.1.w1"):
        cell.exit(task)
    assert cell.state.groups == {}
    waits(cell, "d")
    [third, *_] = cell.formed("b", "d", nodes=BOTH)
    assert isinstance(third, GroupDecided)
    assert third.group_id != decided.group_id
    assert cell.job("b").attempt == 1


def test_an_order_names_also_who_joined_after_it(cell: Cell) -> None:
    """The placer dies before `b`'s order is sent; its successor repeats it when `c` is a member, too."""
    waits(cell, "b")
    cell.formed("a", "b", nodes=BOTH)
    waits(cell, "c")
    cell.formed("a", "b", "c", nodes=BOTH)
    [order, _] = [
        order for order in start_orders(cell.state, "b", cell.job("b").token) if isinstance(order, StartTask)
    ]
    assert [known.task_id for known in order.companions] == ["a.1.w0", "c.1.w0"]


def test_people_see_who_takes_turns_on_a_gpu(cell: Cell) -> None:
    """`penstock get gpus`: both jobs stand on the GPU, each with all of it, and nothing is free."""
    waits(cell, "b")
    cell.formed("a", "b", nodes=BOTH)
    row = gpu_use(cell.state, cell.state.nodes["n1"], 0)
    assert ([held["job_id"] for held in row["holders"]], row["free_milli"]) == (["a", "b"], 0)
    assert gpu_state(row | {"faulted": False}).endswith("shared[/], in turns")


def test_a_gang_that_fails_leaves_its_group_alone(cell: Cell) -> None:
    """One worker of `b` breaks: the other is stopped, `b` queues again, `a` never hears of it."""
    cell.submit("b", job_spec(workers=2, attempts=3, backoff_ms=10), needs())
    cell.formed("a", "b", nodes=BOTH)
    cell.start("b")
    cell.exit("b.1.w0", 1)
    assert free(cell) == (0, 28, 131_072 - 1_000, 9_900)
    assert cell.job("b").status is JobStatus.STOPPING
    _, detail = cell.refused("a", "b", nodes=BOTH)
    assert detail == "b is stopping: a member runs or is queued"
    cell.exit("b.1.w1", None, cause="stopped", signal=15)
    assert cell.job("a").sharing.group == ""
    cell.at(1_000)
    assert cell.job("b").status is JobStatus.QUEUED
    cell.formed("a", "b", nodes=BOTH)
    assert cell.job("b").attempt == 2


def test_a_group_lives_through_a_joining_a_smaller_node_and_a_snapshot(cell: Cell) -> None:
    """The reporter restarts; an operator takes memory out; a placer takes over from a snapshot."""
    waits(cell, "b", cores=6)
    cell.formed("a", "b", nodes=BOTH)
    spec = cell.state.nodes["n1"].spec
    booked = free(cell)
    cell.feed(NodeChanged(node=spec))
    assert free(cell) == booked
    cell.feed(NodeChanged(node=replace(spec, host_memory_mib=1_500, cores=4)))
    assert free(cell)[1:3] == (0, -500)
    again = load(dump(cell.state))
    assert check(again) == []
    assert dump(again) == dump(cell.state)
    assert {key: set(members) for key, members in again.groups.items()} == {
        key: set(members) for key, members in cell.state.groups.items()
    }
    cell.start("b")
    for task in ("b.1.w0", "b.1.w1", "a.1.w0", "a.1.w1"):
        cell.exit(task)
    assert free(cell)[:3] == (2, 4, 1_500)


def test_a_lost_node_takes_all_members_with_it(cell: Cell) -> None:
    """n1 boots anew. Both gangs have lost a task, are stopped, and queue again, each by itself."""
    waits(cell, "b")
    cell.formed("a", "b", nodes=BOTH)
    cell.start("b")
    cell.feed(NodeJoined(node=node_spec("n1", 2, boot="b2")))
    for task in ("a.1.w1", "b.1.w1"):
        cell.exit(task, None, cause="stopped", signal=15)
    assert cell.state.groups == {}
    assert cell.job("a").status is JobStatus.LAUNCHING
    assert cell.job("b").status is JobStatus.QUEUED


def test_cores_of_members_change_and_are_held_once(cell: Cell) -> None:
    """An operator gives `b` more cores: first those of its companion, then free ones. What `a` still uses
    stays."""
    waits(cell, "b", cores=2)
    cell.formed("a", "b", nodes=BOTH)
    cell.start("b")

    def asks(task_id: str, cores: int) -> tuple[int, ...]:
        step = cell.feed(
            CoresProposed(
                proposal_id=f"c{cell.head.seq}",
                proposer="gateway",
                task_id=task_id,
                cores=cores,
                reason="r",
                by="ada",
            )
        )
        decided = step.facts[1]
        assert isinstance(decided, CoresDecided), kinds(step)
        return decided.cores

    assert cell.job("b").tasks["b.1.w0"].place.cores == (0, 1)
    assert asks("b.1.w0", 6) == (0, 1, 2, 3, 4, 5)
    assert free(cell)[1] == 26
    assert asks("a.1.w0", 1) == (0,)
    assert free(cell)[1] == 26
    assert asks("b.1.w0", 2) == (0, 1)
    assert free(cell)[1] == 30


def test_a_member_moves_away_and_the_others_stay(cell: Cell) -> None:
    """The migrator takes `b` out of the group: to other nodes, since of GPUs that others hold nothing can be
    kept for it."""
    waits(cell, "b")
    cell.formed("a", "b", nodes=BOTH)
    cell.start("b")
    cell.join(node_spec("n3", 2), node_spec("n4", 2))

    def moves(*nodes: str) -> ProposalAnswered:
        step = cell.feed(
            MigrationProposed(
                proposal_id=f"m{cell.head.seq}", proposer="migrator", job_id="b", nodes=nodes, reason="r"
            )
        )
        return answer_in(step)

    assert moves("n1", "n3").detail == "b shares GPUs of n1 with its group: it can move to other nodes only"
    assert moves("n3", "n4").verdict == "accepted"
    cell.exit("b.1.w0", None, cause="stopped", signal=15)
    cell.exit("b.1.w1", None, cause="stopped", signal=15)
    assert [task.place.node_id for task in cell.job("b").tasks.values()] == ["n3", "n4"]
    assert (cell.job("a").sharing.group, cell.job("b").sharing.group) == ("", "")
    assert cell.job("a").attempt == 1
