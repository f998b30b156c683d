"""Rows of the stages in Postgres: what each owner measured of a key, and what the cell was told of it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import asyncpg

from penstock_services.estimator.core.stages.profile import StageKey, StageProfile
from penstock_services.estimator.core.stages.registry import MAX_KEYS, OWNERS_PER_KEY, Owned

ROWS_KEPT = MAX_KEYS * (OWNERS_PER_KEY + 1)  # as many as the memory holds

_COLUMNS = ("model", "batch_size", "gpus", "owner", "first_seq", "last_seq", *StageProfile._fields)


class Staged(NamedTuple):
    """A row, and the ledger record that made it what it is."""

    seq: int
    row: Owned


async def write_stages(connection: asyncpg.Connection, staged: Iterable[Staged]) -> None:
    """Each row replaces the one before it; only the record that it began with stays."""
    places = ", ".join(f"${number}" for number in range(1, len(_COLUMNS) + 1))
    changes = ", ".join(f"{name} = excluded.{name}" for name in ("last_seq", *StageProfile._fields))
    await connection.executemany(
        f"INSERT INTO stages ({', '.join(_COLUMNS)}) VALUES ({places}) "
        f"ON CONFLICT (model, batch_size, gpus, owner) DO UPDATE SET {changes}",
        [(*one.row.key, one.row.owner, one.seq, one.seq, *one.row.profile) for one in staged],
    )


async def read_stages(connection: asyncpg.Connection) -> Sequence[Owned]:
    """Keys in the order of their latest change, of each key the owners in the order in which they first measured."""
    rows = await connection.fetch(
        f"SELECT {', '.join(_COLUMNS)}, max(last_seq) OVER (PARTITION BY model, batch_size, gpus) AS changed "
        "FROM stages ORDER BY changed, owner = '', first_seq, owner"
    )
    return [
        Owned(
            StageKey(row["model"], row["batch_size"], row["gpus"]),
            row["owner"],
            StageProfile(*(row[name] for name in StageProfile._fields)),
        )
        for row in rows
    ]


async def forget_stages(connection: asyncpg.Connection) -> None:
    """Removes the rows beyond `ROWS_KEPT` that changed longest ago."""
    await connection.execute(
        "DELETE FROM stages WHERE last_seq <= (SELECT last_seq FROM stages ORDER BY last_seq DESC OFFSET $1 LIMIT 1)",
        ROWS_KEPT,
    )
