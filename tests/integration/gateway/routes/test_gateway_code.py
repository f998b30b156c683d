"""Code that jobs are sent with: stored by the gateway per tenant and digest, fetched by a node with its own
token."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell import code_store
from penstock_services.gateway.shell.code_store import CodeStore
from penstock_services.node_reporter.shell.ports import NotStartable
from penstock_services.node_reporter.shell.task_setup.code_cache import CodeCache
from tests.integration.gateway.access.test_gateway_roles import as_, secret, write_tokens
from tests.support.gateway.gateway_cell import SPEC, problem, running
from tests.support.node_reporter.node_cell import node_options, start_order

pytestmark = pytest.mark.postgres

ARCHIVE = b"an archive of vision's"
DIGEST = sha256(ARCHIVE).hexdigest()
PATH = f"/v1/code/{DIGEST}"


async def test_code_is_stored_once_for_its_tenant_and_fetched_by_a_node(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speech reads a digest over vision's shoulder: neither the archive nor a job that runs in it is to be
    had for that."""
    tokens = write_tokens(tmp_path / "tokens", ["vision", "speech", "node"])
    async with running(dsn, tokens=tokens, code_dir=tmp_path / "code") as cell:
        http, octets = cell.http, {"content-type": "application/octet-stream"}
        job = {**SPEC, "code": DIGEST}
        assert (await http.get(PATH, headers=as_("vision"))).json()["stored"] is False
        refused = problem(await http.post("/v1/jobs", json=job, headers=as_("vision")), 400)
        assert refused["errors"][0]["field"] == "code"
        assert f"put its archive to {PATH} first" in refused["errors"][0]["remedy"]

        problem(await http.put(PATH, content=b"another", headers=as_("vision", **octets)), 400)
        problem(await http.put(PATH, content=ARCHIVE, headers=as_("vision")), 415)
        problem(await http.put("/v1/code/..%2Fx", content=ARCHIVE, headers=as_("vision", **octets)), 404)
        with monkeypatch.context() as patched:
            patched.setattr(code_store, "MAX_PACKED_BYTES", 3)
            problem(await http.put(PATH, content=ARCHIVE, headers=as_("vision", **octets)), 413)
        assert [path for path in (tmp_path / "code").rglob("*") if path.is_file()] == []
        for _ in range(2):
            stored = await http.put(PATH, content=ARCHIVE, headers=as_("vision", **octets))
            assert (stored.status_code, stored.json()["bytes"]) == (201, len(ARCHIVE))
        assert (await http.get(PATH, headers=as_("vision"))).json()["stored"] is True
        assert (await http.post("/v1/jobs", json=job, headers=as_("vision"))).status_code == 202

        assert (await http.get(PATH, headers=as_("speech"))).json()["stored"] is False
        problem(await http.post("/v1/jobs", json=job, headers=as_("speech")), 400)
        problem(await http.get(f"{PATH}/archive", params={"owner": "vision"}, headers=as_("speech")), 403)
        problem(await http.get(f"{PATH}/archive", params={"owner": "speech"}, headers=as_("node")), 404)

        token = tmp_path / "node-token"
        token.write_text(secret("node"))
        token.chmod(0o600)
        (tmp_path / "state").mkdir()
        options = node_options(tmp_path, gateway=cell.url, gateway_token_file=token)
        cache = CodeCache(options, tmp_path / "state" / "code")
        order = start_order(1, code=DIGEST, owner="vision")
        await cache.fetch(order)
        assert cache.path(DIGEST).read_bytes() == ARCHIVE
        offline = CodeCache(replace(options, gateway=None), tmp_path / "state" / "code")
        await offline.fetch(order)
        cache.path(DIGEST).chmod(0o644)
        cache.path(DIGEST).write_bytes(b"by a task of the same user")
        with pytest.raises(NotStartable, match="cannot fetch"):
            await offline.fetch(order)
        await asyncio.gather(*(cache.fetch(order) for _ in range(8)))
        assert cache.path(DIGEST).read_bytes() == ARCHIVE
        other = CodeCache(options, tmp_path / "state" / "other")
        with pytest.raises(NotStartable, match=f"404 .*no code {DIGEST} of speech"):
            await other.fetch(start_order(2, code=DIGEST, owner="speech"))
        with pytest.raises(NotStartable, match="give its reporter --gateway URL, or --code-dir"):
            await CodeCache(replace(options, gateway=None), tmp_path / "state" / "none").fetch(order)
        (tmp_path / "code" / "vision" / DIGEST).write_bytes(b"damaged")
        with pytest.raises(NotStartable, match="is another one"):
            await other.fetch(order)


async def test_a_node_removes_the_code_that_was_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of the job that runs each hour stays, though other jobs' was fetched after it."""
    options = node_options(tmp_path, code_dir=tmp_path / "stored")
    cache = CodeCache(options, tmp_path / "cache", limit_bytes=25)
    (tmp_path / "stored" / "shared").mkdir(parents=True)
    digests = []
    for number in range(4):
        data = bytes([number]) * 10
        digests.append(sha256(data).hexdigest())
        (tmp_path / "stored" / "shared" / digests[-1]).write_bytes(data)
    for token, used in enumerate((0, 1, 0, 2), start=1):
        await cache.fetch(start_order(token, code=digests[used]))
        if token < 3:
            os.utime(cache.path(digests[used]), (token, token))  # long ago
    assert [cache.path(digest).exists() for digest in digests] == [True, False, True, False]

    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", "stored")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(NotStartable, match=r"Permission denied \(stored\); look at --code-dir"):
        await cache.fetch(start_order(5, code=digests[3]))


async def chunk(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_stored_code_is_bounded_and_what_a_live_job_needs_stays(tmp_path: Path) -> None:
    """A pipeline sends a new folder with every commit, for years."""
    store, digests = CodeStore(tmp_path, limit_bytes=25), []
    (tmp_path / "vision").mkdir()
    left, written = tmp_path / "vision" / ".left", tmp_path / "vision" / ".written"
    for part in (left, written):
        part.write_bytes(b"half")
    os.utime(left, (1, 1))
    for number in range(4):
        data = bytes([number]) * 10
        digests.append(sha256(data).hexdigest())
        await store.put("vision", digests[-1], chunk(data), live=digests[:1])
        os.utime(store.path("vision", digests[-1]), (number, number))
    assert [store.find("vision", digest) is not None for digest in digests] == [True, False, False, True]
    assert (left.exists(), written.exists()) == (False, True), (
        "of a gateway that was killed, of one that goes on"
    )
    with pytest.raises(Problem, match="live jobs need all"):
        await store.put("vision", sha256(b"x" * 20).hexdigest(), chunk(b"x" * 20), live=digests)
