"""Each guard is removed in turn, in a process of its own; the story that is told about it must then fail.

A mutant that survives is a guard that nobody would miss: a bug in the suite. The control runs the very same
tests on the code as it is.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from tests.faults.mutate import VARIABLE

AT_ONCE = 2
TIMEOUT_S = 100.0
TESTS_FAILED = 1  # pytest's exit status

GUARDS = "tests/faults/test_guards.py"
SERVICE = "penstock_services.placer.shell.service"
GUARD = "penstock_services.placer.core.guard"
DECIDE = "penstock_services.placer.core.decide"
RECORD = "penstock.ledger.record"
APPEND = '            await self._log.append(messages)\n            hit("placer.record_appended")'
APPLY = "            moved = await self.connection.fetchrow(\n"


class Mutant(NamedTuple):
    """One guard less."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1


MUTANTS = (
    Mutant(
        "parent check", RECORD, " or record.parent != head.id", "",
        (f"{GUARDS}::test_a_record_must_name_its_parent",),
    ),
    Mutant(
        "seq check", RECORD, "record.seq != head.seq + 1 or ", "",
        (f"{GUARDS}::test_a_record_must_be_the_next_one",),
    ),
    Mutant(
        "term check", RECORD, "if record.term != head.term + (1 if starts_term else 0):", "if False:",
        (f"{GUARDS}::test_a_record_must_be_of_the_current_term",),
    ),
    Mutant(
        "awaiting the ledger's append", SERVICE, APPEND,
        APPEND.replace("await self._log.append(messages)", "asyncio.ensure_future(self._log.append(messages))"),
        (f"{GUARDS}::test_a_failed_append_to_the_ledger_costs_no_decision",),
    ),
    Mutant(
        "awaiting the orders' append", "penstock_services.placer.shell.dispatch",
        '            await self._log.append(messages)\n            hit("placer.orders_sent")',
        "            asyncio.ensure_future(self._log.append(messages))",
        (f"{GUARDS}::test_a_failed_append_of_orders_loses_none",),
    ),
    Mutant(
        "awaiting the estimates' append", "penstock_services.estimator.shell.sending",
        "            await log.append(messages)", "            asyncio.ensure_future(log.append(messages))",
        (f"{GUARDS}::test_an_estimate_is_sent_until_it_arrives",),
    ),
    Mutant(
        "read-back before dispatch", SERVICE, APPEND,
        "            for p in self._pending:\n"
        "                self._dispatcher.take(p.head.seq, p.now_ms, p.facts, p.explanation, p.began_ms, p.took_ms)\n"
        f"            await self._dispatcher.flush()\n{APPEND}",
        (f"{GUARDS}::test_an_order_follows_only_from_a_record_that_was_read_back",),
    ),
    Mutant(
        "a dead letter before its record", SERVICE, "            if letters:", "            if False:",
        (f"{GUARDS}::test_a_dead_letter_survives_a_crash_beside_its_record",),
    ),
    Mutant(
        "own term read back before deciding", "penstock_services.placer.shell.term",
        "if ours and replica.head.term == term:", "if True:",
        (f"{GUARDS}::test_a_placer_decides_only_once_its_own_term_was_read_back",),
    ),
    Mutant(
        "a fenced placer stands by", SERVICE, "            self._standing_by = True\n", "            pass\n",
        (f"{GUARDS}::test_a_replaced_placer_stands_by",),
    ),
    Mutant(
        "no order for a task that is lost", "penstock_services.placer.core.orders",
        "for task in job.tasks.values() if task.status is TaskStatus.ASSIGNED", "for task in job.tasks.values() if task.started_ms is None",
        (f"{GUARDS}::test_a_task_lost_to_a_reboot_is_not_ordered_under_the_new_boot",),
    ),
    Mutant(
        "one submission, one job", GUARD, '"duplicate_job" if event.job_id in state.jobs or event.job_id in state.ended else None', "None",
        (f"{GUARDS}::test_a_second_submission_starts_no_second_job",),
    ),
    Mutant(
        "ended jobs are remembered", GUARD, " or event.job_id in state.ended else None", " else None",
        (f"{GUARDS}::test_a_second_submission_starts_no_second_job",),
    ),
    Mutant(
        "token check", GUARD, 'None if event.token == job.token else "stale_token"', "None",
        (f"{GUARDS}::test_a_message_with_another_token_is_refused",),
    ),
    Mutant(
        "one start per task", GUARD, 'return "duplicate_start"', "return None",
        (f"{GUARDS}::test_started_twice_is_told_once",),
    ),
    Mutant(
        "late joinings", GUARD, "0 < event.incarnation <= node.incarnation", "False",
        (f"{GUARDS}::test_a_late_copy_of_a_joining_kills_nobody",),
    ),
    Mutant(
        "final stops", GUARD, 'frozenset({"cancelled", "completed", "run_timeout"})', "frozenset()",
        (f"{GUARDS}::test_a_cancellation_does_not_undo_success",),
    ),
    Mutant(
        "freeze rule", DECIDE, "if missing > of * self.settings.freeze_fraction and of > 1:", "if False:",
        (f"{GUARDS}::test_most_nodes_vanishing_evicts_nobody",),
    ),
    Mutant(
        "overtake bound", DECIDE, "head.overtaken >= self.settings.max_overtakes", "False",
        (f"{GUARDS}::test_the_head_of_the_queue_is_overtaken_only_so_often",), 2,
    ),
    Mutant(
        "sync of the node's journal", "penstock_services.node_reporter.shell.journal",
        "'FULL' if durable else 'NORMAL'", "'NORMAL'",
        ("tests/faults/test_disk.py",),
    ),
    Mutant(
        "waiting for the sync before acting", "penstock_services.node_reporter.shell.node",
        "durable=bool(inputs)", "durable=False",
        ("tests/faults/test_disk.py",),
    ),
    Mutant(
        "node's token check", "penstock_services.node_reporter.core.machine", "    if order.token < highest:\n", "    if False:\n",
        ("tests/unit/test_node_core.py",),
    ),
    Mutant(
        "cursor in the same transaction", "penstock_services.projector.shell.store", APPLY,
        "            await self.connection.execute(\n"
        "                'UPDATE positions SET next_offset = $2 WHERE cell = $1', self._cell, replica.offset\n"
        "            )\n"
        f"            expected_offset = replica.offset\n{APPLY}",
        ("tests/faults/test_projector_commit.py",),
    ),
)  # fmt: skip


def run(tests: tuple[str, ...], dsn: str, mutant: Mutant | None = None) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    env["PENSTOCK_DSN"] = dsn
    if mutant is not None:
        env[VARIABLE] = json.dumps(
            {"module": mutant.module, "old": mutant.old, "new": mutant.new, "count": mutant.count}
        )
    options = ("-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-m", "")
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.mutate", *options, *tests],
        env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.postgres
@pytest.mark.timeout(240)
def test_every_missing_guard_is_noticed(postgres_dsn: str) -> None:
    """Somebody simplifies a line that looked superfluous."""
    tests = tuple(sorted({test for mutant in MUTANTS for test in mutant.tests}))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        control = pool.submit(run, tests, postgres_dsn)
        results = list(pool.map(lambda mutant: run(mutant.tests, postgres_dsn, mutant), MUTANTS))
    found = control.result()
    assert found.returncode == 0, f"the stories fail without any mutant:\n{found.stdout}{found.stderr}"
    wrong = {
        mutant.name: f"exit status {result.returncode}: {result.stdout[-600:]}{result.stderr[-600:]}"
        for mutant, result in zip(MUTANTS, results, strict=True)
        if result.returncode != TESTS_FAILED
    }
    noticed = len(MUTANTS) - len(wrong)
    print(f"\n{noticed} of {len(MUTANTS)} mutants noticed")
    assert wrong == {}, "survivors (0), misfits (99), never imported (98), or others"
