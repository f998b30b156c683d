"""Shares of tenants are counted from leases: every GPU once, whoever shares it and whoever comes next."""

from collections import Counter
from fractions import Fraction
from math import inf

import pytest
from msgspec.structs import replace

from penstock.ledger.check.check_groups import lease_of, leases_on
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import JobCancelRequested, NodeChanged
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import NodeStatus, TaskStatus
from penstock.model.nouns.types import TaskPlacement
from penstock.model.proposals import MigrationProposed
from penstock.model.schema.event import Event
from penstock.scheduling.order.fair import FairResponse
from penstock.scheduling.order.shares import GPU, NOTHING, PARTS, Holdings, IfHeld, amounts, owner_of, plus
from penstock.why.queue_position import all_start
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import job_spec, node_spec
from tests.support.cluster.random_cell import RandomCell
from tests.unit.ledger.groups.test_group_storms import Storm
from tests.unit.ledger.groups.test_groups import Cell, needs

TENANTS = ("ada", "bob", "cyd")


def on_gpus(state: CellState, gone: frozenset[str] = frozenset()) -> Counter[str]:
    """Tenant → its GPUs, `Fraction`, from the places alone, GPU by GPU: a group's members have equal parts,
    else the task has it that was placed last, or the move for which it is reserved. `gone`: jobs that do not
    count."""
    holders: dict[tuple[str, int], list[tuple[JobState, TaskPlacement]]] = {}
    for job in state.holding.values():
        places = [task.place for task in job.tasks.values() if task.status is not TaskStatus.EXITED]
        places += [place for node_id in state.nodes for place in taken(job, node_id) if job.target]
        for place in places if job.job_id not in gone else ():
            for gpu in place.gpus:
                holders.setdefault((place.node_id, gpu), []).append((job, place))
    found: Counter[str] = Counter()
    for here in holders.values():
        if all(place.gpu_share_milli == 1_000 for _, place in here) and not here[0][0].sharing.group:
            here = [max(here, key=lambda one: one[0].token)]
        for job, place in here:
            share = Fraction(place.gpu_share_milli, 1_000)
            members = len(here) if job.sharing.group else 1
            found[job.spec.owner] += share / members  # type: ignore[assignment]
    return found


class Judge:
    """Compares what tenants hold with what the nodes have given out, in every state that it is shown."""

    def __init__(self) -> None:
        self.readers = [(Holdings(owner_of), each) for each in (1, 7)]
        self.seen: Counter[str] = Counter()

    def look(self, state: CellState) -> None:
        """One state. The last reader misses most of them."""
        self.seen["states"] += 1
        for holdings, each in self.readers:
            if self.seen["states"] % each == 0:
                holdings.update(state)
                assert holdings.held == anew(state).held
        self._each_lease_once(state)
        if self.seen["states"] % 3 == 0:
            self._whatever_ends(state)
        self._count(state)

    def _each_lease_once(self, state: CellState) -> None:
        holdings = self.readers[0][0]
        leases = [lease for node in state.nodes.values() for lease in leases_on(state, node)]
        for job in state.moving.values():
            leases += [lease_of([place]) for node_id in state.nodes for place in taken(job, node_id)]
        given = (
            sum(len(lease.gpus) * lease.gpu_share_milli for lease in leases),
            sum(len(lease.cores) for lease in leases),
            sum(lease.host_memory_mib for lease in leases),
            sum(lease.bandwidth_mbps for lease in leases),
        )
        held = [sum(each) for each in zip((0, 0, 0, 0), *holdings.held.values(), strict=True)]
        assert held == [PARTS * amount for amount in given]
        assert all(some <= most for some, most in zip(held, holdings.total, strict=True))
        gpus = {tenant: Fraction(found[0], GPU) for tenant, found in holdings.held.items() if found[0]}
        assert gpus == on_gpus(state)

    def _whatever_ends(self, state: CellState) -> None:
        """A forecast in which every second job has ended counts what a cell without these jobs counts."""
        holdings, jobs = self.readers[0][0], list(state.holding.values())
        gone = frozenset(job.job_id for job in jobs[self.seen["states"] % 6 // 3 :: 2])
        stay = [job for job in jobs if job.job_id not in gone]
        what_if = IfHeld(state, holdings)
        for job in jobs:
            if job.job_id in gone:
                what_if.ends(job)
        found = dict(what_if.held)
        assert {owner: Fraction(held[0], GPU) for owner, held in found.items() if held[0]} == on_gpus(
            state, gone
        )
        copy = load(dump(state))
        for job in copy.holding.values():
            for task_id, task in job.tasks.items() if job.job_id in gone else ():
                task.status = TaskStatus.EXITED
                copy.nodes[task.place.node_id].tasks.pop(task_id, None)
        if not any(job.target for job in jobs):
            assert found == anew(copy).held
        begins = [job for job in state.jobs.values() if job.in_line]
        for job in begins:
            what_if.starts(job)
            held = plus(found.get(job.spec.owner, NOTHING), amounts(job))
            if any(held):
                found[job.spec.owner] = held
        assert what_if.held == found
        for job in [*begins, *stay]:
            what_if.ends(job)
        assert what_if.held == {}

    def _count(self, state: CellState) -> None:
        """What was there to be counted wrongly."""
        for members in state.groups.values():
            owners = {job.spec.owner for job in members.values()}
            self.seen["groups"] += 1
            self.seen["groups of several tenants"] += len(owners) > 1
            self.seen["groups with two members of one tenant"] += len(owners) < len(members)
        self.seen["reservations"] += bool(state.moving)
        for job in state.holding.values():
            self.seen["successors"] += any(before in state.jobs for before in job.succession.after)
            ended = [task.status is TaskStatus.EXITED for task in job.tasks.values()]
            self.seen["gangs that end"] += any(ended) and not all(ended)
            self.seen["parts"] += job.demand.worker.gpu_share_milli < 1_000


def anew(state: CellState) -> Holdings[str]:
    found = Holdings(owner_of)
    found.update(state)
    return found


class Tenants(Storm):
    """Groups of jobs of several tenants."""

    def submit(self, number: int) -> None:
        """Its jobs share GPUs with anybody's."""
        choice = self.chance.choice
        need = needs(choice((2, 2, 2, 1)), cores=choice((1, 3, 6)), bandwidth_mbps=choice((0, 50, 700)))
        spec = job_spec(workers=choice((1, 2)), attempts=3, owner=choice(TENANTS), companions="any")
        self.cell.submit(f"j{number}", spec, need)


def test_every_lease_counts_once_whoever_shares_it() -> None:
    """Jobs of three tenants form groups, change their cores, fail, are cancelled and lose their node: the
    tenants hold what the nodes have given out, never 400 % of the cell."""
    judge = Judge()
    for seed in range(12):
        storm = Tenants(seed)
        for number in range(50):
            storm.act(number)
            judge.look(storm.cell.state)
    assert judge.seen["groups of several tenants"] > 30
    assert judge.seen["groups with two members of one tenant"] > 30
    assert judge.seen["gangs that end"] > 10
    assert judge.seen["successors"] > 5, judge.seen


class Watched(RandomCell):
    """Every record's state is judged."""

    judge: Judge

    def feed(self, event: Event) -> Step:
        """As `RandomCell`."""
        step = super().feed(event)
        if self.head.seq % 4 == 0:
            self.judge.look(self.state)
        return step


@pytest.mark.parametrize("profile", ["penstock", "coda", "drf"])
def test_every_lease_counts_once_whatever_happens_to_the_cell(profile: str) -> None:
    """Gangs end task by task, jobs have parts of GPUs, jobs are stopped, and nodes fall silent: no GPU counts
    for two."""
    Watched.judge = judge = Judge()
    for seed in range(2):
        Watched(seed, PlacerSettings(profile=profile), 50).run()
    assert judge.seen["gangs that end"] > 10
    assert judge.seen["parts"] > 10


def cell_of(*gpus: int) -> Cell:
    """Nodes n0, n1, … with so many GPUs."""
    cell = Cell(PlacerSettings(profile="penstock"))
    cell.join(*(node_spec(f"n{number}", count) for number, count in enumerate(gpus)))
    return cell


def submit(cell: Cell, job_id: str, owner: str, gpus: int = 2, **more: int) -> None:
    spec = job_spec(owner=owner, companions="any", checkpoint="sdk")
    cell.submit(job_id, spec, needs(gpus, cores=1, **more))


def gpus(cell: Cell) -> dict[str, float]:
    return {owner: held[0] / GPU for owner, held in anew(cell.state).held.items()}


def test_members_of_one_tenant_count_once_and_of_two_share() -> None:
    """Ada has two jobs on two GPUs in turns, and holds two of the four. Bob's job joins them: each of three
    members has a third. One of Ada's ends: half of it is Bob's."""
    cell = cell_of(2, 2)
    for job_id, owner in (("a1", "ada"), ("c", "cyd"), ("a2", "ada"), ("b", "bob")):
        submit(cell, job_id, owner)
    cell.start("a1")
    [node_id] = {task.place.node_id for task in cell.job("a1").tasks.values()}
    cell.formed("a1", "a2", nodes=(node_id,))
    assert gpus(cell) == {"ada": 2, "cyd": 2}
    cell.formed("a1", "a2", "b", nodes=(node_id,))
    assert gpus(cell) == {"ada": 2 * 2 / 3, "bob": 2 / 3, "cyd": 2}
    cell.exit("a1.1.w0")
    assert gpus(cell) == {"ada": 1, "bob": 1, "cyd": 2}
    cell.start("b")
    cell.exit("b.1.w0")
    assert gpus(cell) == {"ada": 2, "cyd": 2}


def test_what_decides_is_what_is_shown() -> None:
    """Ada has two jobs in turns on two of six GPUs, Bob has four: `why` tells Ada, who waits, what her order
    is decided by. Counted per member she would have had two thirds, and would have come after Bob."""
    cell = cell_of(2, 4)
    for job_id, owner, count in (("a1", "ada", 2), ("b1", "bob", 4), ("a2", "ada", 2)):
        submit(cell, job_id, owner, count)
    cell.start("a1")
    cell.formed("a1", "a2", nodes=("n0",))
    submit(cell, "b2", "bob")
    submit(cell, "a3", "ada")
    order = FairResponse()
    waiting = [cell.job("b2"), cell.job("a3")]
    assert list(order.order(cell.state)) == ["a3", "b2"]
    turns = order.ranking(cell.state, waiting).turns(cell.now_ms)
    assert next(turns).job_id == "a3"
    assert order.below_share(cell.state, "ada")
    assert not order.below_share(cell.state, "bob")
    assert order.claim(cell.state, cell.job("a3")).startswith(
        "ada holds 33% of the cell, below its share of 50%"
    )
    assert order.claim(cell.state, cell.job("b2")).startswith("bob holds 67% of the cell, at or above")


def test_a_reservation_counts_for_the_job_that_moves() -> None:
    """A job moves to another node: until it has left the first one it denies both to others."""
    cell = cell_of(2, 2)
    submit(cell, "a", "ada")
    cell.start("a")
    [place] = [task.place for task in cell.job("a").tasks.values()]
    other = "n1" if place.node_id == "n0" else "n0"
    cell.feed(
        MigrationProposed(
            proposal_id="m", proposer="gateway", by="ada", job_id="a", nodes=(other,), reason="a faster node"
        )
    )
    assert cell.job("a").target, "it moves"
    assert gpus(cell) == {"ada": 4}
    cell.exit("a.1.w0", None, cause="stopped", signal=15)
    assert gpus(cell) == {"ada": 2}


def test_a_node_that_shrank_does_not_raise_shares_above_the_cell() -> None:
    """A driver loses two of the four GPUs of a job: its tenant holds the whole cell, not twice the cell."""
    cell = cell_of(4)
    submit(cell, "a", "ada", 4)
    cell.start("a")
    spec = cell.state.nodes["n0"].spec
    cell.feed(NodeChanged(node=replace(spec, gpus=spec.gpus[:2])))
    assert cell.state.nodes["n0"].status is NodeStatus.READY
    assert anew(cell.state).share("ada") == 1.0
    assert 0.0 <= anew(cell.state).share("bob") < inf


def test_a_tenant_that_leaves_the_queue_raises_the_others_share_at_once() -> None:
    """Three tenants wait; somebody lists the queue, and Cyd cancels. The next answer to `why` knows two."""
    cell = cell_of(2)
    for job_id, owner in (("a", "ada"), ("b", "bob"), ("c", "cyd")):
        submit(cell, job_id, owner)
    order = FairResponse()

    def listed() -> list[str]:
        return list(all_start(cell.state, order, cell.now_ms))

    assert listed() == ["b", "c"]
    assert "share of 33%" in order.claim(cell.state, cell.job("b"))
    cell.feed(JobCancelRequested(job_id="c"))
    assert listed() == ["b"]
    assert "share of 50%" in order.claim(cell.state, cell.job("b"))
