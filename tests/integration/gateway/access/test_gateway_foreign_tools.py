"""The gateway as tools of others see it: an API fuzzer over the OpenAPI document, and the official
CloudEvents SDK."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from cloudevents.core.bindings.http import HTTPMessage, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from jsonschema import Draft202012Validator

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.schema.topics import Topic
from tests.support.gateway.gateway_cell import DAY_S, Cell, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

ROOT = Path(__file__).resolve().parents[4]
FUZZER = Path(sys.executable).with_name("st")
FUZZ_S = 6  # of requests; the fuzzer takes 3 s to start


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


async def test_the_api_fuzzer_finds_no_breach_of_the_contract(cell: Cell, tmp_path: Path) -> None:
    """Schemathesis, all checks: it had found 24, such as a 405 without Allow and `grace_ms: false` taken as
    0."""
    options = (
        "--checks",
        "all",
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "3",
        "--seed",
        "1",
    )
    quiet = ("--max-time", str(FUZZ_S), "--generation-allow-x00", "false", "--generation-database", "none")

    async def has_tried() -> bool:
        """Whether there was a request in that time: a slow machine tries less, and nothing at worst."""
        process = await asyncio.create_subprocess_exec(
            FUZZER,
            "--no-color",
            "--config-file",
            ROOT / "tests/integration/gateway/access/schemathesis.toml",
            "run",
            f"{cell.url}/openapi.json",
            *options,
            *quiet,
            "--request-timeout",
            str(DAY_S),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "tests.integration.gateway.access.fuzzed_api",
                "PYTHONPATH": str(ROOT),
            },
        )
        output, _ = await process.communicate()
        if b"No test cases were generated" in output:
            return False
        assert process.returncode == 0, output.decode()
        assert b" passed" in output, output.decode()
        return True

    await await_until(has_tried, "a request of the fuzzer")


async def test_the_official_sdk_hands_in_events_in_both_modes(cell: Cell) -> None:
    """A pipeline builds its event with the SDK; without a datacontenttype the binary mode has no
    Content-Type: 415."""

    def made(job_id: str, **more: str) -> CloudEvent:
        attributes = {
            "id": job_id,
            "source": "/ci",
            "type": "penstock.job.submitted.v1",
            "specversion": "1.0",
        }
        return CloudEvent(attributes | more, {"job_id": job_id, "spec": {"command": ["true"]}})

    async def post(message: HTTPMessage) -> int:
        return (await cell.http.post("/v1/events", content=message.body, headers=message.headers)).status_code

    assert "content-type" not in {name.lower() for name in to_binary_event(made("bare")).headers}
    assert await post(to_binary_event(made("bare"))) == 202
    assert await post(to_binary_event(made("typed", datacontenttype="application/json"))) == 202
    assert await post(to_structured_event(made("structured"))) == 202
    assert (
        await post(to_structured_event(made("newer-unicode", subject="\u20fe"))) == 202
    )  # unassigned in Python 3.11
    assert await post(to_structured_event(made("turned", subject="\u202e"))) == 400
    written = [event.data for event in await cell.written(Topic.JOBS)]
    assert [event.job_id for event in written if isinstance(event, JobSubmitted)] == [
        "bare",
        "typed",
        "structured",
        "newer-unicode",
    ]


async def test_the_document_names_what_an_environment_may_be(cell: Cell) -> None:
    """A client made from the document sent a relative `venv`, which the schema allowed and the gateway
    refuses."""
    schema = (await cell.http.get("/openapi.json")).json()["components"]["schemas"]["Environment"]
    for environment in (
        {"venv": "/opt/v"},
        {"conda": "train", "venv": None},
        {"container": "img:1"},
        {"venv": "v"},
        {"conda": "-n"},
        {"container": ""},
        {"venv": "/opt/v", "conda": "train"},
        {},
    ):
        job = {"command": ["true"], "environment": environment}
        accepted = (await cell.http.post("/v1/jobs", json=job)).status_code == 202
        assert accepted == Draft202012Validator(schema).is_valid(environment), environment
