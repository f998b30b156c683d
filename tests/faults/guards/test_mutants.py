"""Each guard is broken in turn, in a process of its own; the test that is about it must then fail.

A mutant that survives is a guard that nobody would miss: a bug in the suite. The control runs the very same
tests on the code as it is.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.mutate import MUTANTS

TESTS_FAILED = 1  # pytest's exit status
PROMISED = 26
CI_STEP = 9

GUARDS = "tests/faults/guards/test_guards.py"
DISK = "tests/faults/kills/test_disk.py"
SHOWN = "tests/unit/test_no_secret_is_shown.py"
NOTICED_BY = {
    "a record need not name its parent": f"{GUARDS}::test_a_record_must_name_its_parent",
    "a record need not be the next one": f"{GUARDS}::test_a_record_must_be_the_next_one",
    "a record of an older term counts": f"{GUARDS}::test_a_record_must_be_of_the_current_term",
    "a failed append to the ledger is not noticed": (
        f"{GUARDS}::test_a_failed_append_to_the_ledger_costs_no_decision"
    ),
    "a failed append of orders is not noticed": f"{GUARDS}::test_a_failed_append_of_orders_loses_none",
    "the estimator gives up after one failure": f"{GUARDS}::test_an_estimate_is_sent_until_it_arrives",
    "orders are sent before their record is read back": (
        f"{GUARDS}::test_an_order_follows_only_from_a_record_that_was_read_back"
    ),
    "an input that cannot be read gets no dead letter": (
        f"{GUARDS}::test_a_dead_letter_survives_a_crash_beside_its_record"
    ),
    "a placer decides before its own term was read back": (
        f"{GUARDS}::test_a_placer_decides_only_once_its_own_term_was_read_back"
    ),
    "a fenced placer does not stand by": f"{GUARDS}::test_a_replaced_placer_stands_by",
    "starts are ordered of tasks that have ended": (
        f"{GUARDS}::test_a_task_lost_to_a_reboot_is_not_ordered_under_the_new_boot"
    ),
    "a job may be submitted twice": f"{GUARDS}::test_a_second_submission_starts_no_second_job",
    "an ended job may be submitted again": f"{GUARDS}::test_a_second_submission_starts_no_second_job",
    "a task's event under an older token counts": f"{GUARDS}::test_a_message_with_another_token_is_refused",
    "a task may start twice": f"{GUARDS}::test_started_twice_counts_once",
    "late copies of joinings count": f"{GUARDS}::test_a_late_copy_of_a_joining_kills_nobody",
    "a cancelled job may be cancelled again": f"{GUARDS}::test_a_cancellation_does_not_undo_success",
    "the cell never freezes": f"{GUARDS}::test_most_nodes_vanishing_evicts_nobody",
    "the head of the queue is overtaken for ever": (
        f"{GUARDS}::test_the_head_of_the_queue_is_overtaken_only_so_often"
    ),
    "what the journal writes does not survive a power loss": DISK,
    "an order is acted on before the disk has it": DISK,
    "a node compares no tokens": "tests/unit/node_reporter/core/test_node_core.py",
    "the projector's position is committed by itself": "tests/faults/kills/test_projector_commit.py",
    "a message shows a URL's password": f"{SHOWN}::test_a_url_is_shown_without_its_password",
    "a dead letter shows what the record holds": (
        f"{SHOWN}::test_a_dead_letter_shows_where_the_record_is_and_what_is_wrong_with_it"
    ),
    "the gateway's certificate is not tried at the start": (
        "tests/integration/gateway/access/test_gateway_tls.py"
        "::test_a_certificate_that_every_client_would_refuse_is_refused_at_the_start"
    ),
}


@pytest.mark.postgres
def test_every_missing_guard_is_noticed(postgres_dsn: str, scale: int) -> None:
    """A developer simplifies a line that looked superfluous. The CI run breaks every ninth guard, `make
    faults` all of them."""
    assert len(NOTICED_BY) >= PROMISED
    assert set(NOTICED_BY) <= set(MUTANTS)
    broken = list(NOTICED_BY)[:: CI_STEP if scale == 1 else 1]
    tests = sorted({NOTICED_BY[name] for name in broken})
    wanted = [("", tests), *((name, [NOTICED_BY[name]]) for name in broken)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.mutate"],
        env={**env, "PENSTOCK_DSN": postgres_dsn},
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    status: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert status.pop("") == 0, f"the tests fail without any mutant:\n{done.stderr[-4_000:]}"
    print(f"\n{sum(code == TESTS_FAILED for code in status.values())} of {len(status)} mutants noticed")
    assert {name: code for name, code in status.items() if code != TESTS_FAILED} == {}
