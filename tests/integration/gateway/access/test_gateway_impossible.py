"""Requests for what cannot exist, and headers that are none: a clear no, never a fault."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.gateway_cell import Cell, problem, running

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/x%00y",
        "/v1/jobs/x%00y/logs",
        "/v1/jobs/x%00y/why",
        "/v1/jobs?owner=%00",
        "/v1/jobs?cursor=99999999999999999999",
        "/v1/decisions?job=%00",
        "/v1/nodes/%00",
    ],
)
async def test_names_and_numbers_that_no_column_can_hold(cell: Cell, path: str) -> None:
    """A scanner, or a script that forgot to decode: the request is at fault, not the gateway."""
    problem(await cell.http.get(path), 400)


@pytest.mark.parametrize("headers", [{"Host": "["}, {"Origin": "http://["}, {"Origin": "null"}])
async def test_addresses_that_are_none(cell: Cell, headers: dict[str, str]) -> None:
    """Neither this machine nor one of our pages: refused like any other stranger."""
    problem(await cell.http.get("/v1/status", headers=headers), 403)


async def test_a_number_beyond_64_bits_is_taken_as_it_is(cell: Cell) -> None:
    """The event's schema sets no upper bound: what the binary mode takes, the structured mode takes as
    well."""
    data = {
        "model_version": "m",
        "sha256": "0" * 64,
        "runs": 1 << 70,
        "first_run_ms": 1,
        "last_run_ms": 2,
        "metrics": {},
    }
    event = {
        "specversion": "1.0",
        "id": "e1",
        "source": "/x",
        "type": "penstock.model.trained.v1",
        "data": data,
    }
    content = json.dumps(event)
    headers = {"content-type": "application/cloudevents+json"}
    assert (await cell.http.post("/v1/events", content=content, headers=headers)).status_code == 202
