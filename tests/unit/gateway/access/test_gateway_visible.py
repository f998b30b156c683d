"""What a caller is shown of other tenants' jobs."""

import pytest

from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.visible import HIDDEN, event_for

FAILED = {"seq": 9, "n": 0, "type": "penstock.job.ended", "job_id": "j", "data": {"reason": "key=hunter2"}}
READER = frozenset({Role.READ})


@pytest.mark.parametrize("caller", [Caller(READER), Caller(READER, "vision")])
@pytest.mark.parametrize("owner", ["speech", None])
def test_an_event_is_hidden_unless_its_job_is_known_to_be_the_caller_s(
    caller: Caller, owner: str | None
) -> None:
    """The dashboard's token reads the cell and has no tenant; the job has left the tables, and its owner with
    it."""
    shown = event_for(caller, dict(FAILED), owner)
    assert shown["data"] is None
    assert "data" in shown[HIDDEN]
    assert shown["seq"] == 9


def test_the_tenant_and_operators_see_all_of_it() -> None:
    assert event_for(Caller(READER, "vision"), FAILED, "vision") == FAILED
    assert event_for(Caller(frozenset({Role.OPERATE})), FAILED, None) == FAILED
