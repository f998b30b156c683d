"""The estimator's projection in Postgres: finished runs, the position in the ledger, and the learned models.

Runs and position are written in one transaction, so that each run is stored exactly once, even after a kill.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg
import msgspec
import orjson

from penstock.errors import StoreError
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock_services.estimator.core.interference import MAX_KINDS, Kind, Learned, Mean
from penstock_services.estimator.core.learning.limits import STAGE_KEYS, STAGE_OWNERS
from penstock_services.estimator.core.model_lifecycle import Trained
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.stages.profile import StageKey, StageProfile
from penstock_services.estimator.core.stages.registry import Owned

MIGRATIONS = "penstock_services.estimator.migrations"
_decode = msgspec.msgpack.Decoder(FinishedRun).decode

CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 60.0
MAX_RUNS = 200_000  # older ones are of other code; about 60 MB
MAX_MODELS = 32
FETCHED = 1_000  # rows per fetch

MAX_PAIR_ROWS = 4 * MAX_KINDS  # memory holds more of few kinds; of many the oldest are of other code
NOTHING_LEARNED = Learned({}, {})
MAX_STAGES = STAGE_KEYS * (STAGE_OWNERS + 1)  # as many as the registry in memory holds

_STAGE_COLUMNS = ("model", "batch_size", "gpus", "owner", "first_seq", "last_seq", *StageProfile._fields)
INSERT_RUN = "INSERT INTO runs VALUES ($1, $2, $3, $4, $5) ON CONFLICT (seq) DO NOTHING"
INSERT_STAGES = (
    f"INSERT INTO stages ({', '.join(_STAGE_COLUMNS)}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, "
    "$11, $12, $13) ON CONFLICT (model, batch_size, gpus, owner) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ("last_seq", *StageProfile._fields))
)
"""Of an existing row only `first_seq` stays."""
INSERT_PAIRS = (
    "INSERT INTO pairs VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) "
    "ON CONFLICT (owner, model, batch_size, gpu_model, other_owner, other_model, other_batch_size) DO UPDATE "
    "SET own = excluded.own, other = excluded.other, runs = excluded.runs, last_seq = excluded.last_seq"
)
INSERT_ALONE = (
    "INSERT INTO steps_alone VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (owner, model, batch_size, "
    "gpu_model) DO UPDATE SET step_ms = excluded.step_ms, last_seq = excluded.last_seq"
)


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Converts Postgres errors into `StoreError`."""
    try:
        yield
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        raise StoreError(f"{what}: {error}") from error


def estimator_schema(cell: str) -> str:
    """Schema name, beside the cell's read models."""
    return f"{schema_of(cell)}_learned"


async def _connect(dsn: str, settings: Mapping[str, str]) -> asyncpg.Connection:
    """Raises `StoreError`."""
    with store_errors("Postgres cannot be reached"):
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_S,
            command_timeout=COMMAND_TIMEOUT_S,
            server_settings={"application_name": "penstock estimator", **settings},
        )


async def _make_tables(dsn: str, schema: str) -> None:
    """On a connection of its own that is closed: the server process behind it caches 2 MiB of catalog
    entries.

    Raises `StoreError`, or `ConfigurationError` for a schema of another version.
    """
    connection = await _connect(dsn, {})
    try:
        await migrate(connection, schema, load_migrations(MIGRATIONS))
    finally:
        connection.terminate()


class RunStore:
    """One estimator's connection to its schema."""

    def __init__(self, connection: asyncpg.Connection, cell: str) -> None:
        self._connection = connection
        self._cell = cell

    @classmethod
    async def open(cls, dsn: str, cell: str) -> "RunStore":
        """Connects and migrates. Raises `StoreError`,
        or `ConfigurationError` for a schema of another version."""
        schema = estimator_schema(cell)
        await _make_tables(dsn, schema)
        connection = await _connect(dsn, {"search_path": schema, "jit": "off"})
        try:
            with store_errors("the estimator's tables cannot be used"):
                await connection.execute(
                    "INSERT INTO positions VALUES ($1, 0) ON CONFLICT (cell) DO NOTHING", cell
                )
        except BaseException:
            connection.terminate()
            raise
        return cls(connection, cell)

    async def position(self) -> int:
        """Offset of the ledger's record to read next."""
        found: int = await self._connection.fetchval(
            "SELECT next_offset FROM positions WHERE cell = $1", self._cell
        )
        return found

    async def add(
        self,
        runs: Sequence[FinishedRun],
        next_offset: int,
        stages: Iterable[Owned] = (),
        pairs: Learned = NOTHING_LEARNED,
    ) -> None:
        """Writes runs, stages, pairs and position together;
        a run that exists already stays as it is. Raises `StoreError`."""
        with store_errors(f"{len(runs)} runs were not written"):
            async with self._connection.transaction():
                await self._connection.executemany(INSERT_RUN, [_row(run) for run in runs])
                await self._connection.executemany(
                    INSERT_STAGES,
                    [(*one.key, one.owner, one.seq, one.seq, *one.profile) for one in stages],
                )
                await self._connection.executemany(
                    INSERT_PAIRS,
                    [
                        (*_key(kind), *_key(other)[:3], *mean, next_offset)
                        for (kind, other), mean in pairs.pairs.items()
                    ],
                )
                await self._connection.executemany(
                    INSERT_ALONE,
                    [(*_key(kind), step_ms, next_offset) for kind, step_ms in pairs.alone_ms.items()],
                )
                await self._connection.execute(
                    "UPDATE positions SET next_offset = greatest(next_offset, $2) WHERE cell = $1",
                    self._cell,
                    next_offset,
                )

    async def prune(self) -> None:
        """Removes runs, stages, pairs, and models of each kind, beyond their maximum; the newest promoted
        models stay.

        Raises `StoreError`.
        """
        with store_errors("old runs were not removed"):
            await self._connection.execute(
                "DELETE FROM runs WHERE seq <= (SELECT seq FROM runs ORDER BY seq DESC OFFSET $1 LIMIT 1)",
                MAX_RUNS,
            )
            await self._connection.execute(
                "DELETE FROM stages WHERE last_seq <= "
                "(SELECT last_seq FROM stages ORDER BY last_seq DESC OFFSET $1 LIMIT 1)",
                MAX_STAGES,
            )
            for table in ("pairs", "steps_alone"):
                await self._connection.execute(
                    f"DELETE FROM {table} WHERE last_seq <= "
                    f"(SELECT last_seq FROM {table} ORDER BY last_seq DESC OFFSET $1 LIMIT 1)",
                    MAX_PAIR_ROWS,
                )
            await self._connection.execute(
                "DELETE FROM models WHERE version IN (SELECT version FROM (SELECT version, promoted, "
                "row_number() OVER (PARTITION BY kind ORDER BY trained_seq DESC) AS age, row_number() OVER "
                "(PARTITION BY kind, promoted ORDER BY trained_seq DESC) AS age_of_such FROM models) AS "
                "known WHERE age > $1 AND NOT (promoted AND age_of_such = 1))",
                MAX_MODELS,
            )

    async def runs(self) -> AsyncIterator[FinishedRun]:
        """All of them, rejected ones too, oldest first. Raises `StoreError`."""
        with store_errors("runs could not be read"):
            async with self._connection.transaction():
                async for row in self._connection.cursor(
                    "SELECT body FROM runs ORDER BY seq", prefetch=FETCHED
                ):
                    if (run := _known(row["body"])) is not None:
                        yield run

    async def trained_seq(self, kind: str) -> int:
        """Number of the newest run in the training set of the newest model of this kind; -1: there is no
        model. Raises `StoreError`."""
        with store_errors("models could not be read"):
            query = "SELECT coalesce(max(trained_seq), -1) FROM models WHERE kind = $1"
            found: int = await self._connection.fetchval(query, kind)
        return found

    async def stages(self) -> Sequence[Owned]:
        """For `StageRegistry.put`: keys in the order of their latest change, of each key the owners in the
        order in which they first measured. Raises `StoreError`."""
        with store_errors("stages could not be read"):
            rows = await self._connection.fetch(
                f"SELECT {', '.join(_STAGE_COLUMNS)}, max(last_seq) OVER (PARTITION BY model, batch_size, "
                "gpus) AS changed FROM stages ORDER BY changed, owner = '', first_seq, owner"
            )
        return [
            Owned(
                StageKey(row["model"], row["batch_size"], row["gpus"]),
                row["owner"],
                StageProfile(*(row[name] for name in StageProfile._fields)),
                row["last_seq"],
            )
            for row in rows
        ]

    async def pairs(self) -> Learned:
        """For `Interference.put`. Raises `StoreError`."""
        with store_errors("pairs could not be read"):
            alone = await self._connection.fetch(
                "SELECT owner, model, batch_size, gpu_model, step_ms FROM steps_alone ORDER BY last_seq, "
                "owner, model"
            )
            pairs = await self._connection.fetch(
                "SELECT owner, model, batch_size, gpu_model, other_owner, other_model, other_batch_size, "
                "own, other, runs FROM pairs ORDER BY last_seq, owner, model"
            )
        return Learned(
            {_kind(owner, model, batch, gpu): step_ms for owner, model, batch, gpu, step_ms in alone},
            {
                (_kind(owner, model, batch, gpu), _kind(other_owner, other_model, other_batch, gpu)): Mean(
                    *mean
                )
                for owner, model, batch, gpu, other_owner, other_model, other_batch, *mean in pairs
            },
        )

    async def latest(self, count: int) -> list[FinishedRun]:
        """The newest sound runs, oldest first. Raises `StoreError`."""
        return await self._runs("SELECT body FROM runs WHERE rejected = '' ORDER BY seq DESC LIMIT $1", count)

    async def latest_steps(self, count: int, of_one: int) -> list[FinishedRun]:
        """The newest sound runs that reported steps, at most `of_one` of one owner,
        oldest first. Raises `StoreError`."""
        return await self._runs(
            "SELECT body FROM (SELECT *, row_number() OVER (PARTITION BY owner ORDER BY seq DESC) "
            "AS age FROM runs WHERE rejected = '' AND with_steps) AS known WHERE age <= $2 "
            "ORDER BY seq DESC LIMIT $1",
            count,
            of_one,
        )

    async def _runs(self, query: str, *arguments: object) -> list[FinishedRun]:
        """In reverse order of the query, which takes the newest first."""
        with store_errors("runs could not be read"):
            rows = await self._connection.fetch(query, *arguments)
        return [run for row in reversed(rows) if (run := _known(row["body"])) is not None]

    async def save_model(self, model: Trained, trained_seq: int, kind: str) -> None:
        """Saving the same version twice has no effect. Raises `StoreError`."""
        with store_errors(f"model {model.version} was not written"):
            await self._connection.execute(
                "INSERT INTO models VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (version) "
                "DO UPDATE SET promoted = excluded.promoted, trained_seq = excluded.trained_seq",
                model.version,
                trained_seq,
                model.sha256,
                model.body,
                model.runs,
                model.first_run_ms,
                model.last_run_ms,
                orjson.dumps(model.metrics).decode(),
                model.promoted,
                kind,
            )

    async def promoted_models(self, kind: str) -> list[Trained]:
        """Newest first: if one is damaged, the next is tried. Raises `StoreError`."""
        with store_errors("models could not be read"):
            rows = await self._connection.fetch(
                "SELECT version, sha256, body, runs, first_run_ms, last_run_ms, metrics, promoted FROM "
                "models WHERE promoted AND kind = $1 ORDER BY trained_seq DESC",
                kind,
            )
        return [Trained(*row.values())._replace(metrics=orjson.loads(row["metrics"])) for row in rows]

    async def close(self) -> None:
        """Idempotent."""
        if not self._connection.is_closed():
            await self._connection.close(timeout=CONNECT_TIMEOUT_S)


def _known(body: bytes) -> FinishedRun | None:
    """None: a later version wrote the run, with a value that this one does not know; nothing is learned from
    it here."""
    try:
        return _decode(body)
    except msgspec.ValidationError:
        return None


def _key(kind: Kind) -> tuple[str, str, int, str]:
    return kind.owner, kind.model, kind.batch_size or 0, kind.gpu_model


def _kind(owner: str, model: str, batch_size: int, gpu_model: str) -> Kind:
    return Kind(owner, model, batch_size or None, gpu_model)


def _row(run: FinishedRun) -> tuple[Any, ...]:
    """The columns for queries, and the run itself."""
    body = msgspec.msgpack.encode(run)
    return run.seq, run.info.owner, run.rejected, run.steps is not None, body
