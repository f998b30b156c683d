"""The gateway raises an alarm where a cell does not go on, and names the cause; the next record that mends
the cell ends the alarm."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from penstock.model.inputs.external_events import NodeJoined
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import JSON, SPEC, Cell, running
from tests.support.waiting import await_until


async def alarm(cell: Cell, *, stands: bool) -> dict[str, Any]:
    """The alarm of the status, once one stands or none does."""

    async def found() -> dict[str, Any]:
        cell.look_at_services()
        status: dict[str, Any] = (await cell.http.get("/v1/status")).json()
        return status if (status["alarm"] is not None) is stands else {}

    found_alarm: dict[str, Any] = (await await_until(found, f"an alarm: {stands}"))["alarm"] or {}
    return found_alarm


def nothing(*_: Any) -> Iterator[Any]:
    """In place of deciding: a placer that passes everything over."""
    return iter(())


async def test_a_job_that_is_passed_over_is_an_alarm_until_it_starts(dsn: str) -> None:
    async with running(dsn) as cell:
        cell.placer.join(node_spec("n1"))
        with patch.object(cell.placer.core.decider, "decide", nothing):
            cell.placer.submit("waits")
        await cell.tell()
        found = await alarm(cell, stands=True)
        assert found["job_id"] == "waits"
        assert found["cause"] == "it waits though it fits on n1: the placer passed it over; this is a bug"
        cell.placer.feed(NodeJoined(node=node_spec("n2")))
        assert cell.placer.state.jobs["waits"].status == "launching"
        await cell.tell()
        assert await alarm(cell, stands=False) == {}


async def test_a_submission_that_no_placer_answers_is_an_alarm(dsn: str) -> None:
    async with running(dsn) as cell:
        answer = await cell.http.post("/v1/jobs", json=SPEC, headers=JSON)
        assert answer.status_code == 202
        job_id = answer.json()["job_id"]
        found = await alarm(cell, stands=True)
        assert (found["job_id"], found["cause"]) == (
            job_id,
            "it was acknowledged, and no placer has answered it",
        )
        cell.placer.submit(job_id)
        await cell.tell()
        assert await alarm(cell, stands=False) == {}
