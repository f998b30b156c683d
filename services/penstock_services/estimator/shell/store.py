"""The estimator's projection in Postgres: finished runs, the position in the ledger, and the learned models.

Runs and position are written in one transaction, so that each run is there exactly once whatever is killed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg
import orjson

from penstock.errors import StoreError
from penstock.runtime.migrations import load_migrations, migrate, schema_of
from penstock_services.estimator.core.limits import HISTORY_KEYS, STAGE_KEYS, STAGE_OWNERS
from penstock_services.estimator.core.model_lifecycle import Trained
from penstock_services.estimator.core.resources.history import RUNS_PER_KEY, UNKNOWN, History, Run
from penstock_services.estimator.core.resources.memory_kills import MemoryKills
from penstock_services.estimator.core.runs import About, Card, FinishedRun, Given, Said, Steps, ToldEta
from penstock_services.estimator.core.stages.profile import StageKey, StageProfile
from penstock_services.estimator.core.stages.registry import Owned
from penstock_services.estimator.core.state import StageRow

MIGRATIONS = "penstock_services.estimator.migrations"
CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 60.0
RUNS_KEPT = 200_000  # older ones say nothing about today's code; about 60 MB
MODELS_KEPT = 32
UNSEEN_KEPT = 10_000  # runs after the last training that a restart looks at

STAGES_KEPT = STAGE_KEYS * (STAGE_OWNERS + 1)  # as many as the memory holds

_MEASURED = Run._fields[2:]  # the first two are columns of their own
COLUMNS = (
    "seq", "job_id", "ended_ms", "key", "owner", "model", "batch_size", "workers", "parameter_servers", "asked",
    "gpus", "gpu_share_milli", "cores", "gpu_model", "card_memory_mib",
    *(f"said_{name}" for name in Said._fields),
    *(name for name in _MEASURED if name != "gpus"),
    "set_aside", "steps", "steps_aside", *(f"eta_{name}" for name in ToldEta._fields), "category",
)  # fmt: skip
_COLUMNS = ", ".join(COLUMNS)
_STAGE_COLUMNS = ("model", "batch_size", "gpus", "owner", "first_seq", "last_seq", *StageProfile._fields)


def _insert(table: str, columns: Sequence[str]) -> str:
    places = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"


INSERT_RUN = f"{_insert('runs', COLUMNS)} ON CONFLICT (seq) DO NOTHING"
INSERT_STAGES = (
    f"{_insert('stages', _STAGE_COLUMNS)} ON CONFLICT (model, batch_size, gpus, owner) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ("last_seq", *StageProfile._fields))
)
"""Of a row that is there already, only the record that it began with stays."""


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Turns what Postgres raises into `StoreError`."""
    try:
        yield
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        raise StoreError(f"{what}: {error}") from error


def estimator_schema(cell: str) -> str:
    """Beside the cell's read models."""
    return f"{schema_of(cell)}_learned"


class RunStore:
    """One estimator's connection to its schema."""

    def __init__(self, connection: asyncpg.Connection, cell: str) -> None:
        self._connection = connection
        self._cell = cell

    @classmethod
    async def open(cls, dsn: str, cell: str) -> "RunStore":
        """Connects and migrates. Raises `StoreError`, or `ConfigurationError` for a schema of another version."""
        schema = estimator_schema(cell)
        with _store_errors("Postgres cannot be reached"):
            connection = await asyncpg.connect(
                dsn,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
                server_settings={"application_name": "penstock estimator", "jit": "off"},
            )
        try:
            await migrate(connection, schema, load_migrations(MIGRATIONS))
            await connection.execute(f"SET search_path TO {schema}")
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
        self, runs: Sequence[FinishedRun], next_offset: int, stages: Iterable[StageRow] = ()
    ) -> None:
        """Runs, stages and position together; a run that is there already stays as it is. Raises `StoreError`."""
        with _store_errors(f"{len(runs)} runs were not written"):
            async with self._connection.transaction():
                await self._connection.executemany(INSERT_RUN, [_row(run) for run in runs])
                await self._connection.executemany(
                    INSERT_STAGES,
                    [(*one.row.key, one.row.owner, one.seq, one.seq, *one.row.profile) for one in stages],
                )
                await self._connection.execute(
                    "UPDATE positions SET next_offset = greatest(next_offset, $2) WHERE cell = $1",
                    self._cell,
                    next_offset,
                )

    async def forget(self) -> None:
        """Removes runs, stages, and models of each kind, beyond what is kept; the newest promoted models stay.

        Raises `StoreError`.
        """
        with _store_errors("old runs were not removed"):
            await self._connection.execute(
                "DELETE FROM runs WHERE seq <= (SELECT seq FROM runs ORDER BY seq DESC OFFSET $1 LIMIT 1)",
                RUNS_KEPT,
            )
            await self._connection.execute(
                "DELETE FROM stages WHERE last_seq <= "
                "(SELECT last_seq FROM stages ORDER BY last_seq DESC OFFSET $1 LIMIT 1)",
                STAGES_KEPT,
            )
            await self._connection.execute(
                "DELETE FROM models WHERE version IN (SELECT version FROM (SELECT version, promoted, row_number() OVER "
                "(PARTITION BY kind ORDER BY trained_seq DESC) AS age, row_number() OVER "
                "(PARTITION BY kind, promoted ORDER BY trained_seq DESC) AS age_of_such FROM models) AS known "
                "WHERE age > $1 AND NOT (promoted AND age_of_such = 1))",
                MODELS_KEPT,
            )

    async def fill_history(
        self, history: History, keys: int = HISTORY_KEYS, runs_per_key: int = RUNS_PER_KEY
    ) -> int:
        """With the newest sound runs of the keys used last; returns how many. Raises `StoreError`."""
        runs = await self._runs(
            f"SELECT {_COLUMNS} FROM (SELECT *, row_number() OVER (PARTITION BY key ORDER BY seq DESC) "
            "AS age, max(seq) OVER (PARTITION BY key) AS used FROM runs WHERE set_aside = '') AS known "
            "WHERE age <= $1 AND key IN (SELECT key FROM runs WHERE set_aside = '' GROUP BY key "
            "ORDER BY max(seq) DESC LIMIT $2) ORDER BY used DESC, seq DESC",
            runs_per_key,
            keys,
        )
        for run in runs:
            history.add(run.about.key, run.measured, run.about.owner)
        return len(runs)

    async def fill_kills(self, kills: MemoryKills, at_most: int) -> None:
        """With the newest kills for memory, oldest first, but for those after which the same job ran with more."""
        runs = await self._runs(
            f"SELECT {_COLUMNS} FROM runs AS kill WHERE set_aside LIKE 'out_of_memory%' AND NOT EXISTS "
            "(SELECT 1 FROM runs AS later WHERE later.key = kill.key AND later.seq > kill.seq AND later.set_aside = '' "
            "AND later.said_host_memory_mib > kill.said_host_memory_mib) ORDER BY seq DESC LIMIT $1",
            at_most,
        )
        for run in runs:
            kills.add(run.about, 0 if run.said is None else run.said.host_memory_mib)

    async def stages(self) -> Sequence[Owned]:
        """For `StageRegistry.put`: keys in the order of their latest change, of each key the owners in the order in which they
        first measured. Raises `StoreError`."""
        with _store_errors("stages could not be read"):
            rows = await self._connection.fetch(
                f"SELECT {', '.join(_STAGE_COLUMNS)}, max(last_seq) OVER (PARTITION BY model, batch_size, gpus) AS changed "
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

    async def latest(self, count: int) -> list[FinishedRun]:
        """The newest sound runs, oldest first. Raises `StoreError`."""
        return await self._runs(
            f"SELECT {_COLUMNS} FROM runs WHERE set_aside = '' ORDER BY seq DESC LIMIT $1", count
        )

    async def latest_steps(self, count: int, of_one: int) -> list[FinishedRun]:
        """The newest sound runs that reported steps, at most `of_one` of one owner, oldest first. Raises `StoreError`."""
        return await self._runs(
            f"SELECT {_COLUMNS} FROM (SELECT *, row_number() OVER (PARTITION BY owner ORDER BY seq DESC) "
            "AS age FROM runs WHERE set_aside = '' AND steps IS NOT NULL) AS known WHERE age <= $2 "
            "ORDER BY seq DESC LIMIT $1",
            count,
            of_one,
        )

    async def after_training(self, kind: str) -> list[FinishedRun]:
        """Runs that ended after the newest model of this kind was trained, oldest first; at most `UNSEEN_KEPT`."""
        return await self._runs(
            f"SELECT {_COLUMNS} FROM runs WHERE seq > coalesce((SELECT max(trained_seq) FROM models "
            "WHERE kind = $1), -1) ORDER BY seq DESC LIMIT $2",
            kind,
            UNSEEN_KEPT,
        )

    async def _runs(self, query: str, *arguments: object) -> list[FinishedRun]:
        """In the opposite order of the query's, which takes the newest first."""
        with _store_errors("runs could not be read"):
            rows = await self._connection.fetch(query, *arguments)
        return [finished(row) for row in reversed(rows)]

    async def save_model(self, model: Trained, trained_seq: int, kind: str) -> None:
        """The same version twice is one. Raises `StoreError`."""
        with _store_errors(f"model {model.version} was not written"):
            await self._connection.execute(
                "INSERT INTO models VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (version) DO UPDATE "
                "SET promoted = excluded.promoted, trained_seq = excluded.trained_seq",
                model.version, trained_seq, model.sha256, model.body, model.runs, model.first_run_ms,
                model.last_run_ms, orjson.dumps(model.metrics).decode(), model.promoted, kind,
            )  # fmt: skip

    async def promoted_models(self, kind: str) -> list[Trained]:
        """Newest first: should one be damaged, the next is tried. Raises `StoreError`."""
        with _store_errors("models could not be read"):
            rows = await self._connection.fetch(
                "SELECT version, sha256, body, runs, first_run_ms, last_run_ms, metrics, promoted FROM models "
                "WHERE promoted AND kind = $1 ORDER BY trained_seq DESC",
                kind,
            )
        return [Trained(*row.values())._replace(metrics=orjson.loads(row["metrics"])) for row in rows]

    async def close(self) -> None:
        """Idempotent."""
        if not self._connection.is_closed():
            await self._connection.close(timeout=CONNECT_TIMEOUT_S)


def _row(run: FinishedRun) -> tuple[Any, ...]:
    about, given, measured = run.about, run.given, run.measured
    said = run.said or (None,) * len(Said._fields)
    numbers = [getattr(measured, name) for name in _MEASURED if name != "gpus"]
    steps = None if run.steps is None else orjson.dumps(run.steps._asdict()).decode()
    return (
        run.seq, run.job_id, int(measured.ended_ms), about.key, about.owner, about.model, about.batch_size,
        about.workers, about.parameter_servers, list(about.asked), given.gpus, given.gpu_share_milli, given.cores,
        given.card.model, given.card.memory_mib, *said,
        *(None if math.isnan(number) else number for number in numbers), run.set_aside, steps, run.steps_aside,
        *(run.eta or (None,) * len(ToldEta._fields)), about.category,
    )  # fmt: skip


def finished(row: Any) -> FinishedRun:
    """The run that `_row` wrote."""
    numbers = {
        name: UNKNOWN if row[name] is None else float(row[name]) for name in _MEASURED if name != "gpus"
    }
    return FinishedRun(
        row["seq"],
        row["job_id"],
        About(
            row["key"], row["owner"], row["model"], row["batch_size"], row["workers"], row["parameter_servers"],
            tuple(row["asked"]), row["category"],
        ),
        Given(row["gpus"], row["gpu_share_milli"], row["cores"], Card(row["gpu_model"], row["card_memory_mib"])),
        None if row["said_tier"] is None else Said(*(row[f"said_{name}"] for name in Said._fields)),
        Run(ended_ms=float(row["ended_ms"]), seq=float(row["seq"]), gpus=float(row["gpus"]), **numbers),
        row["set_aside"],
        None if row["steps"] is None else _steps(orjson.loads(row["steps"])),
        row["steps_aside"],
        None if row["eta_left_ms"] is None else ToldEta(*(row[f"eta_{name}"] for name in ToldEta._fields)),
    )  # fmt: skip


def _steps(stored: Mapping[str, Any]) -> Steps:
    return Steps(
        tuple(stored["placement"]),
        tuple(stored["windows_ms"]),
        tuple((step, value) for step, value in stored["curve"]),
    )
