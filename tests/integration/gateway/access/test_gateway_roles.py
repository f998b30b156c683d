"""Who may ask the gateway for what: roles and tenants of tokens."""

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute

from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited
from penstock.model.jobs.job_parts import RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.token import seq_of
from penstock.model.schema.topics import Topic
from penstock.runtime.files.task_logs import log_path
from penstock.runtime.keys.job_tokens import Claim, made
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.requests.idempotency import keyed_job_id, tenants_key
from penstock_services.gateway.shell.access.roles import Demand
from penstock_services.gateway.shell.app import PARTS
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import SPEC, Cell, patient, problem, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

CLOUD_EVENT = {"content-type": "application/cloudevents+json"}
CALLERS = {
    "reader": "roles=read tenant=vision",
    "vision": "roles=submit,read tenant=vision name=ci",
    "speech": "roles=submit tenant=speech",
    "listener": "roles=read tenant=speech",
    "monitor": "roles=read",
    "operator": "roles=operate,read tenant=ops name=on-call",
    "node": "roles=node node=n0",
}


def required_roles() -> dict[tuple[str, str], tuple[Role, ...]]:
    """(method, path) of every route → its roles, of which it requires one."""
    found = {}
    for part in PARTS:
        for route in part.router.routes:
            assert isinstance(route, APIRoute)
            demands = [needed.dependency for needed in route.dependencies]
            for method in route.methods:
                [found[method, route.path]] = [one.roles for one in demands if isinstance(one, Demand)]
    return found


def secret(name: str) -> str:
    return f"the-secret-token-of-{name}"


def as_(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret(name)}", **more}


def write_tokens(path: Path, names: list[str]) -> Path:
    lines = [f"sha256:{hashlib.sha256(secret(name).encode()).hexdigest()} {CALLERS[name]}" for name in names]
    path.write_text("# who may ask for what\n\n" + "\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


@pytest_asyncio.fixture
async def cell(dsn: str, tmp_path: Path) -> AsyncIterator[Cell]:
    async with running(dsn, tokens=write_tokens(tmp_path / "tokens", list(CALLERS))) as found:
        found.placer.join(node_spec("n0", 1))
        await found.tell()
        await found.caught_up(as_("reader"))
        yield found


async def test_a_token_is_its_roles_and_its_tenant(cell: Cell, tmp_path: Path) -> None:
    """A CI pipeline's token leaks: it submits for its own team, reads nothing, and touches no node and no job
    of others."""
    http = cell.http
    spoofed = {**SPEC, "owner": "speech"}
    job_id = (await http.post("/v1/jobs", json=spoofed, headers=as_("vision"))).json()["job_id"]
    assert (await http.get(f"/v1/jobs/{job_id}", headers=as_("reader"))).json()["owner"] == "vision"

    refused = problem(await http.get(f"/v1/jobs/{job_id}", headers=as_("speech")), 403)
    assert refused["type"].endswith("no_role")
    assert "needs the role read" in refused["detail"]
    assert "penstock token" in refused["detail"]
    problem(await http.post("/v1/jobs", json=SPEC, headers=as_("reader")), 403)
    problem(await http.post("/v1/jobs", json=SPEC, headers=as_("node")), 403)

    others = problem(await http.post(f"/v1/jobs/{job_id}/cancel", headers=as_("speech")), 403)
    assert others["type"].endswith("other_tenant")
    problem(await http.delete(f"/v1/jobs/{job_id}", headers=as_("speech")), 403)
    act = {"by": "ada", "reason": "spoofed"}
    for command in ("fence", "drain", "cordon", "uncordon"):
        for caller in ("vision", "reader", "node"):
            problem(await http.post(f"/v1/nodes/n0/{command}", json=act, headers=as_(caller)), 403)
    assert await cell.written(Topic.NODES) == []
    assert len(await cell.written(Topic.JOBS)) == 1
    assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=as_("operator"))).status_code == 202
    assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=as_("vision"))).status_code == 202


async def test_who_acts_follows_from_the_token(cell: Cell) -> None:
    """Mallory may operate, and fences in Ada's name: a body that names who acts is refused, and the token's
    name is stored."""
    http = cell.http
    for command in ("fence", "drain", "cordon", "uncordon"):
        act = {"by": "ada", "reason": "spoofed"}
        refused = problem(await http.post(f"/v1/nodes/n0/{command}", json=act, headers=as_("operator")), 400)
        assert [error["field"] for error in refused["errors"]] == ["by"]
        assert "follows from the token" in refused["detail"]
    assert await cell.written(Topic.NODES) == []
    drain = {"json": {"reason": "fans"}, "headers": as_("operator")}
    with patient():
        asked = asyncio.create_task(http.post("/v1/nodes/n0/drain", **drain))  # type: ignore[arg-type]
        written = await await_until(lambda: cell.written(Topic.NODES), "the gateway's event")
        cell.placer.feed(written[0].data)
        await cell.tell()
        answer = await asked
    assert answer.json()["cordon"] == {
        "by": "ops/on-call",
        "reason": "fans",
        "drain": True,
        "at_ms": ANY,
    }


async def test_a_job_submits_and_acts_on_what_it_has_submitted_through_every_door(cell: Cell) -> None:
    """The driver of a sweep, with the token that its node has signed, and a bug: it takes another job of its
    owner for one of its trials."""
    keys = NodeKeys(b"n" * 32)
    cell.placer.feed(NodeJoined(node=node_spec("n1", 4), public_key=keys.public_key))
    mine = {"command": ("sleep", "9"), "owner": "vision"}
    cell.placer.submit("driver", spec=JobSpec(**mine, may_submit=True), gpus=4)
    cell.placer.start("driver")
    [(task_id, task)] = cell.placer.state.jobs["driver"].tasks.items()
    claim = Claim(task.place.node_id, "driver", task_id, cell.placer.state.jobs["driver"].token)
    cell.placer.submit("sibling", spec=JobSpec(**mine))
    cell.placer.run(["ended"])
    await cell.tell()
    http, as_job = cell.http, {"authorization": f"Bearer {made(keys, claim)}", "idempotency-key": "trial"}

    answers = [
        await http.post("/v1/jobs", json={**SPEC, "owner": "speech"}, headers=as_job) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [202, 200]
    job_id = answers[0].json()["job_id"]
    child = (await http.get(f"/v1/jobs/{job_id}", headers=as_job)).json()
    assert (child["owner"], child["spec"]["parents"]) == ("vision", ["driver"])
    given = problem(
        await http.post("/v1/jobs", json={**SPEC, "parents": ["driver"]}, headers=as_("vision")), 400
    )
    assert [error["field"] for error in given["errors"]] == ["parents"]

    doors = {
        path for (_, path), roles in required_roles().items() if Role.SUBMIT in roles and "{job_id}" in path
    }
    assert len(doors) >= 7
    bodies = {"exec": {"command": ["true"]}, "attach": {"terminal": "24x80"}}
    for path in doors:
        act = {"url": path.replace("{job_id}", "sibling"), "json": bodies.get(path.rpartition("/")[2], {})}
        method = "DELETE" if path.endswith("}") else "POST"
        assert problem(await http.request(method, **act, headers=as_job), 403)["type"].endswith(
            "other_job"
        ), path
    refused = await http.post("/v1/events", content="{}", headers={**as_job, **CLOUD_EVENT})
    problem(refused, 400)  # before anything else it is to be an event
    event = {"specversion": "1.0", "id": "e", "source": "/x", "type": "penstock.job.cancel_requested.v1"}
    whole = json.dumps({**event, "data": {"job_id": "sibling"}})
    refused = await http.post("/v1/events", content=whole, headers={**as_job, **CLOUD_EVENT})
    assert problem(refused, 403)["type"].endswith("jobs_token")
    assert (await http.post(f"/v1/jobs/{job_id}/cancel", headers=as_job)).status_code == 202
    problem(await http.get("/v1/jobs/sibling", headers={"authorization": as_job["authorization"][:-1]}), 401)
    written = [one.data for one in await cell.written(Topic.JOBS)]
    assert [(type(data).__name__, getattr(data, "by", None)) for data in written] == [
        ("JobSubmitted", None),
        ("JobCancelRequested", "vision/job:driver"),
    ]


async def test_a_cancellation_names_the_token_and_its_tenant(cell: Cell) -> None:
    """While the placer is down, speech submits jobs under ids of vision's, of which only the log knows, and
    cancels them."""
    http = cell.http
    job_id = (await http.post("/v1/jobs", json=SPEC, headers=as_("vision"))).json()["job_id"]
    cancel, events = f"/v1/jobs/{job_id}/cancel", "/v1/events"

    def event(kind: str, **data: object) -> dict[str, Any]:
        named = f"penstock.job.{kind}.v1"
        found = {"specversion": "1.0", "id": "e", "source": "/t", "type": named, "data": data}
        return {"content": json.dumps(found)}

    for field in ({"by": "ada"}, {"tenant": "vision"}, {"tenant": None, "by": "ops/on-call"}):
        for caller in ("vision", "operator"):
            problem(await http.post(cancel, json=field, headers=as_(caller)), 400)
            sent = event("cancel_requested", job_id=job_id, **field)
            problem(await http.post(events, **sent, headers=as_(caller, **CLOUD_EVENT)), 400)
    taken = event("submitted", job_id=keyed_job_id("default", tenants_key("vision", "build-2")), spec=SPEC)
    refused = problem(await http.post(events, **taken, headers=as_("speech", **CLOUD_EVENT)), 400)
    assert [error["field"] for error in refused["errors"]] == ["data.job_id"]
    own = event("submitted", job_id="nightly", spec=SPEC)
    assert (await http.post(events, **own, headers=as_("vision", **CLOUD_EVENT))).status_code == 202
    problem(await http.post(events, **own, headers=as_("speech", **CLOUD_EVENT)), 409)
    problem(await http.delete("/v1/jobs/nightly", headers=as_("speech")), 403)
    assert len(await cell.written(Topic.JOBS)) == 2

    assert (await http.delete(f"/v1/jobs/{job_id}", headers=as_("vision"))).status_code == 202
    assert (await http.post(cancel, json={"reason": "x"}, headers=as_("operator"))).status_code == 202
    sent = event("cancel_requested", job_id="nightly")
    assert (await http.post(events, **sent, headers=as_("vision", **CLOUD_EVENT))).status_code == 202
    found = [written.data for written in await cell.written(Topic.JOBS)][2:]
    assert [(cancel.job_id, cancel.by, cancel.tenant) for cancel in found] == [
        (job_id, "vision/ci", "vision"),
        (job_id, "ops/on-call", None),
        ("nightly", "vision/ci", "vision"),
    ]


SECRETIVE = JobSpec(
    name="canary-name",
    owner="vision",
    command=("canary-command",),
    env={"KEY": "canary-env"},
    workdir="/canary",
    labels={"canary": "canary-label"},
    model="canary-model",
    secrets={"OTHER": "canary-secret"},
    retry=RetryPolicy(max_attempts=2, backoff_ms=3_600_000),
)
"""All of what its tenant says in it is nobody else's to read."""
SHOWN_TO_ALL = {
    "/v1/jobs": ["?limit=9", "?eta=true&owner=vision"],
    "/v1/jobs/{job_id}": [""],
    "/v1/jobs/{job_id}/eta": [""],
    "/v1/jobs/{job_id}/why": ["", "?at=9", "?at_ms=9007199254740991"],
    "/v1/queue": [""],
    "/v1/deadlines": [""],
    "/v1/decisions": ["", "?job={job_id}"],
    "/v1/decisions/{seq}": [""],
    "/v1/stream": ["?after=0&until={head}", "?after=0&until={head}&job={job_id}"],
    "/v1/nodes": [""],
    "/v1/nodes/{node_id:path}/events": [""],
    "/v1/nodes/{node_id:path}": [""],
    "/v1/gpus": [""],
    "/v1/groups": [""],
    "/v1/ledger": [""],
    "/v1/status": [""],
    "/v1/estimator/models": [""],
}
SHOWN_TO_THE_TENANT = [
    f"/v1/jobs/{{job_id}}/{what}" for what in ("tasks", "events", "logs", "estimate/check")
]


async def test_a_tenant_reads_nothing_of_anothers_jobs_but_what_scheduling_shows(
    dsn: str, tmp_path: Path
) -> None:
    """Speech, and a dashboard without a tenant, ask every door for vision's jobs: one ran, one waits for its
    next attempt."""
    async with running(
        dsn, tokens=write_tokens(tmp_path / "tokens", list(CALLERS)), node_log_archive=tmp_path.as_uri()
    ) as cell:
        placer = cell.placer
        fails = {"cause": "start_failed", "exit_code": None, "detail": "canary-detail"}
        placer.join(node_spec("n0", 1))
        for job_id in ("ended", "fails"):
            placer.submit(job_id, spec=SECRETIVE)
            if job_id == "ended":
                placer.start(job_id)
                placer.finish(job_id)
        [task] = placer.state.jobs["fails"].tasks
        named = {"node_id": "n0", "task_id": task, "token": placer.state.jobs["fails"].token}
        placer.feed(TaskExited(**named, **fails, started_ms=1, exited_ms=1))  # type: ignore[arg-type]
        placer.submit("own", spec=JobSpec(name="own", owner="speech", command=("own-command",)))
        await cell.tell()
        await cell.caught_up(as_("reader"))
        log = log_path(tmp_path, "fails", task)
        log.parent.mkdir()
        log.write_text("canary-output\n")

        async def ask(path: str, job_id: str, caller: str) -> httpx.Response:
            url = (
                path.replace("{node_id:path}", "n0")
                .replace("{seq}", str(seq_of(named["token"])))
                .replace("{job_id}", job_id)
            )
            return await cell.http.get(url.replace("{head}", str(placer.state.seq)), headers=as_(caller))

        paths = [path + query for path, queries in SHOWN_TO_ALL.items() for query in queries]
        of_a_job = [path for path in paths if "{job_id}" in path]
        for caller, job_id in itertools.product(("listener", "monitor"), ("ended", "fails")):
            for path in paths if job_id == "fails" else of_a_job:
                answer = await ask(path, job_id, caller)
                assert answer.status_code == 200, (path, answer.text)
                assert "canary" not in answer.text, (caller, path, answer.text)
            listed = (await ask("/v1/jobs", "", caller)).text
            assert ("own-command" in listed) == (caller == "listener")
            for path in SHOWN_TO_THE_TENANT:
                refused = problem(await ask(path, job_id, caller), 403)
                assert refused["type"].endswith("other_tenant")
                assert "role operate" in refused["detail"]
            problem(await cell.http.get("/v1/replay?decision=fails", headers=as_(caller)), 403)
        asked = {path for (method, path), roles in required_roles().items() if roles == (Role.READ,)}
        assert asked == {*SHOWN_TO_ALL, *SHOWN_TO_THE_TENANT}, "a new door is to be tried, too"
        for caller in ("reader", "operator"):
            for path in ("/v1/jobs", "/v1/jobs/{job_id}", "/v1/queue", "/v1/stream?after=0&until={head}"):
                assert "canary-name" in (await ask(path, "fails", caller)).text, path
            assert "canary-output" in (await ask("/v1/jobs/{job_id}/logs", "fails", caller)).text
            assert "canary-detail" in (await ask("/v1/jobs/{job_id}/why", "fails", caller)).text
            assert "canary-env" in (await ask("/v1/jobs/{job_id}/events", "fails", caller)).text
        seen = (await ask("/v1/jobs/{job_id}", "fails", "listener")).json()
        assert (seen["job_id"], seen["owner"], seen["status"], seen["attempt"]) == (
            "fails",
            "vision",
            "backoff",
            1,
        )
        assert {"name", "spec", "labels", "reason"} <= set(seen["hidden"])
        queued = (await ask("/v1/queue", "", "listener")).json()["jobs"]
        assert [(job["job_id"], job["owner"], job["reason"]) for job in queued] == [
            ("fails", "vision", "backoff")
        ]


async def test_labels_and_names_find_only_what_shows_them(cell: Cell) -> None:
    """A label of another tenant's job is hidden; to search for it must not guess it."""
    for owner in ("vision", "speech"):
        spec = JobSpec(command=("true",), name="digits", owner=owner, labels={"customer": "acme"})
        cell.placer.feed(JobSubmitted(job_id=owner, spec=spec))
    await cell.tell()
    await cell.caught_up(as_("operator"))
    for name, found in (
        ("reader", ["vision"]),
        ("listener", ["speech"]),
        ("monitor", []),
        ("operator", ["speech", "vision"]),
    ):
        for query in ("label=customer%3Dacme", "name=digits"):
            answer = (await cell.http.get(f"/v1/jobs?{query}", headers=as_(name))).json()
            assert [job["job_id"] for job in answer["jobs"]] == found, name
            assert answer["total"] == len(found)
            waiting = (await cell.http.get(f"/v1/queue?{query}", headers=as_(name))).json()["jobs"]
            assert sorted(job["job_id"] for job in waiting) == found, name


async def test_a_hold_is_its_tenants_or_an_operators(cell: Cell) -> None:
    """A tenant holds and releases its own jobs; what an operator holds, an operator releases."""
    spec = JobSpec(command=("true",), owner="vision")
    cell.placer.feed(JobSubmitted(job_id="j", spec=spec))
    await cell.tell()
    await cell.caught_up(as_("operator"))

    async def ask(act: str, caller: str, **body: str) -> httpx.Response:
        before = len(await cell.written(Topic.JOBS))
        asked = asyncio.create_task(cell.http.post(f"/v1/jobs/j/{act}", json=body, headers=as_(caller)))

        async def answered_or_written() -> bool:
            return asked.done() or len(await cell.written(Topic.JOBS)) > before

        with patient():
            await await_until(answered_or_written, f"an event of {act}")
            if not asked.done():
                cell.placer.feed((await cell.written(Topic.JOBS))[-1].data)
                await cell.tell()
            return await asked

    problem(await ask("hold", "speech"), 403)
    problem(await ask("hold", "reader"), 403)
    assert (await ask("hold", "vision", reason="data")).status_code == 202
    held = (await cell.http.get("/v1/jobs/j", headers=as_("operator"))).json()["held"]
    assert (held["reason"], held["by_operator"], held["by"].startswith("vision/")) == ("data", False, True)
    assert problem(await ask("hold", "operator"), 409)["type"].endswith("already_held")
    assert (await ask("release", "vision")).status_code == 202
    assert problem(await ask("release", "vision"), 409)["type"].endswith("not_held")
    assert (await ask("hold", "operator")).status_code == 202
    assert problem(await ask("release", "vision"), 403)["type"].endswith("held_by_operator")
    await cell.caught_up(as_("operator"))
    [row] = (await cell.http.get("/v1/jobs", headers=as_("operator"))).json()["jobs"]
    assert row["held"]["by_operator"] is True
    for caller in ("vision", "speech"):
        body = {"specversion": "1.0", "id": "e", "source": "/t", "type": "penstock.job.release_requested.v1"}
        for data in ({"job_id": "j", "by": "ops"}, {"job_id": "j"}):
            event = {**body, "data": data}
            answer = await cell.http.post(
                "/v1/events",
                json=event,
                headers=as_(caller, **{"content-type": "application/cloudevents+json"}),
            )
            assert answer.status_code == (400 if "by" in data else 202 if caller == "vision" else 403), (
                answer.text
            )
    cell.placer.feed((await cell.written(Topic.JOBS))[-1].data)
    assert cell.placer.state.jobs["j"].held is not None, "the placer has the last word"
    assert (await ask("release", "operator")).status_code == 202


async def test_keys_of_two_tenants_never_meet(cell: Cell) -> None:
    """Two pipelines count their builds from 1."""
    key = {"idempotency-key": "build-1"}
    first = await cell.http.post("/v1/jobs", json=SPEC, headers=as_("vision", **key))
    other = await cell.http.post("/v1/jobs", json={"command": ["other"]}, headers=as_("speech", **key))
    again = await cell.http.post("/v1/jobs", json=SPEC, headers=as_("vision", **key))
    assert (first.status_code, other.status_code, again.status_code) == (202, 202, 200)
    assert first.json()["job_id"] == again.json()["job_id"] != other.json()["job_id"]


async def test_events_from_outside_need_the_role_of_their_kind(cell: Cell) -> None:
    """A token that may submit could once report that a task had exited; a node's events come from its own
    reporter only."""

    async def hand_in(caller: str, kind: str, data: object) -> httpx.Response:
        event = {"specversion": "1.0", "id": "e", "source": "/t", "type": f"penstock.{kind}.v1", "data": data}
        return await cell.http.post(
            "/v1/events", content=json.dumps(event), headers=as_(caller, **CLOUD_EVENT)
        )

    spoofed = {"job_id": "ci-1", "spec": {**SPEC, "owner": "speech"}}
    assert (await hand_in("vision", "job.submitted", spoofed)).status_code == 202
    [submitted] = await cell.written(Topic.JOBS)
    assert submitted.data.spec.owner == "vision"
    assert problem(await hand_in("speech", "job.cancel_requested", {"job_id": "ci-1"}), 403)["type"].endswith(
        "other_tenant"
    )
    problem(await hand_in("speech", "job.cancel_requested", {"job_id": "never-seen"}), 404)
    problem(await hand_in("reader", "job.cancel_requested", {"job_id": "ci-1"}), 403)
    worker = {"gpus": 1, "cores": 1, "host_memory_mib": 1, "gpu_memory_mib": 1, "bandwidth_mbps": 1}
    estimate = {
        "job_id": "ci-1",
        "estimate": {"worker": worker, "confidence": 1, "tier": "user", "source": "u"},
    }
    exit_ = {
        "node_id": "n0",
        "task_id": "ci-1.1.w0",
        "token": 1,
        "cause": "exited",
        "exit_code": 0,
        "started_ms": 1,
        "exited_ms": 2,
    }
    problem(await hand_in("vision", "job.estimated", estimate), 403)
    for caller in ("vision", "operator"):
        refused = problem(await hand_in(caller, "task.exited", exit_), 403)
        assert "n0's own reporter" in refused["detail"]
        problem(await hand_in(caller, "node.left", {"node_id": "n0", "boot_id": "b", "proof": "fenced"}), 403)
    problem(await hand_in("node", "task.exited", exit_), 403)
    assert await cell.written(Topic.NODES) == await cell.written(Topic.ESTIMATES) == []


async def test_every_route_demands_a_role(cell: Cell) -> None:
    """A route that a developer adds without one must not be open: a token of a node alone reads nothing and
    changes nothing."""
    roles = required_roles()
    for (method, path), demanded in roles.items():
        if path == "/v1/code/{digest}/archive":
            assert demanded == (Role.NODE,)
            archive = f"/v1/code/{'0' * 64}/archive"
            for caller in ("operator", "vision"):
                problem(await cell.http.get(archive, params={"owner": "vision"}, headers=as_(caller)), 403)
            continue
        if demanded == (Role.NODE,):
            assert path.endswith("/connection")
            problem(await cell.http.delete("/v1/nodes/n1/connection", headers=as_("node")), 403)
            problem(await cell.http.request(method, "/v1/nodes/n0/connection", headers=as_("operator")), 403)
            continue
        asked = (
            path.replace("{node_id:path}", "n0")
            .replace("{job_id}", "x")
            .replace("{seq}", "1")
            .replace("{offset}", "1")
            .replace("{digest}", "0" * 64)
        )
        refused = problem(await cell.http.request(method, asked, headers=as_("node")), 403)
        assert f"needs the role {' or '.join(demanded)}" in refused["detail"]
        assert (demanded == (Role.READ,)) == (
            method == "GET" and path not in ("/v1/replay", "/v1/repair/{offset}", "/v1/code/{digest}")
        )
    assert len(roles) >= 28


async def test_a_token_is_revoked_without_a_restart(dsn: str, tmp_path: Path) -> None:
    """The operator removes a line; a mistake in the file admits no user, and is reported."""
    path = write_tokens(tmp_path / "tokens", ["vision", "reader"])
    async with running(dsn, tokens=path) as cell:
        assert (await cell.http.get("/v1/nodes", headers=as_("vision"))).status_code == 200
        write_tokens(path, ["reader"])
        problem(await cell.http.get("/v1/nodes", headers=as_("vision")), 401)
        assert (await cell.http.get("/v1/nodes", headers=as_("reader"))).status_code == 200
        path.write_text("sha256:12 roles=read\n")
        assert "line 1" in problem(await cell.http.get("/v1/nodes", headers=as_("reader")), 503)["detail"]
        write_tokens(path, ["reader"])
        assert (await cell.http.get("/v1/nodes", headers=as_("reader"))).status_code == 200
