"""Registry of stored models, and whether those that a job was estimated with predict the same again.

The gateway calls `models` and `check` in a worker process.
The check asks the tiers of the service itself, with what the ledger held then: the fold up to the job's estimate.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.errors import StoreError
from penstock.ledger.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.topics import Topic
from penstock.model.types import Estimate, JobSpec
from penstock.model.validation import checked
from penstock.runtime.settings import Settings
from penstock.runtime.snapshots import load_latest
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resources.estimate import Guess
from penstock_services.estimator.core.resources.history import key_of
from penstock_services.estimator.core.saved import BadModel
from penstock_services.estimator.core.state import State, begin_at
from penstock_services.estimator.core.step_time.tier import StepTier
from penstock_services.estimator.core.step_time.training import STEPS, Durations
from penstock_services.estimator.shell.learner import KINDS
from penstock_services.estimator.shell.store import estimator_schema

CONNECT_TIMEOUT_S = 5.0
LOOK_BACK = (
    256  # records before the job came: so far behind the ledger the service may have been when it answered
)
MAX_LISTED = 1_000  # listed; the service keeps 32 of each kind

NAMES = re.compile(rf"\b(?:{'|'.join(kind.name for kind in KINDS)})-[0-9a-f]{{12}}\b")


class Recorded(NamedTuple):
    """What the ledger holds of a job, and in which records."""

    job_id: str
    spec: JobSpec
    submitted_seq: int
    estimate: Estimate
    estimated_seq: int


class Stored(NamedTuple):
    """A model as it lies in the table. `unfit`: why it cannot be used; empty: it is whole."""

    row: Mapping[str, Any]
    model: InUse[Any] | None
    unfit: str


class BadRecord(ValueError):
    """The question cannot be read; the message says what is wrong with it."""


def recorded(text: bytes) -> Recorded:
    """From JSON with the fields of `Recorded`. Raises `BadRecord`."""
    try:
        read = orjson.loads(text)
        return Recorded(
            str(read["job_id"]),
            checked(JobSpec, read["spec"], unknown="ignore"),
            int(read["submitted_seq"]),
            checked(Estimate, read["estimate"], unknown="ignore"),
            int(read["estimated_seq"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"no job with its estimate: {error!r}"[:1_000]) from error


async def models(settings: Settings) -> dict[str, Any]:
    """All that are stored, newest first of each kind. Raises `StoreError`, `ConfigurationError`."""
    connection = await _connect(settings)
    try:
        found = await _stored(connection)
    finally:
        await connection.close()
    used: set[str] = set()
    rows = []
    for one in found:
        kind = one.row["kind"]
        in_use = one.row["promoted"] and not one.unfit and kind not in used
        if in_use:
            used.add(kind)
        rows.append({**one.row, "whole": not one.unfit, "damage": one.unfit or None, "in_use": in_use})
    return {"ok": True, "models": rows}


async def _connect(settings: Settings) -> asyncpg.Connection:
    dsn = settings.need_dsn("the list of models")
    try:
        connection = await asyncpg.connect(
            dsn, timeout=CONNECT_TIMEOUT_S, server_settings={"search_path": estimator_schema(settings.cell)}
        )
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"Postgres cannot be reached: {error}") from error
    return connection


async def _stored(connection: asyncpg.Connection, version: str | None = None) -> Sequence[Stored]:
    """All, or those of this name. An estimator that never ran here has none. Raises `StoreError`."""
    try:
        rows = await connection.fetch(
            "SELECT version, kind, trained_seq, sha256, body, runs, first_run_ms, last_run_ms, metrics, promoted "
            "FROM models WHERE $1::text IS NULL OR version = $1 ORDER BY kind, trained_seq DESC LIMIT $2",
            version,
            MAX_LISTED,
        )
    except asyncpg.UndefinedTableError:
        return ()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"models cannot be read: {error}") from error
    return [_read(row) for row in rows]


def _read(row: Any) -> Stored:
    """With what is wrong with it, if anything: cut short, changed, of another version, or under a foreign name."""
    body = row["body"]
    listed = {name: row[name] for name in row.keys() if name not in ("body", "metrics")}  # noqa: SIM118 - no mapping
    listed |= {"metrics": orjson.loads(row["metrics"]), "bytes": len(body)}
    kind = next((one for one in KINDS if one.name == row["kind"]), None)
    if kind is None:
        return Stored(listed, None, f"kind {row['kind']} is not known to this version of Penstock")
    try:
        model = kind.read(body, row["sha256"])
    except BadModel as error:
        return Stored(listed, None, str(error))
    if model.version != row["version"]:
        return Stored(listed, None, f"its content is {model.version}: it lies under another's name")
    return Stored(listed, model, "")


# ------------------------------------------------------------------------------------------------- checking


class Outcome(NamedTuple):
    """How one model's word compares. `as_of`: the record after which it said so."""

    same: bool
    fields: Mapping[str, Mapping[str, Any]]
    """Field → told then, said again."""
    as_of: int


async def check(settings: Settings, log: Log, job: Recorded) -> dict[str, Any]:
    """Whether the models that the job's estimate names say the same of it again.

    `ok` is None where no model was asked: then there is nothing to say again. Raises `StoreError`, `LogError`,
    `ConfigurationError`.
    """
    versions = list(
        dict.fromkeys([*filter(None, [job.estimate.model_version]), *NAMES.findall(job.estimate.source)])
    )
    head = {
        "job_id": job.job_id,
        "estimated_seq": job.estimated_seq,
        "tier": job.estimate.tier,
        "source": job.estimate.source,
    }
    if not versions:
        told = f"No model was asked: its estimate comes from {job.estimate.source}."
        return {"ok": None, **head, "text": told, "models": []}
    connection = await _connect(settings)
    try:
        stored = {version: next(iter(await _stored(connection, version)), None) for version in versions}
        since = max(0, min(job.submitted_seq, job.estimated_seq) - LOOK_BACK)
        steps = any(
            version.startswith(STEPS.name) for version in versions
        )  # these rest on the runs before, too
        replica = Replica() if steps else await load_latest(connection, settings.cell, until_seq=since)
    finally:
        await connection.close()
    found = await _ask_again(settings, log, job, stored, replica, since)
    rows = [_verdict(version, stored[version], found.get(version)) for version in versions]
    return {
        "ok": all(row["verdict"] == "same" for row in rows),
        **head,
        "text": " ".join(row["text"] for row in rows),
        "models": rows,
    }


async def _ask_again(
    settings: Settings,
    log: Log,
    job: Recorded,
    stored: Mapping[str, Stored | None],
    replica: Replica,
    since: int,
) -> dict[str, Outcome]:
    """Version → how its word compares: the latest record up to the estimate after which it is the same, else the last."""
    state = State(Topic.JOBS, settings.cell_index)
    begin_at(state, replica)
    key = key_of(job.spec)
    tiers = {
        version: _tier(one.model, state) for version, one in stored.items() if one is not None and one.model
    }
    found: dict[str, Outcome] = {}
    partition = Partition(Topic.LEDGER, settings.cell_index)
    reader = log.reader({partition: replica.offset})
    try:
        while state.seq < job.estimated_seq:
            for record in await reader.read():
                before = state.seq
                if before >= job.estimated_seq:
                    break
                state.fold(record.value)
                if state.seq == before or state.seq < since:
                    continue
                for version, tier in tiers.items():
                    outcome = compare(job, version, tier.guess(job.spec, key), state.seq)
                    if outcome.same or version not in found or not found[version].same:
                        found[version] = outcome
    finally:
        await reader.close()
    return found


def _tier(model: InUse[Any], state: State) -> ModelTier | StepTier:
    """The service's own tier with this model in it."""
    if isinstance(model.model, Durations):
        steps = StepTier(state.history, state.nearest, state.nodes)
        steps.use(model)
        return steps
    resources = ModelTier(state.nodes)
    resources.use(model)
    return resources


def compare(job: Recorded, version: str, guess: Guess | None, seq: int) -> Outcome:
    """What the model said then against what it says again.

    The source holds its numbers as it told them; memory may since have been cut to the largest node, or be the user's.
    """
    if guess is None:
        return Outcome(False, {}, seq)
    worker, asked = job.estimate.worker, job.spec.resources
    if version.startswith(STEPS.name):
        fields: dict[str, tuple[Any, Any]] = {"run_ms": (job.estimate.run_ms, guess.run_ms)}
        words = guess.partly
    else:
        fields = {"gpu_utilisation_percent": (worker.gpu_utilisation_percent, guess.gpu_utilisation_percent)}
        if asked.gpu_memory_mib is None:
            fields["gpu_memory_mib"] = (worker.gpu_memory_mib, guess.gpu_memory_mib)
        words = guess.source
    told = {name: {"told": then, "again": again} for name, (then, again) in fields.items()}
    said_so = words in job.estimate.source
    same = said_so and all(_equal(name, then, again) for name, (then, again) in fields.items())
    return Outcome(same, told, seq)


def _equal(name: str, then: Any, again: Any) -> bool:
    if again is None:
        return True  # the model leaves it open; another tier filled it in
    if name == "gpu_memory_mib":
        return bool(
            then <= again
        )  # its own number is in the source; the promise may be cut to the largest node
    return bool(then == again)


def _verdict(version: str, stored: Stored | None, outcome: Outcome | None) -> dict[str, Any]:
    fields: Mapping[str, Mapping[str, Any]] = {} if outcome is None else outcome.fields
    if stored is None:
        verdict = "not_kept"
        text = f"{version} is no longer kept, so it cannot be asked again; `penstock estimator models` lists those that are."
    elif stored.unfit:
        verdict, text = "damaged", f"{version} is kept but cannot be used: {stored.unfit}."
    elif outcome is None or not fields:
        verdict, text = (
            "silent",
            f"{version} says nothing of this job now, with the nodes and runs known then.",
        )
    elif outcome.same:
        numbers = ", ".join(
            f"{name} {pair['again']}"
            + ("" if pair["told"] == pair["again"] else f" (cut to {pair['told']}, the largest node's)")
            for name, pair in fields.items()
            if pair["again"] is not None
        )
        verdict, text = "same", f"{version} says the same again: {numbers}."
    else:
        numbers = ", ".join(
            f"{name} {pair['told']} then and {pair['again']} now" for name, pair in fields.items()
        )
        verdict, text = "differs", f"{version} says something else now: {numbers}."
    return {
        "version": version,
        "verdict": verdict,
        "text": text,
        "sha256": None if stored is None else stored.row["sha256"],
        "fields": fields,
        "as_of": None if outcome is None else outcome.as_of,
    }
