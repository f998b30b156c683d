"""GENIE: deadlines and shapes. Source: GENIE §III, eq. 4 and 5, Alg. 1.

A moldable job runs on n nodes with g GPUs each; `Estimate.options` has how long an iteration takes on each ⟨n, g⟩ (eq. 1 – 3, fitted by whoever
estimates). Alg. 1 is asked anew whenever somebody is to start: the choice of a waiting job changes as its time runs out.

Departures: a job passes others whose choice does not fit now (the source leaves open whether its queue blocks); a job in one shape only has that one choice; one
of which no time is known has no expected completion, and comes last. Where its range begins above one worker,
the fewest stand for ⟨1, 1⟩ in eq. 4. Among placements of equal ratio the one with fewer GPUs, then fewer nodes.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import erf, inf, log, sqrt
from typing import NamedTuple

from penstock.ledger.demand import Demand
from penstock.ledger.index import bits
from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.settings import Genie as Settings
from penstock.model.types import MAX_GPUS_PER_NODE, JobSpec, Qos, ResourceVector, ShapeOption
from penstock.policies.base import LazyRng, Plan, Policy, Turns
from penstock.policies.gang import Gang, explanation

LATENCIES: dict[Qos, float] = {"urgent": 0.0, "prior": 1.0, "normal": 2.0}
"""Expected completion, in latencies alone on one GPU. Source: eq. 4."""


SERVING = ("qos", "protect")
SURE = 0.95  # odds with which a placement counts as in time under `protect`; where none has them, Alg. 1's own rule
NINE_IN_TEN = 1.6449  # standard deviations on either side that hold nine in ten of a normal distribution


class Choice(NamedTuple):
    """What Alg. 1 finds for a job at a time. Milliseconds."""

    option: ShapeOption | None
    """None: it has one shape only."""
    latency_ms: float
    """l_ij, eq. 2: from its start to its end; infinite where nothing is known."""
    allowance_ms: float
    """w_i, line 12: how long it may still wait; negative: the expected completion cannot be met. Infinite where it has none."""
    odds: float = 0.0
    """That it is met if the job starts now."""


def cost(nodes: int, gpus_per_node: int, most_nodes: int, most_gpus: int, theta: float) -> float:
    """c_ij of ⟨n, g⟩, > 0. `most_nodes`, `most_gpus`: N̂ and Ĝ of the cluster, ≥ 1; `theta` ≥ 0. Source: eq. 5."""
    return nodes * gpus_per_node / (most_nodes * most_gpus) + theta * nodes / most_nodes


def expected_ms(spec: JobSpec, alone_ms: float) -> float:
    """e_i after the submission: the user's own deadline, else by class. `alone_ms`: l̄ of the job on ⟨1, 1⟩; infinite where not known. Source: eq. 4."""
    if spec.deadline_ms is not None:
        return float(spec.deadline_ms)
    times = LATENCIES[spec.qos or "normal"]
    return times * alone_ms if times else 0.0


def latency_ms(job: JobState, option: ShapeOption) -> float:
    """l_ij with ν, the launch: iterations take as much longer or shorter as the option's do against those with the fewest GPUs. Source: eq. 2."""
    estimate = job.estimate
    if estimate is None or estimate.run_ms is None:
        return inf
    startup_ms = min(estimate.launch_ms or 0, estimate.run_ms)
    return startup_ms + (estimate.run_ms - startup_ms) * option.step_ms / estimate.options[0].step_ms


def odds(job: JobState, option: ShapeOption, due_ms: float, start_ms: float) -> float:
    """Probability that the job is done by `due_ms` if it starts on this option at `start_ms`, 0 – 1. Ours; the source has none.

    The iteration's time is taken as log-normal, with the option's interval holding nine in ten. 0 where no time is known.
    """
    estimate = job.estimate
    middle_ms = latency_ms(job, option)
    if estimate is None or middle_ms == inf:
        return 0.0
    startup_ms = min(estimate.launch_ms or 0, estimate.run_ms or 0)
    left_ms, work_ms = due_ms - start_ms - startup_ms, middle_ms - startup_ms
    if left_ms <= 0 or work_ms <= 0:
        return float(left_ms >= work_ms)
    spread = log(option.high_ms / option.low_ms) / (2 * NINE_IN_TEN)
    ahead = log(left_ms / work_ms)
    return float(ahead >= 0) if spread <= 0 else 0.5 * (1.0 + erf(ahead / spread / sqrt(2)))


class Genie:
    """A place, order and shape stage in one. Implements `Policy`, `Order` and `Shape` of `penstock.policies.base`.

    `settings.choose`: `qos` is Alg. 1; `protect` differs from it in two things. A placement is in time only with
    odds of `SURE`, where one has them. And jobs that cannot be in time any more, urgent ones apart, take the placement with the
    fewest GPU seconds and come after all others, since what they would gain is lost and what they use keeps others from being in time; the others are the source's baselines, which serve in order of arrival: `ratio` (CERPre), `performance` (PerfPre),
    `most` (MaxOcc: what fits now), `least` (MinOcc). `elsewhere`: places jobs of one shape.
    """

    def __init__(self, name: str, settings: Settings, elsewhere: Policy) -> None:
        self.name = name
        self._settings = settings
        self._elsewhere = elsewhere
        self._capacity = (-1, 1, 1)

    # ------------------------------------------------------------------------------------- Algorithm 1

    def choice(self, state: CellState, job: JobState) -> Choice:
        """Lines 2 – 12 for one job, now."""
        options = self._offered(job)
        estimate = job.estimate
        if not options:
            run_ms = inf if estimate is None or estimate.run_ms is None else float(estimate.run_ms)
            return Choice(None, run_ms, self._allowance(state, job, run_ms, run_ms))
        latencies = {id(option): latency_ms(job, option) for option in options}
        alone_ms = latencies[id(options[0])]
        best = self._best(state, job, options, latencies, alone_ms)
        allowance_ms = self._allowance(state, job, alone_ms, latencies[id(best)])
        due_ms = job.submitted_ms + expected_ms(job.spec, alone_ms)
        return Choice(best, latencies[id(best)], allowance_ms, odds(job, best, due_ms, state.now_ms))

    def _offered(self, job: JobState) -> Sequence[ShapeOption]:
        """M_i, line 3: of a moldable job, within its range."""
        if job.estimate is None or job.spec.min_workers is None:
            return ()
        return [
            option
            for option in job.estimate.options
            if job.spec.min_workers <= option.workers <= job.spec.workers
        ]

    def _best(
        self,
        state: CellState,
        job: JobState,
        options: Sequence[ShapeOption],
        latencies: dict[int, float],
        alone_ms: float,
    ) -> ShapeOption:
        """Lines 4 – 11."""
        match self._settings.choose:
            case "least":
                return min(options, key=lambda option: (option.workers, option.nodes))
            case "most":
                fitting = [one for one in options if self._nodes_for(state, job, one)]
                return max(fitting or options[:1], key=lambda option: (option.workers, -option.nodes))
            case "performance":
                return min(options, key=lambda option: (option.step_ms, option.workers, option.nodes))
        if self._settings.choose in SERVING:
            due_ms = job.submitted_ms + expected_ms(job.spec, alone_ms)
            in_time = [one for one in options if state.now_ms + latencies[id(one)] <= due_ms]
            if self._settings.choose == "protect":
                in_time = [one for one in in_time if odds(job, one, due_ms, state.now_ms) >= SURE] or in_time
                if not in_time and not _urgent(job):
                    return min(options, key=lambda one: (one.workers * latencies[id(one)], one.workers))
            options = in_time or options
        return max(options, key=lambda option: (self._ratio(state, option), -option.workers, -option.nodes))

    def _ratio(self, state: CellState, option: ShapeOption) -> float:
        """r_ij: performance over cost; iterations per millisecond, since all of one job have the same samples."""
        most_nodes, most_gpus = self._limits(state)
        price = cost(option.nodes, option.gpus_per_node, most_nodes, most_gpus, self._settings.theta)
        return 1.0 / (option.step_ms * price)

    def _limits(self, state: CellState) -> tuple[int, int]:
        """N̂ and Ĝ: nodes with sound GPUs, and most of these on one of them."""
        version, nodes, gpus = self._capacity
        if version != state.capacity_version:
            nodes = max(1, sum(count > 0 for count in state.sound_gpus))
            gpus = max([1, *state.sound_gpus])
            self._capacity = state.capacity_version, nodes, gpus
        return nodes, gpus

    def _allowance(self, state: CellState, job: JobState, alone_ms: float, found_ms: float) -> float:
        expected = expected_ms(job.spec, alone_ms)
        if expected == inf or found_ms == inf:
            return inf
        return job.submitted_ms + expected - (found_ms + state.now_ms)

    # ------------------------------------------------------------------------------------------ stages

    def order(self, state: CellState) -> Iterator[str]:
        """Line 13. O(jobs that wait × options)."""
        jobs = [state.jobs[job_id] for job_id in state.queue.values()]
        for job in sorted(jobs, key=lambda job: self._key(state, job)):
            yield job.job_id

    def _key(self, state: CellState, job: JobState) -> tuple[int, float, int]:
        if self._settings.choose not in SERVING:
            return 0, 0.0, job.order
        allowance = self.choice(state, job).allowance_ms
        late = self._settings.choose == "protect" and allowance < 0 and not _urgent(job)
        return int(late), allowance, job.order

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """Who does not start is passed."""
        del holding, at_ms
        for job in sorted(waiting, key=lambda job: self._key(state, job)):  # noqa: UP028 - a list takes no `send`
            yield job

    def claim(self, state: CellState, job: JobState) -> str:
        """How long it may still wait."""
        found = self.choice(state, job)
        if found.allowance_ms == inf:
            return "no completion is expected of it: its run time is not known"
        shape = (
            ""
            if found.option is None
            else f" on {found.option.nodes} × {found.option.gpus_per_node} GPUs, {found.latency_ms / 1_000:,.0f} s; "
            f"if it starts now it is in time with a probability of {100 * found.odds:.0f} %"
        )
        late = "it may wait" if found.allowance_ms >= 0 else "it is late by"
        return f"{late} {abs(found.allowance_ms) / 1_000:,.0f} s{shape}"

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """Its choice, whether that fits or not: it waits for it."""
        found = self.choice(state, job)
        if found.option is None:
            return fitting, "as many as fit now; nothing is known of its iterations"
        return min(found.option.workers, fitting), self.claim(state, job)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """On exactly the nodes and GPUs of its choice; None where they are not free."""
        option = self.choice(state, job).option
        if option is None:
            return self._elsewhere.place(state, job, rng)
        if option.workers != job.workers:
            return None
        nodes = self._nodes_for(state, job, option)
        if not nodes:
            return None
        plan = tuple(node_id for node_id in nodes for _ in range(option.gpus_per_node))
        ranked = [(float(option.nodes), 0)]
        return Plan(plan, explanation(self.name, job.job_id, Gang(state, job.demand), ranked, [plan]))

    def _nodes_for(self, state: CellState, job: JobState, option: ShapeOption) -> Sequence[str]:
        """n nodes with g GPUs each for its workers, those with the fewest free first; empty: there are not so many."""
        demand = job.shaped(option.workers).demand
        need = _times(demand, option)
        if need is None:
            return ()
        fitting = state.index.candidates(need, demand.gpu_models)
        if fitting.bit_count() < option.nodes:
            return ()
        ordinals = sorted(bits(fitting), key=lambda ordinal: (state.node(ordinal).entered.gpus, ordinal))
        return [state.node_at[ordinal] for ordinal in ordinals[: option.nodes]]


def _urgent(job: JobState) -> bool:
    """Whether nobody expects it to be in time (eq. 4), but as soon as can be."""
    return job.spec.qos == "urgent" and job.spec.deadline_ms is None


def _times(demand: Demand, option: ShapeOption) -> ResourceVector | None:
    """What a node must have free for its part; None where no node can, or the workers do not have a GPU each."""
    worker, count = demand.worker, option.gpus_per_node
    if worker.gpus != 1 or count > MAX_GPUS_PER_NODE or option.nodes * count != option.workers:
        return None
    return ResourceVector(
        gpus=count,
        cores=count * worker.cores,
        host_memory_mib=count * worker.host_memory_mib,
        gpu_memory_mib=worker.gpu_memory_mib,
        bandwidth_mbps=count * worker.bandwidth_mbps,
    )
