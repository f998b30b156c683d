"""Batch stage by the grouping genetic algorithm: when jobs arrive fast, all waiting jobs are placed at once.
Source: Liquid §5.3.

Implements `penstock.scheduling.stages.batch.Batch`. The question contains the free resources of the nodes,
the gangs in the profile's own order, and where the profile's immediate path would place each of them, one
after the other; `penstock.scheduling.bursts.gga` improves on that and is never worse by eq. 8. A job that the
immediate path would start now starts in every plan.

- Jobs that take parts of GPUs, and moldable ones (with their fewest workers), are placed by the immediate
  path: the plan leaves these resources free, and they start once the plan has been answered.
- Reserved nodes are left out. Jobs, tasks and nodes are bounded (`MAX_PROPOSED_UNITS`, `MAX_TASKS`,
  `MAX_NODES`): the rest waits for the immediate path.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import ClusterView, Undo, assign
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import MAX_PROPOSED_UNITS
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.types import MAX_GANG_TASKS, WHOLE_GPU, ResourceVector
from penstock.model.proposals import ProposedJob, ProposedUnit
from penstock.scheduling.bursts.burst_plans import Costs, Gang, Machine, Need, Problem
from penstock.scheduling.bursts.gga import MAX_CHILDREN, Found, GeneticSearch, gga
from penstock.scheduling.place.liquid import Network
from penstock.scheduling.scheduling_pass import Starts, Trying, Waits, in_turn, scheduling_pass
from penstock.scheduling.stages.protocols import Order, Policy

MAX_TASKS = 2_048  # the placer accepts 4,096 in one plan; as many jobs are looked at, also such as do not fit
MAX_NODES = 512  # of a problem: bounds its matrix of tasks and nodes


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
        view = ClusterView(state)
        planned: list[Undo] = []
        gangs = list(self._immediate(view, planned))
        if not any(nodes for _, nodes in gangs):
            return None
        for undo in reversed(planned):
            undo()
        reserved = {
            node_id
            for unit in state.planned.values()
            if unit.proposed is None and unit.expected_ms is not None
            for node_id in unit.nodes
        }
        node_ids = _nodes(view.as_state(), {node_id for _, nodes in gangs for node_id in nodes}, reserved)
        number = {node_id: place for place, node_id in enumerate(node_ids)}
        given = [
            tuple(number[name] for name in nodes) if all(name in number for name in nodes) else ()
            for _, nodes in gangs
        ]
        problem = Problem(
            *self._machines(view.as_state(), node_ids, [job.demand for job, _ in gangs]),
            self._weight,
            tuple(given),
        )
        jobs = tuple(job.job_id for job, _ in gangs)
        return BurstQuestion(jobs, node_ids, problem, state.seq, self._max_children)

    def _immediate(
        self, view: ClusterView, planned: list[Undo]
    ) -> Iterator[tuple[JobState, tuple[str, ...]]]:
        """Waiting jobs, each with the nodes on which the immediate path would start it now; empty: it would
        not start. `planned`: gets the undos of the jobs that the plan may place anew."""
        state = view.state
        waiting = [state.jobs[job_id] for job_id in state.queue.values()[:MAX_TASKS]]
        turns = in_turn(waiting)
        if self._order is not None:
            turns = self._order.ranking(state, waiting).turns(state.now_ms)
        count = tasks = 0
        immediate = _Immediate(view, self._place, LazyRng(0, f"burst-{state.seq}"))
        for result in scheduling_pass(turns, immediate):
            job, nodes = result.job, tuple[str, ...]()
            if isinstance(result, Starts):
                nodes, undo = result.place
                if _planned(job):
                    planned.append(undo)
            if _planned(job):
                count, tasks = count + 1, tasks + job.demand.tasks
                yield job, nodes
            if count == MAX_PROPOSED_UNITS or tasks >= MAX_TASKS:
                return

    def _machines(
        self, state: CellState, node_ids: Sequence[str], demands: Sequence[Demand]
    ) -> tuple[tuple[Machine, ...], tuple[Gang, ...], Costs]:
        index = state.index
        network = self._network(index)
        racks: dict[tuple[str, str], int] = {}
        domains: dict[str, int] = {}
        machines = []
        for node_id in node_ids:
            node = state.nodes[node_id]
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
        number = {state.nodes[node_id].ordinal: place for place, node_id in enumerate(node_ids)}
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
        view = ClusterView(state)
        units = []
        for job_id, nodes in answer.places:
            job = state.jobs.get(job_id)
            if job is None or not job.in_line or not _planned(job) or job.demand.tasks != len(nodes):
                continue
            if isinstance(view.place([(job, nodes)]), str):
                continue
            units.append(
                ProposedUnit(jobs=(ProposedJob(job_id=job_id, nodes=nodes),), explanation=answer.why)
            )
        return units


class _Immediate(Trying[DemandKey, tuple[tuple[str, ...], Undo]]):
    """The profile's immediate path on the view: moldable jobs have their fewest workers. A place is (node ids
    in rank order, undo)."""

    def __init__(self, view: ClusterView, place: Policy, rng: LazyRng) -> None:
        self._view, self._place, self._rng = view, place, rng

    def alike(self, job: JobState) -> DemandKey:
        """As `Trying`."""
        return _fewest(job).demand_key

    def place(self, job: JobState, key: DemandKey) -> Starts[tuple[tuple[str, ...], Undo]] | Waits:
        """As `Trying`."""
        job, asked = _fewest(job), job
        if job.demand.tasks > MAX_GANG_TASKS:
            return Waits(asked)
        state = self._view.as_state()
        plan = self._place.place(state, job, self._rng)
        if plan is None:
            return Waits(asked)
        return Starts(asked, (plan.nodes, self._view.claim_places(assign(state, job, plan).tasks)))


def _fewest(job: JobState) -> JobState:
    return job if job.spec.min_workers is None else job.shaped(job.spec.min_workers)


def _has_room(state: CellState) -> bool:
    """Whether a node has room for a worker of one of the jobs that are looked at: else the immediate path
    starts none."""
    waiting = (state.jobs[job_id] for job_id in state.queue.values()[:MAX_TASKS])
    demands = {demand.key: demand for demand in (job.demand for job in waiting)}
    return any(state.index.candidates(one.worker, one.where) for one in demands.values())


def _planned(job: JobState) -> bool:
    """Whether the plan places it; see the module's docstring."""
    needs = (job.demand.worker, job.demand.parameter_server)
    return job.spec.min_workers is None and all(need.gpu_share_milli == WHOLE_GPU for need in needs)


def _need(vector: ResourceVector) -> Need:
    return vector.gpus, vector.cores, vector.host_memory_mib, vector.bandwidth_mbps


def _nodes(state: CellState, used: set[str], reserved: set[str]) -> tuple[str, ...]:
    """Nodes of the plan, sorted by ordinal: chosen are those that the immediate path uses, then those with
    free GPUs, the fullest first."""
    usable = [state.node(ordinal) for ordinal in bits(state.index.placeable)]
    usable = [node for node in usable if node.spec.node_id not in reserved]
    usable.sort(
        key=lambda node: (
            node.spec.node_id not in used,
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
        f"{found.fitness:.2f}; placed one by one {immediate} would start, fitness {found.given_fitness:.2f}"
    )
