"""Preemption of running jobs by the profile's own stage: where its plan stops a job for another, it is answered like a plan of the batcher."""

from collections.abc import Callable, Iterator

from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.ledger_events import ChoiceFailed
from penstock.policies.base import Profile
from penstock.policies.plan_stops import validate_with_stops
from penstock.policies.refusal import Refusal
from penstock_services.placer.core import proposals
from penstock_services.placer.core.explaining import Explain


def begin(
    state: CellState, profile: Profile, explain: Explain, failed: Callable[[Exception], str]
) -> Iterator[Event]:
    """Nothing where no job is preempted. A stage that raises loses this choice and no other."""
    if profile.make_way is None:
        return
    try:
        plan = profile.make_way.plan(state)
        if plan is None:
            return
        validated, stops = validate_with_stops(state, plan, profile)
    except Exception as raised:  # noqa: BLE001 - nothing is swallowed: it becomes a fact and a dead letter
        yield ChoiceFailed(profile=profile.name, job_id=None, error=failed(raised))
        return
    if isinstance(validated, Refusal) or stops.refused or not stops.made:
        return
    if any(unit.refusal is not None for unit in validated.units):
        return
    yield from proposals.answer(state, plan, profile, explain)
