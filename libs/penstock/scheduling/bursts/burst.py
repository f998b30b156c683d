"""Batch stage by the grouping genetic algorithm: when jobs arrive fast, all waiting jobs are placed at once.
Source: Liquid §5.3.

Implements `penstock.scheduling.stages.batch.Batch`. The question contains the free resources of the nodes,
the gangs in the profile's own order, and where the profile's immediate path would place each of them, one
after the other; `penstock.scheduling.bursts.gga` improves on that and is never worse by eq. 8. A job that the
immediate path would start now starts in every plan.

- Jobs that take parts of GPUs, and moldable ones (with their fewest workers), are placed by the immediate
  path: the plan leaves these resources free, and they start once the plan has been answered.
- Reserved nodes are left out. Bounded by MAX_JOBS, MAX_TASKS and MAX_NODES: the rest waits for the immediate
  path.
"""

import copy
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from penstock.cluster.assignment import assign
from penstock.cluster.chance import LazyRng
from penstock.cluster.overlay import Overlay
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import MAX_PROPOSED_UNITS
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.types import MAX_GANG_TASKS, WHOLE_GPU, ResourceVector, TaskPlacement
from penstock.model.proposals import ProposedJob, ProposedUnit
from penstock.scheduling.bursts.burst_plans import Costs, Gang, Machine, Need, Problem
from penstock.scheduling.bursts.gga import MAX_CHILDREN, Found, GeneticSearch, gga
from penstock.scheduling.place.liquid import Network
from penstock.scheduling.scheduling_pass import Starts, Trying, Waits, in_turn, scheduling_pass
from penstock.scheduling.stages.protocols import Order, Policy

MAX_JOBS = MAX_PROPOSED_UNITS
MAX_TASKS = 2_048  # the placer accepts 4,096 in one plan
MAX_NODES = 512
MAX_LOOKED_AT = 2_048  # jobs in order, whether they fit or not


class BurstQuestion(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The inputs of a plan. Nodes are numbered as in `node_ids`."""

    job_ids: tuple[str, ...]
    """In the profile's order."""
    node_ids: tuple[str, ...]
    problem: Problem
    seed: int
    max_children: int


class BurstAnswer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Node ids of each job's tasks in rank order. Jobs that the plan leaves out are not in it."""

    places: tuple[tuple[str, tuple[str, ...]], ...]
    why: str
    """Text for users: size, fitness, and that of the immediate path."""


class Burst:
    """`place` and `order` are the profile's immediate path; `order` None: first come, first served.
    `network`: as in `Liquid`."""

    def __init__(
        self,
        place: Policy,
        order: Order | None,
        network_weight: float,
        network: type[Network] = Network,
        *,
        search: type[GeneticSearch] = GeneticSearch,
        max_children: int = MAX_CHILDREN,
    ) -> None:
        self._place, self._order = place, order
        self._weight, self._network = network_weight, network
        self._search, self._max_children = search, max_children

    def question(self, state: CellState) -> BurstQuestion | None:
        """See the module's docstring. O(jobs) placements of the immediate path."""
        if not _has_room(state):
            return None
        shadow = Shadow(state)
        gangs = list(self._immediate(state, shadow))
        if not any(nodes for _, nodes in gangs):
            return None
        for _, nodes in gangs:
            shadow.used.update(nodes)
        shadow.give_back()
        reserved = {
            node_id
            for unit in state.planned.values()
            if unit.proposed is None and unit.expected_ms is not None
            for node_id in unit.nodes
        }
        node_ids = _nodes(shadow, reserved)
        number = {node_id: place for place, node_id in enumerate(node_ids)}
        given = [
            tuple(number[name] for name in nodes) if all(name in number for name in nodes) else ()
            for _, nodes in gangs
        ]
        problem = Problem(
            *self._machines(shadow, node_ids, [job.demand for job, _ in gangs]), self._weight, tuple(given)
        )
        jobs = tuple(job.job_id for job, _ in gangs)
        return BurstQuestion(jobs, node_ids, problem, state.seq, self._max_children)

    def _immediate(self, state: CellState, shadow: "Shadow") -> Iterator[tuple[JobState, tuple[str, ...]]]:
        """Waiting jobs, each with the nodes on which the immediate path would start it now; empty: it would
        not start."""
        waiting = [state.jobs[job_id] for job_id in state.queue.values()[:MAX_LOOKED_AT]]
        turns = in_turn(waiting)
        if self._order is not None:
            turns = self._order.ranking(state, waiting, list(state.holding.values()), state.now_ms)
        count = tasks = 0
        for result in scheduling_pass(
            turns, _Immediate(shadow, self._place, LazyRng(0, f"burst-{state.seq}"))
        ):
            job = result.job
            if _planned(job):
                count, tasks = count + 1, tasks + job.demand.tasks
                yield job, result.place if isinstance(result, Starts) else ()
            if count == MAX_JOBS or tasks >= MAX_TASKS:
                return

    def _machines(
        self, shadow: "Shadow", node_ids: Sequence[str], demands: Sequence[Demand]
    ) -> tuple[tuple[Machine, ...], tuple[Gang, ...], Costs]:
        index = shadow.state.index
        network = self._network(index)
        racks: dict[tuple[str, str], int] = {}
        domains: dict[str, int] = {}
        machines = []
        for node_id in node_ids:
            node = shadow.state.nodes[node_id]
            spec, free = node.spec, node.entered
            machines.append(
                Machine(
                    racks.setdefault((spec.rack, spec.domain), len(racks)),
                    domains.setdefault(spec.domain, len(domains)),
                    len(spec.gpus),
                    len(spec.gpus) - free.gpus,
                    (free.gpus, free.cores, free.host_memory_mib, free.bandwidth_mbps),
                )
            )
        number = {shadow.state.nodes[node_id].ordinal: place for place, node_id in enumerate(node_ids)}
        kinds: dict[DemandKey, Gang] = {}

        def suits(need: ResourceVector, where: Where) -> int:
            return sum(1 << number[one] for one in bits(index.eligible(need, where)) if one in number)

        for demand in demands:
            if demand.key not in kinds:
                kinds[demand.key] = Gang(
                    demand.workers,
                    _need(demand.worker),
                    demand.parameter_servers,
                    _need(demand.parameter_server),
                    suits(demand.worker, demand.where),
                    suits(demand.parameter_server, demand.where),
                )
        costs = Costs(
            tuple(network.inside_rack(rack, domain) for rack, domain in racks),
            tuple(network.inside_domain(domain) for domain in domains),
            network.across_domains(),
        )
        return tuple(machines), tuple(kinds[demand.key] for demand in demands), costs

    def solve(self, question: BurstQuestion) -> BurstAnswer:
        """Pure; the same question gives the same answer."""
        rng = np.random.default_rng(question.seed)
        found = gga(question.problem, rng, search=self._search, max_children=question.max_children)
        return BurstAnswer(
            tuple(
                (job_id, tuple(question.node_ids[node] for node in place))
                for job_id, place in zip(question.job_ids, found.places, strict=True)
                if place
            ),
            _why(question, found),
        )

    def units(self, state: CellState, answer: BurstAnswer) -> Sequence[ProposedUnit]:
        """One unit for each job that still waits and has its place still free, in the burst's order."""
        overlay = Overlay(state)
        units = []
        for job_id, nodes in answer.places:
            job = state.jobs.get(job_id)
            if job is None or not job.in_line or not _planned(job) or job.demand.tasks != len(nodes):
                continue
            if isinstance(overlay.give([(job, nodes)]), str):
                continue
            units.append(
                ProposedUnit(jobs=(ProposedJob(job_id=job_id, nodes=nodes),), explanation=answer.why)
            )
        return units


class Shadow:
    """A copy of the state's nodes on which jobs start one after the other, by a policy that reads a state."""

    def __init__(self, state: CellState) -> None:
        self.state = copy.copy(state)
        self.state.nodes = dict(state.nodes)
        self.state.index = state.index.copy()
        self.used: set[str] = set()
        self._copied: set[str] = set()
        self._planned: list[tuple[NodeState, TaskPlacement]] = []

    def start(self, job: JobState, place: Policy, rng: LazyRng, *, retrace: bool) -> tuple[str, ...]:
        """Places the job; its nodes in rank order, empty if it does not fit. `retrace`: `give_back` undoes
        it."""
        plan = place.place(self.state, job, rng)
        if plan is None:
            return ()
        for task in assign(self.state, job, plan).tasks:
            node = self._node(task.node_id)
            node.give(task)
            self._refit(node)
            if retrace:
                self._planned.append((node, task))
        return plan.nodes

    def give_back(self) -> None:
        """Takes back the places of all jobs started with `retrace`: the plan may place them anew."""
        for node, task in reversed(self._planned):
            node.take_back(task)
            self._refit(node)
        self._planned.clear()

    def _node(self, node_id: str) -> NodeState:
        if node_id not in self._copied:
            self.state.nodes[node_id] = self.state.nodes[node_id].copy()
            self._copied.add(node_id)
        return self.state.nodes[node_id]

    def _refit(self, node: NodeState) -> None:
        now = node.free()
        self.state.index.refit(node.bit, len(node.spec.gpus), node.entered, now)
        node.entered = now


class _Immediate(Trying[DemandKey, tuple[str, ...]]):
    """The profile's immediate path on a shadow: moldable jobs have their fewest workers. Places are node ids
    in rank order."""

    def __init__(self, shadow: Shadow, place: Policy, rng: LazyRng) -> None:
        self._shadow, self._place, self._rng = shadow, place, rng

    def alike(self, job: JobState) -> DemandKey:
        """As `Trying`."""
        return _fewest(job).demand_key

    def place(self, job: JobState, key: DemandKey) -> Starts[tuple[str, ...]] | Waits:
        """As `Trying`."""
        shaped, nodes = _fewest(job), tuple[str, ...]()
        if shaped.demand.tasks <= MAX_GANG_TASKS:
            nodes = self._shadow.start(shaped, self._place, self._rng, retrace=_planned(job))
        return Starts(job, nodes) if nodes else Waits(job)


def _fewest(job: JobState) -> JobState:
    return job if job.spec.min_workers is None else job.shaped(job.spec.min_workers)


def _has_room(state: CellState) -> bool:
    """Whether a node has room for a worker of one of the jobs that are looked at: else the immediate path
    starts none."""
    waiting = (state.jobs[job_id] for job_id in state.queue.values()[:MAX_LOOKED_AT])
    demands = {demand.key: demand for demand in (job.demand for job in waiting)}
    return any(state.index.candidates(one.worker, one.where) for one in demands.values())


def _planned(job: JobState) -> bool:
    """Whether the plan places it; see the module's docstring."""
    needs = (job.demand.worker, job.demand.parameter_server)
    return job.spec.min_workers is None and all(need.gpu_share_milli == WHOLE_GPU for need in needs)


def _need(vector: ResourceVector) -> Need:
    return vector.gpus, vector.cores, vector.host_memory_mib, vector.bandwidth_mbps


def _nodes(shadow: Shadow, reserved: set[str]) -> tuple[str, ...]:
    """Nodes of the plan, sorted by ordinal: chosen are those that the immediate path uses, then those with
    free GPUs, the fullest first."""
    nodes = shadow.state.nodes
    usable = [nodes[shadow.state.node_at[one]] for one in bits(shadow.state.index.placeable)]
    usable = [node for node in usable if node.spec.node_id not in reserved]
    usable.sort(
        key=lambda node: (
            node.spec.node_id not in shadow.used,
            not node.entered.gpus,
            node.entered.gpus,
            node.ordinal,
        )
    )
    return tuple(node.spec.node_id for node in sorted(usable[:MAX_NODES], key=lambda node: node.ordinal))


def _why(question: BurstQuestion, found: Found) -> str:
    placed = sum(bool(place) for place in found.places)
    immediate = sum(bool(place) for place in question.problem.given)
    return (
        f"batch of {len(found.places)} jobs: {placed} start on {found.nodes} nodes, fitness "
        f"{found.fitness:.2f}; "
        f"one after the other {immediate} would, {found.given_fitness:.2f}"
    )
