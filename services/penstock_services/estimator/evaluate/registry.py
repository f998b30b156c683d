"""The models that are kept, and whether the one that a job was estimated with still says the same of it.

The gateway calls `models` and `check` in a worker process.
The check asks the tiers of the service itself, with what the ledger held then: the fold up to the job's estimate.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import asyncpg
import orjson

from penstock.errors import StoreError
from penstock.ledger.record import read_valid
from penstock.ledger.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.topics import Topic
from penstock.model.types import Estimate, JobSpec
from penstock.model.validation import checked
from penstock.runtime.settings import Settings
from penstock.runtime.snapshots import load_latest
from penstock_services.estimator.core.resource_model.saved import BadModel
from penstock_services.estimator.core.resource_model.training import Learned, ModelTier, read_model
from penstock_services.estimator.core.resources.estimate import Guess
from penstock_services.estimator.core.resources.history import key_of
from penstock_services.estimator.core.state import HANDLERS, At, Ledger
from penstock_services.estimator.core.step_time.tier import StepTier
from penstock_services.estimator.core.step_time.training import LearnedSteps, read_steps
from penstock_services.estimator.shell.store import RESOURCES, STEPS, estimator_schema

CONNECT_TIMEOUT_S = 5.0
LOOK_BACK = (
    256  # records before the job came: so far behind the ledger the service may have been when it answered
)
MOST_MODELS = 1_000  # listed; the service keeps 32 of each kind

AnyModel: TypeAlias = Learned | LearnedSteps
READERS: Mapping[str, Callable[[bytes, str], AnyModel]] = MappingProxyType(
    {RESOURCES: read_model, STEPS: read_steps}
)
NAMES = re.compile(rf"\b(?:{RESOURCES}|{STEPS})-[0-9a-f]{{12}}\b")


class Recorded(NamedTuple):
    """What the ledger holds of a job, and in which records."""

    job_id: str
    spec: JobSpec
    submitted_seq: int
    estimate: Estimate
    estimated_seq: int


class Stored(NamedTuple):
    """A model as it lies in the table. `unfit`: why it cannot be used; empty: it is whole."""

    told: Mapping[str, Any]
    model: AnyModel | None
    unfit: str


class BadRecord(ValueError):
    """The question cannot be read; the message says what is wrong with it."""


def recorded(text: bytes) -> Recorded:
    """From JSON with the fields of `Recorded`. Raises `BadRecord`."""
    try:
        told = orjson.loads(text)
        return Recorded(
            str(told["job_id"]),
            checked(JobSpec, told["spec"], unknown="ignore"),
            int(told["submitted_seq"]),
            checked(Estimate, told["estimate"], unknown="ignore"),
            int(told["estimated_seq"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"no job with its estimate: {error!r}"[:1_000]) from error


async def models(settings: Settings) -> dict[str, Any]:
    """All that are kept, newest first of each kind. Raises `StoreError`, `ConfigurationError`."""
    connection = await _connect(settings)
    try:
        found = await _stored(connection)
    finally:
        await connection.close()
    used: set[str] = set()
    rows = []
    for one in found:
        kind = one.told["kind"]
        in_use = one.told["promoted"] and not one.unfit and kind not in used
        if in_use:
            used.add(kind)
        rows.append({**one.told, "whole": not one.unfit, "damage": one.unfit or None, "in_use": in_use})
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
            MOST_MODELS,
        )
    except asyncpg.UndefinedTableError:
        return ()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"models cannot be read: {error}") from error
    return [_read(row) for row in rows]


def _read(row: Any) -> Stored:
    """With what is wrong with it, if anything: cut short, changed, of another version, or under a foreign name."""
    body = row["body"]
    told = {name: row[name] for name in row.keys() if name not in ("body", "metrics")}  # noqa: SIM118 - no mapping
    told |= {"metrics": orjson.loads(row["metrics"]), "bytes": len(body)}
    reader = READERS.get(row["kind"])
    if reader is None:
        return Stored(told, None, f"kind {row['kind']} is not known to this version of Penstock")
    try:
        model = reader(body, row["sha256"])
    except BadModel as error:
        return Stored(told, None, str(error))
    if model.version != row["version"]:
        return Stored(told, None, f"its content is {model.version}: it lies under another's name")
    return Stored(told, model, "")


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
        kept = {version: next(iter(await _stored(connection, version)), None) for version in versions}
        since = max(0, min(job.submitted_seq, job.estimated_seq) - LOOK_BACK)
        steps = any(version.startswith(STEPS) for version in versions)  # these rest on the runs before, too
        replica = Replica() if steps else await load_latest(connection, settings.cell, until_seq=since)
    finally:
        await connection.close()
    found = await _ask_again(settings, log, job, kept, replica, since)
    rows = [_verdict(version, kept[version], found.get(version)) for version in versions]
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
    kept: Mapping[str, Stored | None],
    replica: Replica,
    since: int,
) -> dict[str, Outcome]:
    """Version → how its word compares: the latest record up to the estimate after which it is the same, else the last."""
    fold = Ledger(Topic.JOBS, settings.cell_index)
    fold.begin_at(replica)
    head, key = replica.head, key_of(job.spec)
    tiers = {
        version: _tier(one.model, fold) for version, one in kept.items() if one is not None and one.model
    }
    found: dict[str, Outcome] = {}
    partition = Partition(Topic.LEDGER, settings.cell_index)
    reader = log.reader({partition: replica.offset})
    try:
        while head.seq < job.estimated_seq:
            for record in await reader.read():
                valid = read_valid(head, record.value)
                if valid is None or head.seq >= job.estimated_seq:
                    continue
                head, read = valid
                for fact in read.facts:
                    handler = HANDLERS.get(fact.type)
                    if handler is not None:
                        handler(fold, At(read.seq, read.now_ms, read.cause.event_id), fact.event())
                if head.seq < since:
                    continue
                for version, tier in tiers.items():
                    outcome = compare(job, version, tier.guess(job.spec, key), head.seq)
                    if outcome.same or version not in found or not found[version].same:
                        found[version] = outcome
    finally:
        await reader.close()
    return found


def _tier(model: AnyModel | None, fold: Ledger) -> ModelTier | StepTier:
    """The service's own tier with this model in it."""
    if isinstance(model, LearnedSteps):
        steps = StepTier(fold.history, fold.nearest, fold.node_sizes)
        steps.use(model)
        return steps
    assert isinstance(model, Learned)
    resources = ModelTier(fold.cards)
    resources.use(model)
    return resources


def compare(job: Recorded, version: str, guess: Guess | None, seq: int) -> Outcome:
    """What the model said then against what it says again.

    The source holds its numbers as it told them; memory may since have been cut to the largest node, or be the user's.
    """
    if guess is None:
        return Outcome(False, {}, seq)
    worker, asked = job.estimate.worker, job.spec.resources
    if version.startswith(STEPS):
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


def _verdict(version: str, kept: Stored | None, outcome: Outcome | None) -> dict[str, Any]:
    fields: Mapping[str, Mapping[str, Any]] = {} if outcome is None else outcome.fields
    if kept is None:
        verdict = "not_kept"
        text = f"{version} is no longer kept, so it cannot be asked again; `penstock estimator models` lists those that are."
    elif kept.unfit:
        verdict, text = "damaged", f"{version} is kept but cannot be used: {kept.unfit}."
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
        "sha256": None if kept is None else kept.told["sha256"],
        "fields": fields,
        "as_of": None if outcome is None else outcome.as_of,
    }
