"""Fold of plans: the nodes reserved for waiting jobs, the answers to proposals, and the window in which batch
plans are awaited."""

from penstock.ledger.state.state import MAX_PROPOSALS_REMEMBERED, Answered, CellState
from penstock.ledger.state.timers import drop_timers
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened, PlanAdopted, PlanUnit


def proposal_key(proposer: str, proposal_id: str) -> str:
    """The key of a proposal: its id is unique only for its proposer."""
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
    """Waiting units of services' proposals, in the order of the plan.
    O(jobs for which nodes are reserved)."""
    return [unit for unit in state.planned.values() if unit.proposed is not None]


def units_of_profile(state: CellState) -> list[PlanUnit]:
    """Waiting units of the profile's own plan, in its order."""
    return [unit for unit in state.planned.values() if unit.proposed is None]


def units_of_reclaim(state: CellState) -> list[PlanUnit]:
    """Those of `units_of_profile` for which resources are reclaimed: they start when these are free, and have
    no expected time."""
    return [unit for unit in units_of_profile(state) if unit.expected_ms is None]


def reserved_nodes(state: CellState) -> frozenset[str]:
    """Nodes reserved for units of proposals: no other job may be placed there."""
    if not state.planned:
        return frozenset()
    return frozenset({node_id for unit in units_of_proposals(state) for node_id in unit.nodes})


def arrived(state: CellState) -> None:
    """Counts the arrival of a job that has queued with its estimate. O(`batch_arrivals`)."""
    settings = state.settings
    if settings.batch_window_ms:
        state.arrivals.append(state.now_ms)
        del state.arrivals[: -settings.batch_arrivals]


def window_opened(state: CellState, fact: BatchWindowOpened) -> None:
    state.window_until_ms = fact.until_ms


def window_closed(state: CellState, fact: BatchWindowClosed) -> None:
    """Closes the window. If no plan arrived, the arrival rate is measured anew: `batch_arrivals` jobs are
    placed one by one before jobs wait again."""
    state.window_until_ms = 0
    state.plan_stands = fact.reason == "answered"
    drop_timers(state, "cell", "batch_window")
    if fact.reason == "over":
        state.arrivals.clear()
