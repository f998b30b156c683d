"""Watching an API server for hours: connections end, versions are forgotten, the server asks for patience.

A server of this test's own answers from a script; each connection takes the next part. Against the real one:
`tests/integration/node_reporter/kubernetes`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from penstock_services.node_reporter.kubernetes.shell.api import ApiServer, Unanswered
from penstock_services.node_reporter.kubernetes.shell.reflector import (
    Broken,
    Changed,
    Listed,
    Reflector,
    Resumed,
)


class Meta(msgspec.Struct):
    name: str
    resourceVersion: str  # noqa: N815 - as on the wire


class Pod(msgspec.Struct):
    metadata: Meta


def version(pod: Pod) -> str:
    return pod.metadata.resourceVersion


def pod(name: str, at: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(at)}, "spec": {"unused": "x" * 100}}


def event(kind: str, found: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def bookmark(at: int, *, end: bool = False) -> bytes:
    annotations = {"k8s.io/initial-events-end": "true"} if end else {}
    return event("BOOKMARK", {"metadata": {"resourceVersion": str(at), "annotations": annotations}})


Part = Callable[[web.Request], Any]
"""What one connection does; returns None to end it after what it has written, or a whole answer."""


class Script:
    """Parts in order; the last one is repeated."""

    def __init__(self, *parts: Part) -> None:
        self.parts = list(parts)
        self.asked: list[dict[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        part = self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]
        return await part(request)  # type: ignore[no-any-return]


def streams(*chunks: bytes, then: str = "end") -> Part:
    """Writes these, and ends the answer ("end"), drops the connection ("drop"), or stays open ("stay")."""

    async def part(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then == "drop":
            assert request.transport is not None
            request.transport.abort()
        elif then == "stay":
            await asyncio.Event().wait()
        return response

    return part


def answers(status: int, body: Any, **headers: str) -> Part:
    async def part(request: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text, headers=headers)

    return part


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[ApiServer]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", script.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    api = ApiServer(configuration, None, None)
    try:
        yield api
    finally:
        await api.close()
        await runner.cleanup()


async def first(script: Script, count: int) -> list[Any]:
    """What a reader of this server gets first."""
    found: list[Any] = []
    async with serving(script) as api:
        reflector = Reflector(api, "/api/v1/pods", Pod, version, [("labelSelector", "app=x")])
        async with aclosing(reflector.follow()) as follow:  # type: ignore[type-var]
            async for one in follow:
                found.append(one)
                if len(found) == count:
                    return found
    raise AssertionError("a reflector never ends")


def shape(found: list[Any]) -> list[Any]:
    """Names in place of objects."""
    shown: list[Any] = []
    for one in found:
        match one:
            case Listed(objects):
                shown.append([each.metadata.name for each in objects])
            case Changed(kind, each):
                shown.append((kind, each.metadata.name))
            case Resumed():
                shown.append("resumed")
            case Broken(_, status):
                shown.append(status)
    return shown


BEGIN = event("ADDED", pod("a", 3)) + event("ADDED", pod("b", 5)) + bookmark(7, end=True)


async def test_a_list_arrives_as_a_watch_and_its_changes_follow():
    """Chunks of the network end anywhere, also inside of an object."""
    rest = event("MODIFIED", pod("a", 8)) + event("DELETED", pod("b", 9))
    whole = BEGIN + rest
    script = Script(streams(*(whole[at : at + 7] for at in range(0, len(whole), 7)), then="stay"))

    found = await first(script, 3)

    assert shape(found) == [["a", "b"], ("MODIFIED", "a"), ("DELETED", "b")]
    assert script.asked[0]["sendInitialEvents"] == "true"
    assert script.asked[0]["labelSelector"] == "app=x"


@pytest.mark.parametrize(("then", "between"), [("end", []), ("drop", [0, "resumed"])])
async def test_a_connection_that_ends_goes_on_after_the_last_thing_seen(then: str, between: list[Any]):
    """Its own time is over, or its server died: nothing is listed again, nothing is missed."""
    script = Script(
        streams(BEGIN, event("MODIFIED", pod("a", 8)), bookmark(20), then=then),
        streams(event("ADDED", pod("c", 21)), then="stay"),
    )

    found = await first(script, 3 + len(between))

    assert shape(found) == [["a", "b"], ("MODIFIED", "a"), *between, ("ADDED", "c")]
    assert script.asked[1]["resourceVersion"] == "20"
    assert "sendInitialEvents" not in script.asked[1]


GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 20 (900)"}


@pytest.mark.parametrize(
    "forgets", [answers(410, GONE), streams(event("ERROR", GONE))], ids=["status", "event"]
)
async def test_a_forgotten_version_begins_a_new_list(forgets: Part):
    """etcd was compacted while the connection was down: what is missing in the new list has gone."""
    script = Script(streams(BEGIN), forgets, streams(event("ADDED", pod("b", 905)), bookmark(906, end=True)))

    found = await first(script, 2)

    assert shape(found) == [["a", "b"], ["b"]]
    assert "resourceVersion" not in script.asked[2]


async def test_a_server_without_lists_as_watches_is_listed_in_pages():
    """Before Kubernetes 1.32, or with the feature turned off."""
    script = Script(
        answers(422, {"kind": "Status", "code": 422, "message": "sendInitialEvents is forbidden"}),
        answers(200, {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [pod("a", 3)]}),
        answers(200, {"metadata": {"resourceVersion": "7"}, "items": [pod("b", 5)]}),
        streams(event("DELETED", pod("a", 8)), then="stay"),
    )

    found = await first(script, 2)

    assert shape(found) == [["a", "b"], ("DELETED", "a")]
    assert script.asked[2]["continue"] == "more"
    assert script.asked[3]["resourceVersion"] == "7"


async def test_a_list_that_breaks_in_its_middle_is_no_list():
    """Half of the pods would look deleted."""
    script = Script(streams(event("ADDED", pod("a", 3)), then="drop"), streams(BEGIN, then="stay"))

    found = await first(script, 2)

    assert shape(found) == [0, ["a", "b"]]
    assert all("resourceVersion" not in asked for asked in script.asked)


async def test_refusals_are_named_and_tried_again():
    """No right to watch pods yet; then the server has too much to do, and says so in plain text."""
    missing = {"kind": "Status", "code": 403, "message": 'pods is forbidden: User "p" cannot watch'}
    script = Script(
        answers(403, missing),
        answers(429, "Too many requests, please try again later.\n", **{"Retry-After": "0"}),
        streams(BEGIN, then="stay"),
    )

    found = await first(script, 3)

    assert shape(found) == [403, 429, ["a", "b"]]
    assert found[0].why == missing["message"]
    assert found[1].why == "Too many requests, please try again later."


async def test_a_call_without_an_answer_says_that_nothing_is_known():
    script = Script(streams(b"{", then="drop"))
    async with serving(script) as api:
        with pytest.raises(Unanswered, match=r"http://127\.0\.0\.1"):
            await api.call("POST", "/api/v1/namespaces/x/pods", body={"kind": "Pod"})


async def test_a_rotated_token_is_read_again(tmp_path):
    """The service account's token is replaced each hour; the old one gets 401."""
    config = tmp_path / "kubeconfig"

    def write(token: str, port: int) -> None:
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
        user = {"name": "u", "user": {"token": token}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        parts = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"}
        config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **parts}))

    seen: list[str] = []

    async def part(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response(status=200 if seen[-1] == "Bearer new" else 401, text="{}")

    async with serving(Script(part)) as other:
        port = int(other.url.rpartition(":")[2])
        write("old", port)
        api = await ApiServer.open(config)
        write("new", port)
        answers_ = [await api.call("GET", "/version") for _ in range(2)]
        await api.close()

    assert [answer.status for answer in answers_] == [200, 200]
    assert seen == ["Bearer old", "Bearer new", "Bearer new"]
