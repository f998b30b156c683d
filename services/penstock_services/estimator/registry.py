"""Model registry: the stored models, and whether those that a job was estimated with predict the same again.

The gateway calls `models` and `check` in a worker process. The check queries the tiers of the service itself,
with the state of the ledger at that time: the fold up to the job's estimate.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import orjson

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.topics import Topic
from penstock.model.schema.validation import checked
from penstock.runtime.following.snapshots import Until, load_latest
from penstock.runtime.settings import Settings
from penstock_services.estimator.core.fold.from_snapshot import begin_at
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.learning.saved import BadModel
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.records.history import key_of
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resources.estimate import Guess, Tier
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import STEPS
from penstock_services.estimator.shell.learner import KINDS
from penstock_services.estimator.shell.store import estimator_schema, store_errors

CONNECT_TIMEOUT_S = 5.0
LOOK_BACK = (
    256  # records before the submission: so far behind the ledger the service may have been when it answered
)
MAX_LISTED = 1_000  # the service stores 32 of each kind

NAMES = re.compile(rf"\b(?:{'|'.join(kind.name for kind in KINDS)})-[0-9a-f]{{12}}\b")


class Recorded(NamedTuple):
    """A job's estimate in the ledger, and the numbers of its records."""

    job_id: str
    spec: JobSpec
    submitted_seq: int
    estimate: Estimate
    estimated_seq: int


class Stored(NamedTuple):
    """A model as stored in its row. `damage`: why it cannot be used; empty: it is whole."""

    row: Mapping[str, Any]
    model: InUse[Any] | None
    damage: str


class BadRecord(ValueError):
    """The request cannot be decoded; the message names the error."""


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
    """All stored models, newest first of each kind. Raises `StoreError`, `ConfigurationError`."""
    async with _connected(settings) as connection:
        found = await _stored(connection)
    used: dict[str, str] = {}
    for one in found:
        if one.row["promoted"] and not one.damage:
            used.setdefault(one.row["kind"], one.row["version"])
    rows = [
        {
            **one.row,
            "whole": not one.damage,
            "damage": one.damage or None,
            "in_use": used.get(one.row["kind"]) == one.row["version"],
        }
        for one in found
    ]
    return {"ok": True, "models": rows}


@asynccontextmanager
async def _connected(settings: Settings) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the estimator's schema, which is not created here.
    Raises `StoreError`, `ConfigurationError`."""
    search_path = {"search_path": estimator_schema(settings.cell)}
    dsn = settings.need_dsn("the list of models")
    with store_errors("Postgres cannot be reached"):
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S, server_settings=search_path)
    try:
        yield connection
    finally:
        await connection.close()


async def _stored(connection: asyncpg.Connection, version: str | None = None) -> Sequence[Stored]:
    """All, or those of this name; none where no estimator ever ran. Raises `StoreError`."""
    with store_errors("models cannot be read"):
        try:
            rows = await connection.fetch(
                "SELECT version, kind, trained_seq, sha256, body, runs, first_run_ms, last_run_ms, metrics, "
                "promoted FROM models WHERE $1::text IS NULL OR version = $1 ORDER BY kind, trained_seq "
                "DESC LIMIT $2",
                version,
                MAX_LISTED,
            )
        except asyncpg.UndefinedTableError:
            return ()
    return [_read(dict(row)) for row in rows]


def _read(row: dict[str, Any]) -> Stored:
    """With its damage, if any: cut short, changed, of another version, or under a wrong name."""
    body = row.pop("body")
    row |= {"metrics": orjson.loads(row["metrics"]), "bytes": len(body)}
    kind = next((one for one in KINDS if one.name == row["kind"]), None)
    if kind is None:
        return Stored(row, None, f"kind {row['kind']} is not known to this version of Penstock")
    try:
        model = kind.read(body, row["sha256"])
    except BadModel as error:
        return Stored(row, None, str(error))
    damage = (
        "" if model.version == row["version"] else f"its content is {model.version}, not what its name is"
    )
    return Stored(row, None if damage else model, damage)


# ------------------------------------------------------------------------------------------------- checking


class Outcome(NamedTuple):
    """Comparison of one model's answers. `as_of`: the record after which it was queried again."""

    same: bool
    fields: Mapping[str, Mapping[str, Any]]
    """Field → the estimate `then` and `now`."""
    as_of: int


async def check(settings: Settings, log: Log, job: Recorded) -> dict[str, Any]:
    """Whether the models named in the job's estimate predict the same again.

    `ok` is None where no model was used. Raises `StoreError`, `LogError`, `ConfigurationError`.
    """
    estimate = job.estimate
    named = [*filter(None, [estimate.model_version]), *NAMES.findall(estimate.source)]
    versions = list(dict.fromkeys(named))
    head = {
        "job_id": job.job_id,
        "estimated_seq": job.estimated_seq,
        "tier": estimate.tier,
        "source": estimate.source,
    }
    if not versions:
        text = f"No model was asked: its estimate comes from {estimate.source}."
        return {"ok": None, **head, "text": text, "models": []}
    since = max(0, min(job.submitted_seq, job.estimated_seq) - LOOK_BACK)
    async with _connected(settings) as connection:
        stored = {version: next(iter(await _stored(connection, version)), None) for version in versions}
        if any(version.startswith(STEPS.name) for version in versions):
            replica = Replica()  # these depend on the runs before, too
        else:
            replica = await load_latest(
                connection, settings.cell, log, Partition(Topic.LEDGER, settings.cell_index), Until(since)
            )
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
    """Version → comparison of its answers: after the latest record up to the estimate where they are the
    same, else the last."""
    state = State(Topic.JOBS, settings.cell_index)
    begin_at(state, replica)
    key = key_of(job.spec)
    tiers = {version: _tier(one.model, state) for version, one in stored.items() if one and one.model}
    found: dict[str, Outcome] = {}
    reader = log.reader({Partition(Topic.LEDGER, settings.cell_index): replica.offset})
    try:
        while state.seq < job.estimated_seq:
            for record in await reader.read():
                before = state.seq
                if before >= job.estimated_seq:
                    break
                state.fold(record.value, record.offset)
                if state.seq == before or state.seq < since:
                    continue
                for version, tier in tiers.items():
                    outcome = compare(job, version, tier.guess(job.spec.least, key), state.seq)
                    if outcome.same or version not in found or not found[version].same:
                        found[version] = outcome
    finally:
        await reader.close()
    return found


def _tier(model: InUse[Any], state: State) -> Tier:
    """The service's own tier with this model."""
    steps = model.version.startswith(STEPS.name)
    tier = StepTier(state.history, state.nearest, state.nodes) if steps else ModelTier(state.nodes)
    tier.use(model)
    return tier


def compare(job: Recorded, version: str, guess: Guess | None, seq: int) -> Outcome:
    """Comparison of the model's recorded prediction with its present one.

    The source has the original numbers; memory may since have been cut to the largest node, or be the user's.
    """
    if guess is None:
        return Outcome(False, {}, seq)
    worker, asked = job.estimate.worker, job.spec.resources
    if version.startswith(STEPS.name):
        pairs: dict[str, tuple[Any, Any]] = {"run_ms": (job.estimate.run_ms, guess.run_ms)}
        source = guess.partly
    else:
        pairs = {"gpu_utilisation_percent": (worker.gpu_utilisation_percent, guess.gpu_utilisation_percent)}
        if asked.gpu_memory_mib is None:
            pairs["gpu_memory_mib"] = (worker.gpu_memory_mib, guess.gpu_memory_mib)
        source = guess.source
    same = source in job.estimate.source and all(_same(name, *pair) for name, pair in pairs.items())
    fields = {name: {"then": then, "now": now} for name, (then, now) in pairs.items()}
    return Outcome(same, fields, seq)


def _same(name: str, then: Any, now: Any) -> bool:
    """True also where the model leaves the field open now and another tier filled it then, or memory was cut
    to the largest node: the model's own number is in the source."""
    return now is None or bool(then <= now if name == "gpu_memory_mib" else then == now)


def _verdict(version: str, stored: Stored | None, outcome: Outcome | None) -> dict[str, Any]:
    fields = {} if outcome is None else outcome.fields
    if stored is None:
        verdict = "not_stored"
        text = (
            "is no longer stored, so it cannot be asked again; `penstock estimator models` lists those "
            "that are"
        )
    elif stored.damage:
        verdict, text = "damaged", f"is stored but cannot be used: {stored.damage}"
    elif outcome is None or not fields:
        verdict, text = "silent", "predicts nothing of this job now, with the nodes and runs known then"
    elif outcome.same:
        numbers = [
            f"{name} {pair['now']}"
            + ("" if pair["then"] == pair["now"] else f" (cut to {pair['then']}, the largest node's)")
            for name, pair in fields.items()
            if pair["now"] is not None
        ]
        verdict, text = "same", f"predicts the same again: {', '.join(numbers)}"
    else:
        numbers = [f"{name} {pair['then']} then and {pair['now']} now" for name, pair in fields.items()]
        verdict, text = "differs", f"predicts something else now: {', '.join(numbers)}"
    return {
        "version": version,
        "verdict": verdict,
        "text": f"{version} {text}.",
        "sha256": None if stored is None else stored.row["sha256"],
        "fields": fields,
        "as_of": None if outcome is None else outcome.as_of,
    }
