"""GENIE: deadline-aware (QoS) scheduling of moldable jobs. Source: GENIE §III, eq. 4 and 5, Alg. 1.

A moldable job runs on n nodes with g GPUs each; `Estimate.options` has the iteration time on each ⟨n, g⟩ (eq.
1 – 3, fitted by the estimator). Alg. 1 is evaluated anew whenever jobs are to start: the choice of a waiting
job changes as its deadline comes closer.

Departures: a job overtakes others whose choice does not fit now (the source does not state whether its queue
blocks); a job with only one shape has that one choice; a job without a known time comes last, whatever its
expected completion. Where its range begins above one worker, the smallest shape replaces ⟨1, 1⟩ in eq. 4.
Among placements of equal ratio the one with fewer GPUs is chosen, then fewer nodes.
"""

from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, explanation
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.types import WHOLE_GPU, Estimate, ResourceVector, ShapeOption
from penstock.scheduling.order.deadlines import SURE, expected_ms, latency_ms, odds, sure_ms, urgent
from penstock.scheduling.place.together import whole_gang
from penstock.scheduling.stages.protocols import Policy
from penstock.text.spans import span

THETA = 0.5
"""θ of eq. 5: cost of a further node, beside its GPUs. The source gives no value; with this one a further
node costs as much as half the GPUs of the largest node."""
LEAST_STEP_MS = 1e-9  # a picosecond: no iteration takes less, whatever an estimate claims


class Placement(NamedTuple):
    """One s_ij of a job. `latency_ms`: l_ij, eq. 2, from its start to its end; infinite where it is not
    known. `sure_ms`: the same with probability `SURE`."""

    option: ShapeOption
    latency_ms: float
    sure_ms: float


class Offers(NamedTuple):
    """The placements of a job; unchanged while its estimate and the cell's nodes are."""

    estimate: Estimate | None
    found: Sequence[Placement]
    """M_i, in the order of the estimate."""
    ranked: Sequence[Placement]
    """Best ratio first."""


class Choice(NamedTuple):
    """Result of Alg. 1 for a job at one time. Milliseconds, by the ledger's time."""

    option: ShapeOption | None
    """None: it has only one shape."""
    latency_ms: float
    due_ms: float
    """e_i; infinite where no completion is expected."""
    allowance_ms: float
    """w_i, line 12 (slack): how long it may still wait; negative: the expected completion cannot be met.
    Infinite where there is none."""


def cost(nodes: int, gpus_per_node: int, most_nodes: int, most_gpus: int, theta: float) -> float:
    """c_ij of ⟨n, g⟩, > 0. `most_nodes`, `most_gpus`: N̂ and Ĝ of the cluster, ≥ 1; `theta` ≥ 0. Source: eq.
    5."""
    return nodes * gpus_per_node / (most_nodes * most_gpus) + theta * nodes / most_nodes


class Genie:
    """A place and shape stage in one, and what an order asks. Implements `Policy` and `Shape` of
    `penstock.scheduling.stages.protocols`.

    Alg. 1 with three additions. A placement counts as in time only with probability `SURE`, if any placement
    has it. If none has, and no other job waits, the one with the highest probability is chosen, since GPUs
    are left over. And jobs that can no longer be in time, except urgent ones, take the placement with the
    fewest GPU seconds and come after all others: their deadline is lost, and their GPUs could help others to
    be in time.

    `elsewhere`: places jobs of one shape; `theta` ≥ 0: θ of eq. 5. The source's own rules are a subclass
    (`penstock_papers.genie`).
    """

    waits = True

    def __init__(self, name: str, elsewhere: Policy, theta: float = THETA) -> None:
        self.name = name
        self._theta = theta
        self._elsewhere = elsewhere
        self._seen = (-1, -1)
        """Versions of the cell's capacity and of its sound GPUs, for which the following hold."""
        self._limits = (1, 1)
        """N̂ and Ĝ: number of nodes with sound GPUs, and the most such GPUs on one node."""
        self._offers: dict[str, Offers] = {}
        self._could_hold: dict[tuple[ResourceVector, Where], int] = {}
        """Demand of a node's part of a gang → how many of the cell's nodes could hold it when empty."""

    # ------------------------------------------------------------------------------------- Algorithm 1

    def choice(self, state: CellState, job: JobState) -> Choice:
        """Lines 2 – 12 for one job, now."""
        offers = self.offers(state, job)
        if offers.found:
            due_ms = job.submitted_ms + expected_ms(job.spec, offers.found[0].latency_ms)
            option, latency, _ = self._best(state, job, offers, due_ms)
            return Choice(option, latency, due_ms, _allowance(state, due_ms, latency))
        estimate = job.estimate
        run_ms = inf if estimate is None or estimate.run_ms is None else float(estimate.run_ms)
        due_ms = job.submitted_ms + expected_ms(job.spec, run_ms)
        return Choice(None, run_ms, due_ms, _allowance(state, due_ms, run_ms))

    def _see_capacity(self, state: CellState) -> None:
        """Clears the caches if nodes have joined, changed or left, or other GPUs are sound."""
        if self._seen != (seen := (state.capacity_version, state.sound_version)):
            self._seen = seen
            self._could_hold.clear()
            self._offers.clear()
            self._limits = max(1, sum(count > 0 for count in state.sound_gpus)), max([1, *state.sound_gpus])

    def offers(self, state: CellState, job: JobState) -> Offers:
        """The job's placements, cached while its estimate is the same; entries of ended jobs are removed once
        the cache has more than twice as many jobs as live."""
        self._see_capacity(state)
        known = self._offers.get(job.job_id)
        if known is not None and known.estimate is job.estimate:
            return known
        if len(self._offers) > 2 * len(state.jobs):
            self._offers = {name: known for name, known in self._offers.items() if name in state.jobs}
        found = [
            Placement(
                option,
                latency_ms(job, option),
                self._sure_ms(job, option),
            )
            for option in self._offered(state, job)
        ]
        ranked = sorted(
            found, key=lambda one: (-self._ratio(one.option), one.option.workers, one.option.nodes)
        )
        offers = self._offers[job.job_id] = Offers(job.estimate, found, ranked)
        return offers

    def _sure_ms(self, job: JobState, option: ShapeOption) -> float:
        """`Placement.sure_ms`."""
        return sure_ms(job, option)

    def _ratio(self, option: ShapeOption) -> float:
        """r_ij, in iterations per millisecond: all placements of a job have the same samples. Finite,
        whatever an estimate claims."""
        price = cost(option.nodes, option.gpus_per_node, *self._limits, self._theta)
        return 1.0 / max(option.step_ms * price, LEAST_STEP_MS)

    def _offered(self, state: CellState, job: JobState) -> Sequence[ShapeOption]:
        """M_i, line 3: options of a moldable job within its range that the empty cell could hold, with the
        same number of GPUs on each node."""
        estimate, fewest = job.estimate, job.spec.min_workers
        if estimate is None or fewest is None:
            return ()
        return [
            option
            for option in estimate.options
            if fewest <= option.workers <= job.spec.workers and self._ever_fits(state, job, option)
        ]

    def _ever_fits(self, state: CellState, job: JobState, option: ShapeOption) -> bool:
        """Whether the empty cell has enough nodes for it."""
        need = on_each_node(job, option)
        if need is None:
            return False
        key = need, job.spec.where
        found = self._could_hold.get(key)
        if found is None:
            suits = [state.node(ordinal) for ordinal in bits(state.index.eligible(need, job.spec.where))]
            found = self._could_hold[key] = sum(
                need.gpus <= state.sound_gpus[node.ordinal]
                and need.cores <= node.spec.cores
                and need.host_memory_mib <= node.spec.host_memory_mib
                and need.bandwidth_mbps <= node.spec.bandwidth_mbps
                for node in suits
            )
        return found >= option.nodes

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        """Lines 4 – 11, as the class has them."""
        found, now_ms = offers.found, state.now_ms
        sure = next((one for one in offers.ranked if now_ms + one.sure_ms <= due_ms), None)
        if sure is None and (safest := self._safest(state, job, found, due_ms)) is not None:
            return safest
        in_time = sure or self._in_time(state, offers, due_ms)
        if in_time is None and not urgent(job.spec):
            return min(found, key=lambda one: (one.option.workers * one.latency_ms, one.option.workers))
        return in_time or offers.ranked[0]

    def _in_time(self, state: CellState, offers: Offers, due_ms: float) -> Placement | None:
        """Line 5: the best ratio that is expected in time; None: nothing is."""
        return next((one for one in offers.ranked if state.now_ms + one.latency_ms <= due_ms), None)

    def _safest(
        self, state: CellState, job: JobState, found: Sequence[Placement], due_ms: float
    ) -> Placement | None:
        """The placement with the highest probability of those that fit now; None: none fits, it will
        certainly be late, or other jobs wait."""
        if any(job_id != job.job_id for job_id in islice(state.queue.values(), 2)):
            return None
        fitting = [
            (odds(job, one.option, due_ms, state.now_ms), -one.option.workers, number, one)
            for number, one in enumerate(found)
            if self._nodes_for(state, job, one.option)
        ]
        best = max(fitting, default=None)
        return None if best is None or best[0] < 1 - SURE else best[-1]

    # ------------------------------------------------------------------------------------------ stages

    def claim(self, state: CellState, job: JobState) -> str:
        """How long it may still wait."""
        return self._claim(state, job, self.choice(state, job))

    def _claim(self, state: CellState, job: JobState, found: Choice) -> str:
        if found.allowance_ms == inf:
            if found.due_ms == inf:
                return "last in the queue: its run time is unknown, so its deadline cannot be planned"
            left_ms = found.due_ms - state.now_ms
            due = f"is due in {span(left_ms)}" if left_ms > 0 else f"was due {span(abs(left_ms))} ago"
            return f"last in the queue: it {due}, but its run time is unknown"
        shape = (
            ""
            if found.option is None
            else f"; it runs {span(found.latency_ms)} on {found.option.nodes} × {found.option.gpus_per_node} "
            "GPUs, and a start now is in time "
            f"with a probability of {100 * odds(job, found.option, found.due_ms, state.now_ms):.0f} %"
        )
        late = "it may wait" if found.allowance_ms >= 0 else "it is late by"
        return f"{late} {span(abs(found.allowance_ms))}{shape}"

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """The workers of its choice, whether that fits now or not: the job waits for it."""
        found = self.choice(state, job)
        option = found.option
        if option is None:
            return fitting, "as many workers as fit now: its step times are unknown"
        if option.workers > fitting:
            return option.workers, f"it waits for {option.nodes} × {option.gpus_per_node} GPUs"
        return option.workers, self._claim(state, job, found)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Places the job in exactly the shape of its choice; None where that is not free."""
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
        """n nodes with g free GPUs each for its workers, those with the fewest free GPUs first; empty: there
        are too few."""
        need = on_each_node(job, option)
        if need is None:
            return ()
        fitting = state.index.candidates(need, job.spec.where)
        if fitting.bit_count() < option.nodes:
            return ()
        ordinals = sorted(bits(fitting), key=lambda ordinal: (state.node(ordinal).entered.gpus, ordinal))
        return [state.node_at[ordinal] for ordinal in ordinals[: option.nodes]]


def _allowance(state: CellState, due_ms: float, latency: float) -> float:
    """Line 12."""
    return inf if inf in (due_ms, latency) else due_ms - (latency + state.now_ms)


def on_each_node(job: JobState, option: ShapeOption) -> ResourceVector | None:
    """Resources for the part of the gang on one node; None where the parts are uneven, or the workers do not
    have a whole GPU each."""
    count, worker = option.gpus_per_node, job.demand.worker
    if option.nodes * count != option.workers or worker.gpus != 1 or worker.gpu_share_milli < WHOLE_GPU:
        return None
    return whole_gang(job.demand_of(count))
