"""The disk under a node's journal: it may be full, fail to sync, and lose at a power loss what was not
synced.

The journal's own SQL runs on a database in memory. Each commit makes a version of the file in the page cache;
a commit with `synchronous=FULL` waits until the disk has it. A kill of the process loses no version.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FULL = "PRAGMA synchronous=FULL"
CHECKPOINT = "PRAGMA wal_checkpoint(TRUNCATE)"


class Disk:
    """One journal's file. `versions`: the first is on the disk, the last is in the page cache; empty: no
    file."""

    def __init__(self) -> None:
        self.versions: list[bytes] = []
        self.full = False
        self.sync_fails = False
        self.step: Callable[[str], None] = lambda what: None
        """Where the process that writes may be killed."""

    def connect(self, path: Path) -> sqlite3.Connection:
        """As `journal.connect_file`; the path does not matter."""
        del path
        database = _Database(":memory:", isolation_level=None)
        if self.versions:
            database.deserialize(self.versions[-1])
        database.disk = self
        return database

    def synced(self, version: bytes) -> None:
        """Raises what a failing sync raises; the version is in the page cache all the same."""
        self.versions.append(version)
        if self.sync_fails:
            raise sqlite3.OperationalError("disk I/O error")
        self.versions = [version]

    def lose_power(self, rng: np.random.Generator) -> None:
        """Any prefix of what was not synced survives."""
        if self.versions:
            self.versions = self.versions[: int(rng.integers(1, len(self.versions) + 1))]

    def ask(self, query: str) -> int:
        """One number from the file as it is; 0 without a file."""
        return _ask(self.versions[-1], query) if self.versions else 0

    def has_synced(self, task_id: str, token: int) -> bool:
        """Whether a power loss could not take this task's token."""
        query = "SELECT count(*) FROM tasks WHERE task_id = ? AND token >= ?"
        return bool(self.versions) and _ask(self.versions[0], query, task_id, token) > 0

    def has_stop(self, task_id: str, token: int) -> bool:
        """Whether this task is to be stopped."""
        query = (
            "SELECT count(*) FROM tasks WHERE task_id = ? AND token = ?"
            " AND json_extract(row, '$.stop_grace_ms') IS NOT NULL"
        )
        return bool(self.versions) and _ask(self.versions[-1], query, task_id, token) > 0

    @property
    def idle(self) -> bool:
        """Neither an unsent event nor a waiting or living task in the journal."""
        return not self.ask(
            "SELECT (SELECT count(*) FROM outbox)"
            " + (SELECT count(*) FROM tasks WHERE json_extract(row, '$.status') != 'ended')"
        )


def _ask(version: bytes, query: str, *parameters: object) -> int:
    database = sqlite3.connect(":memory:")
    database.deserialize(version)
    row = database.execute(query, parameters).fetchone()
    database.close()
    return int(row[0]) if row is not None else 0


class _Database(sqlite3.Connection):
    """The journal's connection."""

    disk: Disk | None = None
    _full_sync = True

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        disk = self.disk
        if disk is None:
            return super().execute(sql, *parameters)
        if sql.startswith("PRAGMA synchronous"):
            self._full_sync = sql == FULL
        elif sql == CHECKPOINT:
            disk.synced(self.serialize())
        elif sql == "BEGIN IMMEDIATE":
            disk.step("before it writes its journal")
            if disk.full:
                raise sqlite3.OperationalError("database or disk is full")
        elif sql == "COMMIT":
            cursor = super().execute(sql)
            if self._full_sync:
                disk.synced(self.serialize())
            else:
                disk.versions.append(self.serialize())
            disk.step("after it wrote its journal")
            return cursor
        return super().execute(sql, *parameters)
