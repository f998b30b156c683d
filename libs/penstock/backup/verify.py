"""Verification of a copy, with nothing but its folder: every digest,
and the chain of the ledger's records."""

import asyncio
from pathlib import Path

from penstock.backup.manifest import Manifest, archive_in, check_digest, digests, read_manifest
from penstock.backup.partitions import check_chain
from penstock.backup.progress import Progress


async def check_digests(copy: Path, manifest: Manifest) -> int:
    """Reads every file; returns how many there are.
    Raises `ConfigurationError` for one that is missing or altered."""

    def check() -> int:
        count = 0
        for path, digest in digests(copy, manifest):
            check_digest(path, digest)
            count += 1
        return count

    return await asyncio.to_thread(check)


async def verify(copy: Path, progress: Progress) -> tuple[Manifest, int]:
    """The manifest, and the number of files.
    Raises `ConfigurationError` for a copy that cannot be restored."""
    manifest = read_manifest(copy)
    progress.expect(manifest.partitions[0].records)
    count = await check_digests(copy, manifest)
    await check_chain(archive_in(copy), manifest.partitions[0], manifest.head, progress)
    return manifest, count
