"""Fold of plans: the nodes that are kept for who waits, which proposals were answered, and how, and the window in which batch plans are awaited."""

from penstock.ledger.state import MAX_PROPOSALS_REMEMBERED, Answered, CellState
from penstock.ledger.timers import drop_timers
from penstock.model.ledger_events import ProposalAnswered
from penstock.model.plans import BatchWindowClosed, BatchWindowOpened, PlanAdopted, PlanUnit


def proposal_key(proposer: str, proposal_id: str) -> str:
    """An id is the proposer's own."""
    return f"{proposer} {proposal_id}"


def plan_adopted(state: CellState, fact: PlanAdopted) -> None:
    state.planned = {unit.job_id: unit for unit in fact.units}


def proposal_answered(state: CellState, fact: ProposalAnswered) -> None:
    if fact.copy_of:
        return
    key = proposal_key(fact.proposer, fact.proposal_id)
    state.proposals[key] = Answered(state.seq, fact.verdict, fact.reason, fact.detail)
    if len(state.proposals) > MAX_PROPOSALS_REMEMBERED:
        state.proposals.popitem(last=False)
    head = state.head_of_queue()
    if head is not None and (fact.started or fact.waiting):
        head.plans_passed += 1


def units_of_proposals(state: CellState) -> list[PlanUnit]:
    """Those that wait, in the order of the plan. O(jobs for which nodes are kept)."""
    return [unit for unit in state.planned.values() if unit.proposed is not None]


def units_of_profile(state: CellState) -> list[PlanUnit]:
    """The others, in the order of the plan."""
    return [unit for unit in state.planned.values() if unit.proposed is None]


def units_of_reclaim(state: CellState) -> list[PlanUnit]:
    """Of these the jobs for which something is given back: they start when it is free, and not at a time that was expected."""
    return [unit for unit in units_of_profile(state) if unit.expected_ms is None]


def kept_nodes(state: CellState) -> frozenset[str]:
    """Nodes on which something is kept for units of proposals: nobody else may be placed there."""
    if not state.planned:
        return frozenset()
    return frozenset(node_id for unit in units_of_proposals(state) for node_id in unit.nodes)


def arrived(state: CellState) -> None:
    """A job has queued with its estimate. O(`batch_arrivals`)."""
    settings = state.settings
    if settings.batch_window_ms:
        state.arrivals.append(state.now_ms)
        del state.arrivals[: -settings.batch_arrivals]


def window_opened(state: CellState, fact: BatchWindowOpened) -> None:
    state.window_until_ms = fact.until_ms


def window_closed(state: CellState, fact: BatchWindowClosed) -> None:
    """Where no plan came the rate is measured anew: so many arrivals are placed one by one before others wait again."""
    state.window_until_ms = 0
    state.plan_stands = fact.reason == "answered"
    drop_timers(state, "cell", "batch_window")
    if fact.reason == "over":
        state.arrivals.clear()
