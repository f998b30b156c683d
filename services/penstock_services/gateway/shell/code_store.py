"""Content-addressed store of code archives in a folder, by tenant and SHA-256: written whole, bounded, with
least recently used (LRU) eviction.

A tenant reads only its own archives, so knowing another's digest is not enough. Callers without a tenant
share one place.
"""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from penstock.clock import wall_ms
from penstock.model.nouns.types import SHARED_TENANT
from penstock.runtime.files.task_logs import file_name
from penstock.sdk.code_archive import MAX_PACKED_BYTES
from penstock_services.gateway.core.problems import BadField, Problem, invalid

MAX_STORED_BYTES = 16 << 30
PART_S = 3_600  # age of a partial file without a new byte: its gateway has been killed


class CodeStore:
    """`folder`: also read by node-reporters that share it."""

    def __init__(self, folder: Path, limit_bytes: int = MAX_STORED_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def path(self, tenant: str | None, digest: str) -> Path:
        return self._folder / file_name(tenant or SHARED_TENANT) / digest

    def find(self, owner: str, digest: str) -> Path | None:
        """For a job of this owner: its tenant's own archive, else the shared one."""
        return next((path for tenant in (owner, None) if (path := self.path(tenant, digest)).is_file()), None)

    def used(self, path: Path) -> None:
        """Marks it as used: it is evicted after archives that were used before."""
        with suppress(OSError):
            os.utime(path)

    async def put(
        self, tenant: str | None, digest: str, chunks: AsyncIterator[bytes], live: Collection[str]
    ) -> int:
        """Stores an archive and returns its size in bytes.
        `live`: digests that jobs still need. Raises `Problem`."""
        path = self.path(tenant, digest)
        part = path.with_name(f".{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = await self._receive(part, digest, chunks)
            await asyncio.to_thread(self._make_room, size, live)
            part.rename(path)
        except OSError as error:
            raise Problem(
                507, "no_room", f"the code cannot be stored: {error.strerror}; look at PENSTOCK_CODE_DIR"
            ) from error
        finally:
            part.unlink(missing_ok=True)
        return size

    async def _receive(self, part: Path, digest: str, chunks: AsyncIterator[bytes]) -> int:
        """Raises `Problem` for too many bytes, and for a wrong digest."""
        size, found = 0, hashlib.sha256()
        with await asyncio.to_thread(part.open, "xb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > MAX_PACKED_BYTES:
                    raise Problem(413, "too_large", f"the archive exceeds {MAX_PACKED_BYTES} bytes")
                found.update(chunk)
                file.write(chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        if found.hexdigest() != digest:
            wrong = f"the body's SHA-256 is {found.hexdigest()}"
            raise invalid("this is another archive", [BadField("digest", wrong, "put it to that path")])
        return size

    def _make_room(self, size: int, live: Collection[str]) -> None:
        """Removes partial files of killed gateways, and the oldest archives that no job needs. Raises
        `Problem` 507 where that is not enough."""
        for part in self._folder.glob("*/.*"):
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < wall_ms() / 1_000 - PART_S:
                    part.unlink()
        stored = sorted(self._stored(), key=lambda found: found[1].st_mtime)
        excess = sum(found.st_size for _, found in stored) + size - self._limit_bytes
        for path, found in stored:
            if excess <= 0:
                return
            if path.name not in live:
                path.unlink(missing_ok=True)
                excess -= found.st_size
        if excess > 0:
            detail = (
                f"live jobs need all {self._limit_bytes >> 20} MiB of stored code; try again when some "
                "have ended"
            )
            raise Problem(507, "no_room", detail)

    def _stored(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob("*/[0-9a-f]*"):
            with suppress(FileNotFoundError):
                yield path, path.stat()
