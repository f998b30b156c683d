"""Preemption of running jobs by the profile's own stage: where its plan stops a job for another, it is
answered like a plan of the batcher."""

from collections.abc import Callable, Iterator

from penstock.cluster.reasons import Refusal
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import ChoiceFailed
from penstock.model.schema.event import Event
from penstock.proposals.plan_stops import validate_with_stops
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core.common import Explain
from penstock_services.placer.core.plans import proposals


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
