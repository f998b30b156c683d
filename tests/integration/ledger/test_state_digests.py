"""The placer states the digest of its state in every n-th record; a reader that has another state raises an
alarm, on both logs."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.ledger.record.record import RawRecord
from penstock.log.open import open_log
from penstock.log.port import Log, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.runtime.following.ledger_follower import LedgerFollower
from penstock_services.batcher.shell import service as batcher
from penstock_services.contention_guard.shell import service as contention_guard
from penstock_services.gateway.shell.replica import differences
from penstock_services.migrator.shell import service as migrator
from penstock_services.placer.shell import service as placer
from penstock_services.placer.shell.replay import Replayer
from penstock_services.projector.shell import service as projector
from tests.integration.ledger.test_repair import Cells
from tests.support.cluster.driver import job_spec, node_spec
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

EVERY = 4
ODD = "odd"
LETTERS, JOBS = Partition(Topic.DEAD_LETTERS, 0), Partition(Topic.JOBS, 0)


class Forgetful(LedgerFollower):
    """It does not fold what is about one job."""

    def _fact(self, record: RawRecord, n: int, fact: Event) -> None:
        if getattr(fact, "job_id", "") != ODD:
            super()._fact(record, n, fact)


async def stated(cells: Cells) -> list[int]:
    """The records that state a digest."""
    found = map(json.loads, await cells.ledger())
    return [record["seq"] for record in found if "digest" in record]


async def submit(cells: Cells) -> None:
    """One more job."""
    end = (await cells.log.end_offsets([JOBS]))[JOBS]
    await cells.send(0, f"submit-j{end}", JobSubmitted(job_id=f"j{end}", spec=job_spec()))


async def go_on(cells: Cells, http: httpx.AsyncClient, asked: Callable[[Any], bool]) -> dict[str, Any]:
    """Jobs are submitted until the gateway's alarm is as asked; the alarm then."""
    found: dict[str, Any] | None = None

    async def as_asked() -> bool:
        nonlocal found
        await submit(cells)
        found = (await http.get("/v1/status")).json()["alarm"]
        return asked(found)

    await await_until(as_asked, lambda: f"another alarm than {found}")
    return found or {}


async def tell(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """All agree, one reader forgets a fact, and it is started anew."""
    monkeypatch.setattr(placer, "DIGEST_EVERY", EVERY)
    monkeypatch.setattr(differences, "round_of", lambda _: 2 * EVERY)
    readers = (placer, projector, migrator, contention_guard)
    async with cells.serving(0, *(reader.run for reader in readers)), cells.gateway() as http:
        with monkeypatch.context() as faulty:
            faulty.setattr(batcher, "LedgerFollower", Forgetful)
            async with cells.serving(0, batcher.run):
                await all_agree(cells, http)
                await cells.send(0, f"submit-{ODD}", JobSubmitted(job_id=ODD, spec=job_spec()))
                odd = await cells.until(f'"submit-{ODD}"'.encode()) + 1
                found = await go_on(cells, http, lambda alarm: alarm is not None)
                first = next(seq for seq in await stated(cells) if seq >= odd)
        cause = f"another state than the placer's, seen first at ledger record {first}: batcher"
        assert (found["cause"], found["job_id"]) == (cause, "")
        async with cells.serving(0, batcher.run):
            await go_on(cells, http, lambda alarm: alarm is None)
    report = await Replayer(cells.log, 0).run()
    assert report.different == 0, report.differences


async def all_agree(cells: Cells, http: httpx.AsyncClient) -> None:
    """Five digests are compared, and nobody writes a letter."""
    await cells.send(0, "node", NodeJoined(node=node_spec("n1")))

    async def compared() -> bool:
        await submit(cells)
        status = (await http.get("/v1/status")).json()
        return bool(min(status["seq"], status["projected_seq"]) > 5 * EVERY)

    await await_until(compared, "five digests")
    assert (await cells.log.end_offsets([LETTERS]))[LETTERS] == 0


async def on_log(dsn: str, log: Log, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The story on this log, which is closed."""
    try:
        await log.create(topic_partitions(2))
        await tell(Cells(dsn, log, url), monkeypatch)
    finally:
        await log.close()


async def test_a_reader_that_folds_otherwise_is_named(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone upgrades the batcher to a build with a faulty fold: its plans rest on a cell that does not
    exist."""
    await on_log(dsn, await EmbeddedLog(dsn, "test").start(), "", monkeypatch)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.usefixtures("patient_kafka")
async def test_on_kafka_too(dsn: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"kafka://{kafka.bootstrap}"
    await on_log(dsn, await open_log(url, "test").start(), url, monkeypatch)
