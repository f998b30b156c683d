"""The node's journal: what LAW 4 rests on is on the disk before anything follows from it."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.log.port import Message, Partition
from penstock.model.decisions.orders import HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import OrderRefused, TaskExited
from penstock.model.nouns.nodes import GpuFault
from penstock.model.nouns.types import TaskPlacement
from penstock_services.node_reporter.core.inputs import OrderRead
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import (
    MAX_HANDOVERS,
    Break,
    Context,
    Forget,
    HandOver,
    Put,
    Status,
    Task,
    check,
)
from penstock_services.node_reporter.shell.journal import Journal, JournalFailed, Outgoing
from tests.support.cluster.driver import node_spec

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
static int count;
int fdatasync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync"); count++; return real(fd); }
int fsync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fsync"); count++; return real(fd); }
int penstock_syncs(void) { return count; }
"""
WRITER = """
import ctypes, json, sys
from pathlib import Path
from penstock_services.node_reporter.core.state import Put, Status, Task
from penstock_services.node_reporter.shell.journal import Journal
syncs = ctypes.CDLL(None).penstock_syncs
journal, counts = Journal(Path(sys.argv[1])), []
for number in range(20):
    before = syncs()
    journal.write([Put(Task("t", number, "boot", Status.ENDED, ("GPU-0",)))], [], {}, durable=number < 10)
    counts.append(syncs() - before)
print(json.dumps(counts))
"""


def order(token: int) -> StartTask:
    place = TaskPlacement(task_id="t", role="worker", rank=0, node_id="n1", gpus=(0,))
    return StartTask(
        token=token,
        node_id="n1",
        task_id="t",
        job_id="j",
        attempt=1,
        boot_id="boot",
        command=("train",),
        place=place,
        gpu_uuids=("GPU-0",),
        peers=(),
        rendezvous_port=29_500,
        grace_ms=10,
    )


def test_a_token_waits_for_the_disk_and_an_exit_does_not(tmp_path: Path) -> None:
    """Counts what the C library is asked: at least one fsync per durable write, none for what can be proven
    again.

    Notices a journal whose fsync was taken out, which no kill -9 can (the page cache survives that).
    """
    source = tmp_path / "counter.c"
    source.write_text(COUNTER)
    library = tmp_path / "counter.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    found = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "journal.sqlite")],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        check=True,
    )
    counts = json.loads(found.stdout)
    assert all(count >= 1 for count in counts[:10]), counts
    assert sum(counts[10:]) == 0, counts


def test_everything_is_as_it_was_after_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    running = Task(
        "t",
        7,
        "boot",
        Status.RUNNING,
        ("GPU-0", "GPU-1"),
        order(7),
        Context("00-a-b-01", "j"),
        42,
        1_000,
    )
    refused = OrderRefused(node_id="n1", task_id="u", token=3, reason="occupied", highest_token=3)
    ended = Task("u", 3, "boot", Status.ENDED, refusal=refused)
    journal.write([Put(running), Put(ended), Forget("v", 2)], [], {"next_offset": 12}, durable=True)
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    state = journal.load(node_spec("n1", 2))
    assert state.tasks == {"t": running}
    assert state.ended == {"u": ended}
    assert (state.gpu_tokens, state.forgotten_token) == ({"GPU-0": 7, "GPU-1": 7}, 2)
    assert journal.number("next_offset", -1) == 12
    check(state)


def test_a_gpus_token_never_falls(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for token in (9, 4):
        journal.write([Put(Task(f"t{token}", token, "boot", Status.ENDED, ("GPU-0",)))], [], {}, durable=True)
    assert journal.load(node_spec("n1", 1)).gpu_tokens == {"GPU-0": 9}


def test_events_stay_until_they_are_acknowledged(tmp_path: Path) -> None:
    """In order, with their headers; an acknowledged one is gone, and its number is not used again."""
    journal = Journal(tmp_path / "journal.sqlite")
    messages = [Message(Partition("topic", 0), b"%d" % n, (("ce_id", b"e%d" % n),)) for n in range(3)]
    journal.write([], [Outgoing(f"e{n}", message) for n, message in enumerate(messages)], {}, durable=False)
    pending = journal.pending(10)
    assert [event.message for event in pending] == messages
    journal.acknowledge(pending[1].seq)
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    assert [event.id for event in journal.pending(10)] == ["e2"]


def test_a_damaged_journal_is_not_worked_with(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(JournalFailed):
        Journal(tmp_path / "journal.sqlite")


def handed(job: int, token: int) -> HandOverCheckpoint:
    return HandOverCheckpoint(
        token=token, node_id="n1", job_id=f"j{job}", attempt=2, to_node="n2", public_key="k" * 86
    )


def test_which_node_may_have_which_checkpoint_outlives_a_restart(tmp_path: Path) -> None:
    """The reporter is killed between the order and the request of the other node. An order that is repeated
    late, after a newer one, changes nothing; beyond the bound the oldest is forgotten, in memory and on the
    disk alike."""
    journal = Journal(tmp_path / "journal.sqlite")
    state = journal.load(node_spec("n1"))
    orders = [handed(number, number) for number in range(1, MAX_HANDOVERS + 1)]
    for order in (*orders, handed(2, 1_000), handed(2, 999), handed(500, 1_001)):
        journal.write(
            [one for one in step(state, OrderRead(order, 1)) if isinstance(one, HandOver)],
            [],
            {},
            durable=True,
        )
    assert len(state.handovers) == MAX_HANDOVERS
    assert "j1" not in state.handovers
    assert state.handovers["j2"].token == 1_000
    journal.close()
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.load(node_spec("n1")).handovers == state.handovers
    journal.close()


def test_the_journal_of_a_later_version_is_read_with_the_nearest_values(tmp_path: Path) -> None:
    """A node-reporter is set back. The other one had written causes and faults into the journal that this one
    does not know."""
    path = tmp_path / "journal"
    exited = TaskExited(
        node_id="n1", task_id="t", token=1, cause="exited", exit_code=0, started_ms=1, exited_ms=2
    )
    journal = Journal(path)
    journal.write([Put(Task("t", 1, "b1", Status.ENDED, exited=exited))], [], {}, durable=True)
    journal.write([Break(GpuFault(uuid="GPU-n1-0", fault="ecc"), "b1")], [], {}, durable=True)
    journal.close()
    with sqlite3.connect(path) as later:
        later.execute('UPDATE tasks SET row = replace(row, \'"exhausted":""\', \'"exhausted":"patience"\')')
        later.execute(
            """UPDATE tasks SET row = replace(row, '"cause":"exited"', '"cause":"evicted","colour":1')"""
        )
        later.execute("""UPDATE faults SET fault = replace(fault, '"ecc"', '"solar_flare"')""")
    state = Journal(path).load(node_spec("n1", 1, boot="b1"))
    assert state.ended["t"].exited == replace(exited, cause="lost")
    assert [fault.fault for fault in state.faults.values()] == ["xid"]
