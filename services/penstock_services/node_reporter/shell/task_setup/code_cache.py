"""Cache of code archives on this node, by digest: fetched from the gateway, or from its folder where this
machine shares it."""

import asyncio
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.backoff import retry
from penstock.bearer import bearer_token
from penstock.errors import ConfigurationError
from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.types import SHARED_TENANT
from penstock.runtime.files.task_logs import file_name
from penstock.tls import SYSTEM_CA, client_context
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.ports import NotStartable

TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, LIMIT_S = 0.2, 5.0, 60.0  # a restarting gateway runs again by then
MAX_CACHED_BYTES = 4 << 30


class CodeCache:
    """Of one node; `folder`: no other process writes there."""

    def __init__(self, options: Options, folder: Path, limit_bytes: int = MAX_CACHED_BYTES) -> None:
        self._options = options
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def path(self, digest: str) -> Path:
        return self._folder / digest

    async def fetch(self, order: StartTask) -> None:
        """Afterwards the archive of this task's code is at its path. Raises `NotStartable` with the reason
        and the remedy."""
        assert order.code is not None
        async with self._fetching.setdefault(
            order.code, asyncio.Lock()
        ):  # the members of a gang fetch it once
            if await asyncio.to_thread(self._is_intact, order.code):
                return
            try:
                await asyncio.to_thread(self._store, order.code, await self._archive(order, order.code))
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                text = (
                    f"its code cannot be read and stored on this node: {error.strerror}{where}; look at "
                    "--code-dir and --state-dir"
                )
                raise NotStartable(text) from error

    def _is_intact(self, digest: str) -> bool:
        """Whether the archive is here and intact; marks it as used, so that it is evicted later.

        A task of the reporter's own user could have written into it, through its own link.
        """
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return False
            os.utime(path)
        except OSError:
            return False
        return True

    async def _archive(self, order: StartTask, digest: str) -> bytes:
        """Raises `NotStartable`."""
        shared = self._options.code_dir
        for tenant in (order.owner or SHARED_TENANT, SHARED_TENANT):
            if shared is not None and (path := shared / file_name(tenant) / digest).is_file():
                return await asyncio.to_thread(path.read_bytes)
        if self._options.gateway is None:
            raise NotStartable(
                "this node cannot fetch the job's code: give its reporter --gateway URL, or --code-dir, the "
                "gateway's PENSTOCK_CODE_DIR"
            )
        import httpx  # 7 MiB that a node without such jobs never needs

        try:
            return await retry(
                lambda: self._asked(order, digest),
                (httpx.TransportError,),
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                limit_s=LIMIT_S,
            )
        except httpx.HTTPError as error:
            raise NotStartable(f"its code cannot be fetched from --gateway: {error!r}") from error

    def _store(self, digest: str, data: bytes) -> None:
        """Raises `NotStartable` for an archive with another digest."""
        if hashlib.sha256(data).hexdigest() != digest:
            raise NotStartable(
                f"the archive stored as its code {digest} is another one; submit the job again"
            )
        self._folder.mkdir(mode=0o700, exist_ok=True)
        part = self.path(f".{secrets.token_hex(8)}")
        try:
            part.write_bytes(data)
            part.chmod(0o444)
            part.rename(self.path(digest))
        finally:
            part.unlink(missing_ok=True)
        self._make_room(self.path(digest))

    async def _asked(self, order: StartTask, digest: str) -> bytes:
        """Raises `NotStartable` with the gateway's reason, and httpx's errors."""
        import httpx

        options = self._options
        assert options.gateway is not None
        headers = {}
        try:
            if options.gateway_token_file is not None:
                headers["Authorization"] = (
                    f"Bearer {bearer_token(options.gateway_token_file, '--gateway-token-file')}"
                )
            encrypted = not options.gateway.startswith("http://")
            authority = SYSTEM_CA if options.gateway_ca is None else str(options.gateway_ca)
            verify = client_context(authority, "--gateway-ca") if encrypted else False
        except ConfigurationError as error:
            raise NotStartable(f"its code cannot be fetched: {error}") from error
        async with httpx.AsyncClient(
            base_url=options.gateway, headers=headers, timeout=TIMEOUT_S, verify=verify, trust_env=False
        ) as client:
            response = await client.get(
                f"/v1/code/{digest}/archive", params={"owner": order.owner or SHARED_TENANT}
            )
        if response.status_code != httpx.codes.OK:
            raise NotStartable(
                f"the gateway does not give its code: {response.status_code} {response.text[:300]}"
            )
        return response.content

    def _make_room(self, new: Path) -> None:
        """Evicts the least recently used archives beyond the bound;
        a task that has begun has a link of its own."""
        found = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                found.append((path, path.stat()))
        excess = sum(entry.st_size for _, entry in found) - self._limit_bytes
        for path, entry in sorted(found, key=lambda one: one[1].st_mtime):
            if excess <= 0:
                return
            if path != new:
                path.unlink(missing_ok=True)
                excess -= entry.st_size
