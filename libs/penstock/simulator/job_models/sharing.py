"""Interference models as wrappers: slowdown of jobs that share nodes or links, and phases without computing.

- `links`: jobs that cross nodes share the links of these nodes;
- `shared-node`: a node's cores are shared by all jobs that compute there;
- `bandwidth`: a node's memory bandwidth is overloaded;
- `phases`: a run launches before it trains, and saves after it.
Each gives a job alone the speed of the inner job model, except for `phases`.
"""

from collections.abc import Mapping, Sequence

from penstock.simulator.job_models.model import Allocation, Around, JobModel, Neighbour, Placement
from penstock.simulator.traces.jobs import TraceJob

Flows = Mapping[str, int]
"""Node id → flows of a job over that node's link, > 0."""

BANDWIDTH_KNEE = 0.75
"""Share of a node's memory bandwidth above which jobs slow down.
Source: CODA §5c, the threshold of its eliminator."""
SENSITIVITY: Mapping[str, float] = {
    "bert": 0.5,
    "gnmt": 0.5,
    "lstm": 0.5,
    "transformer": 0.5,
    "deepspeech": 0.4,
    "m5": 0.3,
    "alexnet": 0.2,
    "mobilenet": 0.2,
    "shufflenet": 0.2,
    "vae": 0.2,
    "res18": 0.1,
    "res50": 0.1,
}
"""β by Synergy's models: share of a job's speed lost on a fully overloaded node. An assumption, in the order
of CODA §5c: language 0.5, speech 0.4 and 0.3, light vision 0.2, heavy vision 0.1."""
LAUNCH_S, SAVE_S = 18.0, 5.0
"""Assumptions. Liquid §7.3 shows about 28 s without computing between two jobs on a GPU, up to 5 s of them
its heartbeat; SpeCon measured less than 5 s to save."""


def flows_of(job: TraceJob, placement: Placement) -> Flows:
    """With parameter servers a flow per pair of worker and server with one end on the node; else a ring."""
    if len(placement) < 2 or job.inference:
        return {}
    if not job.parameter_servers:
        return dict.fromkeys(placement, 1)
    workers = sum(allocation.workers for allocation in placement.values())
    servers = sum(allocation.parameter_servers for allocation in placement.values())
    found: dict[str, int] = {}
    for node_id, allocation in placement.items():
        here = allocation.workers * (servers - allocation.parameter_servers)
        here += allocation.parameter_servers * (workers - allocation.workers)
        if here:
            found[node_id] = here
    return found


def most_flows(job: TraceJob, placement: Placement) -> int:
    """Flows over one link when no two tasks of the job are on one node."""
    if not job.parameter_servers:
        return 1
    workers = sum(allocation.workers for allocation in placement.values())
    return max(workers, job.parameter_servers)


class Links(Around):
    """Equal flows over a node's link get equal parts of it (an assumption, not measured).

    Another job's flows compete for the share of its time alone in which it sends. The job's busiest link,
    relative to its own flows, lengthens the part of its time in which it sends: speed = inner / (1 + share ·
    (load − 1)), load = (own flows + Σ others' flows · their share) / own flows.
    """

    name = "links"

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        speed = self.inner.speed(job, placement, neighbours)
        own = flows_of(job, placement)
        share = self.inner.network_share(job, placement) if own else 0.0
        if not share:
            return speed
        loads = {node_id: float(flows) for node_id, flows in own.items()}
        for other in neighbours:
            for node_id in loads.keys() & other.flows.keys():
                loads[node_id] += other.flows[node_id]
        load = max(loads.values()) / max(own.values())
        return speed / (1.0 + share * (load - 1.0))

    def flows(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        found = flows_of(job, placement)
        share = self.inner.network_share(job, placement) if found else 0.0
        return {node_id: flows * share for node_id, flows in found.items()}


class SharedNode(Around):
    """A node's speed is shared by all jobs that compute there, in proportion to the cores given to them.

    A job alone has the whole node, however many cores it was given. A job on several nodes runs at the speed
    of its slowest part. Source: SpeCon §VI, containers without limits on 8-core nodes; the proportion is an
    assumption.
    """

    name = "shared-node"

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        share = 1.0
        for node_id, allocation in placement.items():
            own = max(1, allocation.cores)
            others = (other.placement[node_id] for other in neighbours if node_id in other.placement)
            share = min(share, own / (own + sum(max(1, held.cores) for held in others)))
        return self.inner.speed(job, placement, neighbours) * share


class Bandwidth(Around):
    """speed = inner · (1 − β · overload): overload is 0 while a node's jobs take at most 75 % of its memory
    bandwidth, 1 when they take all of it or ask for more, linear in between. A job without a known model is
    not slowed down. A job's demand is spread evenly over its workers; its most overloaded node counts.

    A cap of c on a demand of d > c leaves the others 1 − c, and costs the job itself 1 − c / d of its speed,
    times β for a known model; times 1 for a job without GPUs, whose β is not known. The demand of a job
    without GPUs that has fewer cores than it asked for shrinks in proportion. All three are assumptions: no
    table measured caps.
    """

    name = "bandwidth"

    def __init__(self, inner: JobModel, slices_per_core: int = 1) -> None:
        super().__init__(inner)
        self._slices_per_core = slices_per_core

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        speed = self.inner.speed(job, placement, neighbours)
        suffers = SENSITIVITY.get(job.model, 0.0)
        if suffers:
            asked = max(
                self._demand(job, placement, node_id)
                + sum([other.traffic.get(node_id, 0.0) for other in neighbours])
                for node_id in placement
            )
            overload = min(1.0, max(0.0, (asked - BANDWIDTH_KNEE) / (1.0 - BANDWIDTH_KNEE)))
            speed *= 1.0 - suffers * overload
        if not job.gpus:
            suffers = 1.0
        capped = max(self._cut(job, placement, node_id) for node_id in placement)
        return speed * (1.0 - suffers * capped)

    def slowed_by_others(self, job: TraceJob) -> bool:
        return job.model in SENSITIVITY or self.inner.slowed_by_others(job)

    def traffic(self, job: TraceJob, placement: Placement) -> Mapping[str, float]:
        return {node_id: self._demand(job, placement, node_id) for node_id in placement}

    def _demand(self, job: TraceJob, placement: Placement, node_id: str) -> float:
        """Its demand as a share of the node's bandwidth, 0 – 1, at most its cap."""
        allocation = placement.get(node_id)
        if allocation is None or not job.memory_bandwidth:
            return 0.0
        demand = self._uncapped(job, placement, allocation)
        percent = allocation.bandwidth_percent
        return demand if percent is None else min(demand, percent / 100)

    def _cut(self, job: TraceJob, placement: Placement, node_id: str) -> float:
        """Share of its demand on the node that a cap cuts, 0 – 1."""
        allocation = placement[node_id]
        if allocation.bandwidth_percent is None or not job.memory_bandwidth:
            return 0.0
        return max(0.0, 1.0 - allocation.bandwidth_percent / 100 / self._uncapped(job, placement, allocation))

    def _uncapped(self, job: TraceJob, placement: Placement, allocation: Allocation) -> float:
        assert job.memory_bandwidth is not None, job
        here = allocation.workers / sum(held.workers for held in placement.values())
        demand = job.memory_bandwidth * here
        if not job.gpus and job.cores:
            demand *= min(1.0, allocation.cores / self._slices_per_core / (job.cores * here))
        return demand


class Phases(Around):
    """T = T_launch + work + T_save. Source: Liquid §3 and §6.1. Each start launches;
    GPUs idle in both phases."""

    name = "phases"

    def __init__(self, inner: JobModel, launch_s: float = LAUNCH_S, save_s: float = SAVE_S) -> None:
        super().__init__(inner)
        self.neighbours_matter = inner.neighbours_matter
        self._launch_s = launch_s
        self._save_s = save_s

    def start_up_s(self, job: TraceJob) -> float:
        return self._launch_s + self.inner.start_up_s(job)

    def save_s(self, job: TraceJob) -> float:
        return self._save_s + self.inner.save_s(job)
