"""A ledger record that no service can decode, under a running installation: it says so, goes on living, and
is repaired by command."""

import asyncio
from pathlib import Path

import pytest

from penstock.ledger.record.record import Draft, write
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.decisions.ledger_events import TimerSet, TimerSubject
from penstock.model.nouns.types import MAX_MS
from penstock.model.schema.topics import Topic
from tests.e2e.conftest import Start, listed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres
LEDGER = Partition(Topic.LEDGER, 0)


async def poison(dsn: str) -> int:
    """Appends the record of an earlier version that proved nothing: a timer behind the end of time. Returns
    its offset."""
    log = await EmbeddedLog(dsn, "placer").start()
    try:
        replica, reader = Replica(), log.reader({LEDGER: 0})
        end = (await log.end_offsets([LEDGER]))[LEDGER]
        while replica.offset < end:
            for record in await reader.read():
                replica.take(record.value, record.offset)
        await reader.close()
        about = TimerSubject(kind="ending", id="cell", attempt=0)
        late = TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=about)
        state, head = replica.state, replica.head
        _, value = write(
            head, Draft(head.term, state.now_ms, {"timer_id": "cell:x"}, "committed", None, [late])
        )
        [offset] = await log.append([Message(LEDGER, value)])
        return offset
    finally:
        await log.close()


def test_a_poisoned_cell_is_named_looked_at_and_repaired(start: Start) -> None:
    """Jobs have run; then comes the record. `penstock up` names it once and the remedy; old jobs can be
    looked at; the next job runs after it."""
    up = start("--nodes", "1", "--virtual-gpus", "1")
    assert up.run("submit", "--name", "old", "--", "true").returncode == 0
    offset = asyncio.run(poison((up.folder / "postgres" / "url").read_text()))
    wait_until(lambda: f"penstock repair --at {offset}" in up.printed(), lambda: up.printed())

    assert listed(up, "describe", "job", "old")["status"] == "succeeded"
    why = up.run("why", "old")
    assert why.returncode != 0
    assert f"penstock repair --at {offset}" in why.stderr
    doctor = up.run("doctor")
    assert f"penstock repair --at {offset}" in doctor.stdout + doctor.stderr
    asked = up.run("repair", "--at", str(offset))
    assert (asked.returncode, "give --yes" in asked.stderr) == (2, True), "nobody can answer"
    assert f"{MAX_MS + 1} becomes {MAX_MS}" in asked.stderr
    assert up.process.poll() is None

    done = up.run("repair", "--at", str(offset), "--yes", "--reason", "a drill")
    assert done.returncode == 0, done.stderr
    new = up.run("submit", "--name", "new", "--", "true")
    assert new.returncode == 0, new.stderr + new.stdout
    assert up.run("why", "old").returncode == 0
    for check in (("projections", "verify"), ("replay",)):
        found = up.run(*check)
        assert found.returncode == 0, found.stdout
    assert up.printed().count("penstock repair --at") == 1, "once, not for each service and each try"
    events = Path(up.folder / "logs" / "services.log").read_text()
    assert events.count("placer stops: ") == 1
