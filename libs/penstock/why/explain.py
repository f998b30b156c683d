"""Explanation of why a job waits, derived from the folded state: for now, or for any past record whose state
is available.

Explanations are never written to the ledger (architecture §3, Reasons). The state is only read.
"""

from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType
from typing import Literal

from msgspec import field, structs

from penstock.cluster.capacity import shortfall, suits
from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import ADVICE, Reason, refusals
from penstock.cluster.view import ClusterView, living_places
from penstock.errors import one_line
from penstock.ledger.derived.succession import awaited
from penstock.ledger.fold.plans import units_of_proposals
from penstock.ledger.state.index import NodeIndex, bits, set_of
from penstock.ledger.state.job.job_state import WAITING, JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.ledger.views import unproven
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import ResourceVector, Value
from penstock.scheduling.groups.validate_groups import apart_from_all
from penstock.scheduling.place.measured_pairs import apart_text, sharing_text
from penstock.scheduling.place.moldable import as_it_waits
from penstock.scheduling.profiles import in_force
from penstock.scheduling.stages.protocols import Order, Preemption, Profile
from penstock.scheduling.stages.regroup import regroups, waits_for_plan
from penstock.text.counting import count
from penstock.text.spans import span
from penstock.why.doubts import cordon_text, distrust_text, doubt_text, hold_text, silence_text
from penstock.why.job_name import named
from penstock.why.queue_position import Line, line_of

WAITING_HELPS = (
    Reason.NODES_CORDONED,
    Reason.NODES_DISTRUSTED,
    Reason.NODES_SUSPECT,
    Reason.GPUS_BUSY,
    Reason.CORES,
    Reason.HOST_MEMORY,
    Reason.BANDWIDTH,
)
"""Temporary reasons of nodes, in order of preference when equally many nodes have them."""


MAX_NAMED = 5  # jobs in a sentence


class UnknownJob(LookupError):
    """The state has no such job: it was never submitted, or ended so long ago that only read models have
    it."""


class Explanation(Value, frozen=True, kw_only=True):
    """The answer to `why JOB`."""

    job_id: str
    seq: int
    """The ledger record up to which the state was folded."""
    record_ms: int
    """The time of that record."""
    now_ms: int
    """The time for which waiting and remaining times hold; like `record_ms`, by the ledger's clock."""
    status: str
    reason: Reason | None = None
    """The dominant reason; None for a job that does not wait."""
    text: str
    detail: str = ""
    """The figures behind the reason."""
    next_step: str
    now_or_never: Literal["now", "later", "never"] | None = None
    """now: it fits at this time, and no preemptive policy gives the resources to other jobs. later: not now,
    but the empty cell could hold it. never: not even the empty cell could. None for a job that does not wait,
    or whose demand is not known yet."""
    histogram: dict[str, int] = field(default_factory=dict)
    """Nodes that refuse one worker, counted by the first reason that holds."""
    feasible: int = 0
    """Nodes on which one worker fits now."""
    claim: str = ""
    """The reason for its position in the profile's own order; empty for a job that is not in the queue, and
    for profiles that go by arrival or stop jobs."""
    position: int | None = None
    """Position in the queue in the order of the profile, from 1; None for a job that is not in it."""
    ahead: int = 0
    """Jobs before it in the queue."""
    waited_ms: int | None = None
    """Time from its submission to `now_ms`, for a waiting job."""
    unproven: list[dict[str, str]] = field(default_factory=list)
    """Its tasks on silent nodes (`penstock.ledger.views.unproven`)."""


def explain(
    state: CellState, job_id: str, now_ms: int | None = None, line: Line | None = None
) -> Explanation:
    """The dominant reason with its figures. Raises `UnknownJob`. Costs about as much as one placement.

    `now_ms`: the current ledger time, up to which times count; None: the latest record's. `line`: of this
    state, for a caller that asks about many jobs.
    """
    now_ms = max(now_ms or 0, state.now_ms)
    found, job = _explain(state, job_id, now_ms, line), state.jobs.get(job_id)
    waited_ms = now_ms - job.submitted_ms if job is not None and job.status in WAITING else None
    return structs.replace(found, now_ms=now_ms, waited_ms=waited_ms)


def _explain(state: CellState, job_id: str, now_ms: int, line: Line | None) -> Explanation:
    job = state.jobs.get(job_id)
    if job is None:
        outcome = state.ended.get(job_id)
        if outcome is None:
            raise UnknownJob(f"no job {job_id!r} up to record {state.seq}")
        return not_waiting(
            state, job_id, outcome, f"It has ended: {outcome}.", "Read its output with `penstock logs`."
        )
    if job.status not in WAITING:
        return _holding(state, job, now_ms)
    if job.held is not None:
        return _waiting(state, job, Reason.HELD, hold_text(job.held), None)
    if job.estimate is None:
        return _waiting(state, job, Reason.AWAITING_ESTIMATE, job.exit.failure, None)
    short = shortfall(state.index, job.demand)
    if short is not None:
        return _waiting(state, job, short.reason, short.detail, "never")
    try:
        line = line or line_of(state, now_ms)
        profile = line.profile
        job = as_it_waits(state, job, profile.shape)
        rng = LazyRng(state.settings.seed, f"why:{job.job_id}")
        fits_now = not state.frozen and profile.place.place(state, job, rng) is not None
        reason, detail = _reason(state, job, profile, fits_now, now_ms)
        claim = profile.order.claim(state, job) if profile.order is not None and job.in_line else ""
        place = None if line.places is None else line.places.get(job_id)
    except Exception as error:  # noqa: BLE001 - the policy's bug is the answer
        return _waiting(state, job, Reason.POLICY_FAILED, one_line(error), "later")
    failed = state.failed_choices
    if reason is Reason.ABOUT_TO_START and failed.in_a_row and failed.job_id in (job.job_id, None):
        reason, detail = Reason.POLICY_FAILED, failed.error
    now = fits_now and reason is not Reason.OUTRANKED
    found = _waiting(state, job, reason, detail, "now" if now else "later")
    if place is not None:
        found = structs.replace(found, position=place + 1, ahead=place)
    return structs.replace(found, claim=claim)


def _reason(
    state: CellState, job: JobState, profile: Profile, fits_now: bool, now_ms: int
) -> tuple[Reason, str]:
    """The dominant reason of a job that the empty cell could hold."""
    if job.status is JobStatus.BACKOFF:
        timer = state.timers.get(timer_id(job.job_id, "backoff"))
        wait = f"; it queues again in {span(max(0, timer.at_ms - now_ms))}" if timer else ""
        return Reason.BACKOFF, f"attempt {job.attempt} failed ({job.exit.failure or 'no reason given'}){wait}"
    if state.frozen:
        return Reason.CELL_FROZEN, state.frozen
    index = state.index
    if not index.known & ~index.gone:
        return Reason.NO_NODES, ""
    unit = state.planned.get(job.job_id)
    if unit is not None and unit.expected_ms is None:
        return Reason.AWAITING_STOPS, _stopping_on(state, unit.nodes)
    if unit is not None and unit.expected_ms is not None and not fits_now:
        return Reason.NODES_KEPT, _expected(unit.nodes, unit.expected_ms - now_ms)
    if profile.preempt is not None and not (fits_now and state.window_until_ms > now_ms):
        outranked = _outranked(state, job, profile.name, profile.preempt)
        if outranked is not None:
            return Reason.OUTRANKED, outranked
        return (Reason.ABOUT_TO_START, "") if fits_now else _lack(state, job)
    if fits_now:
        return _beside_room(state, job, profile, now_ms)
    reason, detail = _lack(state, job)
    apart = apart_from_all(state, job, profile)
    return reason, f"{detail}; it shares no GPUs: {apart}" if apart else detail


def _beside_room(state: CellState, job: JobState, profile: Profile, now_ms: int) -> tuple[Reason, str]:
    """The reason of a job that fits, under a profile that stops no jobs or while a window is open."""
    if state.window_until_ms > now_ms:
        return Reason.BATCH_WINDOW, f"the wait for a plan is over in {span(state.window_until_ms - now_ms)}"
    if waits_for_plan(state, profile.regroup) and regroups(job.demand):
        return Reason.OUTRANKED, "the latest plan gives the GPUs to other jobs"
    if others := _reserved_for_plans(state, job):
        return Reason.KEPT_FOR_OTHERS, others
    backfill = profile.backfill
    for other in state.planned.values() if backfill is not None else ():
        if other.proposed is None and backfill is not None and backfill.beside(state, job, other) is None:
            left_ms = (other.expected_ms or now_ms) - now_ms
            return (
                Reason.KEPT_FOR_OTHERS,
                f"{_expected(other.nodes, left_ms)}, for {named(state, other.job_id)}",
            )
    if profile.order is not None:
        return _own_order(state, job, profile.name, profile.order)
    return _turn(state, job, in_force(state.settings))


def _reserved_for_plans(state: CellState, job: JobState) -> str:
    """`node-a1, for night, by the plan p7 of batcher`, if it fits only on nodes reserved for other jobs;
    empty: it fits elsewhere."""
    units = units_of_proposals(state)
    reserved = {node_id for unit in units for node_id in unit.nodes if node_id in state.nodes}
    avoid = set_of(state.nodes[node_id].ordinal for node_id in reserved)
    if not reserved or ClusterView(state).fit(job.demand, avoid) is not None:
        return ""
    first = units[0]
    by = (
        ""
        if first.proposed is None
        else f"the plan {first.proposed.of.proposal_id} of {first.proposed.of.proposer}"
    )
    return f"{', '.join(sorted(reserved)[:MAX_NAMED])}, for {named(state, first.job_id)}, by {by}"


def _turn(state: CellState, job: JobState, settings: PlacerSettings) -> tuple[Reason, str]:
    """The reason of a job that fits: only the queue can delay it."""
    head = state.head_of_queue()
    ahead = state.queue.bisect_left(job.order)
    if head is not None and head is not job and head.backfill_count >= settings.max_overtakes:
        return (
            Reason.OVERTAKE_LIMIT,
            f"{named(state, head.job_id)} has been overtaken {head.backfill_count} times, the maximum is "
            f"{settings.max_overtakes}",
        )
    if ahead >= settings.backfill_window:
        return (
            Reason.BEHIND_IN_QUEUE,
            f"{ahead} jobs are ahead; only the first {settings.backfill_window} in the queue may start",
        )
    return Reason.ABOUT_TO_START, ""


def _stopping_on(state: CellState, nodes: tuple[str, ...]) -> str:
    """`night on node-a1`: the jobs that are being stopped there; else only the nodes."""
    reserved = set(nodes)
    stopping = [
        f"{named(state, job.job_id)} on {', '.join(there)}"
        for _, job in sorted(state.stopping.items())
        if (there := sorted(reserved & {place.node_id for place in living_places(job)}))
    ]
    names = [*islice(stopping, MAX_NAMED)] or sorted(reserved)[:MAX_NAMED]
    rest = max(len(stopping), 0 if stopping else len(reserved)) - len(names)
    return ", ".join(names) + (f" and {rest} others" if rest > 0 else "")


def _expected(nodes: tuple[str, ...], left_ms: int) -> str:
    """`node-a1, node-a2, expected in 5 min`."""
    names = sorted(set(nodes))
    rest = f" and {len(names) - MAX_NAMED} others" if len(names) > MAX_NAMED else ""
    when = f"expected in {span(left_ms)}" if left_ms > 0 else f"expected {span(-left_ms)} ago"
    return f"{', '.join(names[:MAX_NAMED])}{rest}, {when}"


def _own_order(state: CellState, job: JobState, profile: str, stage: Order) -> tuple[Reason, str]:
    """The reason of a job that fits, where the policy's own order decides whether it is its turn."""
    if job.job_id in stage.order(state):
        return Reason.ABOUT_TO_START, ""
    return Reason.BEHIND_IN_QUEUE, f"profile {profile} starts other jobs first"


def _outranked(state: CellState, job: JobState, profile: str, stage: Preemption) -> str | None:
    """Which jobs the profile prefers; None where it is this job's turn, or no job before it takes the
    GPUs."""
    selection = stage.select(state)
    if job.job_id in selection.claims:
        return None
    runs = {held.job_id for order, held in state.holding.items() if order not in state.stopping}
    runs -= set(selection.stops)
    chosen = runs | set(selection.claims)
    ranking = stage.ranking(state)
    rank = ranking.index(job.job_id)
    before = [job_id for job_id in ranking[:rank] if job_id in chosen]
    if not before:
        return None
    claims = {name: stage.claim(state, state.jobs[name]) for name in (job.job_id, *before[:MAX_NAMED])}
    names = ", ".join(f"{named(state, name)} ({claims[name]})" for name in before[:MAX_NAMED])
    more = f" and {len(before) - MAX_NAMED} others" if len(before) > MAX_NAMED else ""
    return (
        f"number {rank + 1} of {len(ranking)} in the order of profile {profile} ({claims[job.job_id]}); "
        f"the GPUs go to earlier jobs: {names}{more}"
    )


def _lack(state: CellState, job: JobState) -> tuple[Reason, str]:
    """The reason of a job that does not fit now: which of its tasks finds no node, and what most of the
    suitable nodes lack."""
    index, demand = state.index, job.demand
    roles = [("worker", demand.worker)]
    if demand.parameter_servers:
        roles.append(("parameter server", demand.parameter_server))
    for role, need in roles:
        if not index.candidates(need, demand.where):
            return _dominant(state, role, need, demand.where)
    fit = ClusterView(state).tasks_that_fit(demand)
    if fit == demand.tasks and (apart := apart_text(state, job)):
        return Reason.GPU_NEIGHBOURS, apart
    if fit == demand.tasks:
        return (
            Reason.GANG_INCOMPLETE,
            "all tasks would fit, but not in the order in which the profile places them",
        )
    return Reason.GANG_INCOMPLETE, f"{fit} of {demand.tasks} tasks fit now, and all must start together"


def _dominant(state: CellState, role: str, need: ResourceVector, where: Where) -> tuple[Reason, str]:
    """What most of the nodes lack that could hold the task when empty; with each that is suspect, since
    that is no usual wait."""
    index, suitable = state.index, 0
    for shape, nodes in index.shape.items():
        if suits(shape, need, where):
            suitable |= nodes & ~index.gone
    suitable &= index.within(where)
    refused = refusals(index, need, where)
    reason, detail = _most_lack(index, role, need, suitable, refused)
    doubted = islice(bits(refused.get(Reason.NODES_DISTRUSTED, 0) & suitable), MAX_NAMED)
    texts = [distrust_text(state.node(ordinal), state.now_ms) for ordinal in doubted]
    return reason, f"{detail}; suspect is {'; '.join(texts)}" if texts else detail


def _most_lack(
    index: NodeIndex, role: str, need: ResourceVector, suitable: int, refused: Mapping[Reason, int]
) -> tuple[Reason, str]:
    counts = {reason: (refused.get(reason, 0) & suitable).bit_count() for reason in WAITING_HELPS}
    reason = max(WAITING_HELPS, key=counts.__getitem__)
    among = f"{counts[reason]} of {suitable.bit_count()} suitable nodes"
    if reason is Reason.NODES_CORDONED:
        return reason, f"{among} are cordoned"
    if reason is Reason.NODES_DISTRUSTED:
        return reason, f"{among} are suspect"
    if reason is Reason.NODES_SUSPECT:
        return reason, f"{among} are silent"
    if reason is not Reason.GPUS_BUSY:
        asked = {
            Reason.CORES: f"{need.cores} cores",
            Reason.HOST_MEMORY: f"{need.host_memory_mib} MiB of memory",
            Reason.BANDWIDTH: f"{need.bandwidth_mbps} Mbit/s",
        }[reason]
        return reason, f"one {role} needs {asked}; {among} have less free"
    levels = [(suitable & nodes).bit_count() for nodes in index.gpus.at_least[1:]]
    free, most = sum(levels), sum(1 for count in levels if count)
    if free >= need.gpus:
        reason = Reason.GPUS_FRAGMENTED
    return (
        reason,
        f"one {role} needs {count(need.gpus, 'GPU')} on one node; suitable nodes have {free} free, at most "
        f"{most} on one node",
    )


def _waiting(
    state: CellState,
    job: JobState,
    reason: Reason,
    detail: str,
    now_or_never: Literal["now", "later", "never"] | None,
) -> Explanation:
    counts: dict[str, int] = {}
    feasible = 0
    if job.estimate is not None:
        need, models = job.demand.worker, job.demand.where
        counts = {str(why): nodes.bit_count() for why, nodes in refusals(state.index, need, models).items()}
        feasible = state.index.candidates(need, models).bit_count()
    in_queue = job.order in state.queue
    ahead = state.queue.bisect_left(job.order) if in_queue else 0
    return Explanation(
        job_id=job.job_id,
        seq=state.seq,
        record_ms=state.now_ms,
        now_ms=state.now_ms,
        status=job.status,
        reason=reason,
        text=ADVICE[reason].text,
        detail=detail,
        next_step=ADVICE[reason].next_step,
        now_or_never=now_or_never,
        histogram=counts,
        feasible=feasible,
        position=ahead + 1 if in_queue else None,
        ahead=ahead,
    )


def _turns_text(job: JobState, now_ms: int) -> str:
    """` It takes turns there with b, c, as group-7-0: …`; empty for a job that has its GPUs alone, or without
    a predicted interleaving."""
    sharing, turns, part = job.sharing, job.sharing.turns, job.sharing.measured
    if turns is None:
        return ""
    measured = "" if part is None else f" Measured: it runs for {part:.0%} of its time"
    if sharing.short_ms is not None:
        measured += f", less than promised since {span(now_ms - sharing.short_ms)}"
    others = ", ".join(name for name in turns.job_ids if name != job.job_id)
    found = (
        f" It takes turns there with {others}, as {sharing.group}, in the order {', '.join(turns.job_ids)}. "
        f"One iteration of each takes {turns.period_ms:,.0f} ms, efficiency {turns.efficiency:.2f}. "
        f"Expected: {job.pace.speed:.0%} of its speed alone.{measured and measured + '.'}"
    )
    return f"{found} Considered: {turns.alternative}." if turns.alternative else found


def _holding(state: CellState, job: JobState, now_ms: int) -> Explanation:
    """The answer for a job that holds its places: launching, running or stopping."""
    nodes = sorted({task.place.node_id for task in job.tasks.values()})
    where = f"on {', '.join(nodes[:5])}{' and others' if len(nodes) > 5 else ''}"
    before = awaited(state, job)
    if before:
        names = " and ".join(named(state, name) for name in before[:MAX_NAMED])
        ended = f"{names} {'has' if len(before) == 1 else 'have'} ended there"
        text = f"It starts {where} as soon as {ended}."
        if job.succession.prelaunch:
            text = f"It launches {where}, and gets its GPUs as soon as {ended}."
        step = "Wait; a job that ends may save first."
    elif job.status is JobStatus.LAUNCHING:
        text, step = f"It is being started {where}.", "Wait; `penstock get nodes` shows whether they answer."
    elif job.status is JobStatus.RUNNING:
        text, step = f"It runs {where}.{_turns_text(job, now_ms)}", "Follow it with `penstock logs -f`."
    else:
        text = f"It is being stopped {where} ({job.stop.reason})."
        step = "Wait; its resources are free when the end of each task is proven."
        if job.target and job.moves.latest is not None:
            text = (
                f"It moves from {', '.join(nodes[:5])} to "
                f"{', '.join(sorted(set(job.moves.latest.nodes))[:5])}, where its place is reserved."
            )
            step = "Wait; it starts there when the end of each task is proven."
        elif outcome := ENDS_AS.get(job.stop.reason or ""):
            text += f" It ends as {outcome} when every exit is proven."
    if shares := sharing_text(state, job):
        text += f" {shares}"
    if job.held is not None:
        text += f" It is held ({hold_text(job.held)}): it does not start again."
    cordoned = [f"{name} {cordon_text(cordon)}" for name in nodes if (cordon := state.nodes[name].cordon)]
    if cordoned:
        text += f" Of its nodes {'; '.join(cordoned[:MAX_NAMED])}."
    missing = unproven(state.nodes, job)
    if missing:
        text += f" {'; '.join(silence_text(row) for row in missing[:MAX_NAMED])}."
        text += doubt_text(state, missing[0]["node_id"], now_ms)
        step = (
            "Its end is proven by a report, a new boot of the node, or its lease. If that machine is dead "
            f"for certain, declare it dead: `penstock node fence {missing[0]['node_id']}`."
        )
    answer = not_waiting(state, job.job_id, job.status, text, step)
    if before:
        detail = _stopping_on(state, tuple(nodes))
        answer = structs.replace(answer, reason=Reason.AWAITING_STOPS, detail=detail)
    return structs.replace(answer, unproven=missing)


ENDS_AS = MappingProxyType(
    {"cancelled": "cancelled", "run_timeout": "timed out running", "queue_timeout": "timed out queued"}
)
"""Reason of a stop → the resulting outcome, as text."""


def not_waiting(state: CellState, job_id: str, status: str, text: str, next_step: str) -> Explanation:
    """The answer for a job that holds its places, has ended, or is not folded yet."""
    return Explanation(
        job_id=job_id,
        seq=state.seq,
        record_ms=state.now_ms,
        now_ms=state.now_ms,
        status=status,
        text=text,
        next_step=next_step,
    )
