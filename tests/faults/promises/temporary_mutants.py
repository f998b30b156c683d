"""Promise 3: everything temporary ends, however its service dies."""

from penstock.ledger.fold import evolve_adjustments, evolve_jobs
from penstock.ledger.state import lease as ledger_lease
from penstock.proposals import validate_adjustments
from penstock.scheduling.acting import guard
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.placer.core.members import silent_nodes
from penstock_services.placer.core.plans import adjustments
from tests.faults.promises.mutant import breaks

TEMPORARY = ("tests/unit/ledger/fold/test_temporary.py",)
GUARD = ("tests/unit/contention_guard/test_contention.py",)
LEASES = ("tests/unit/ledger/fold/test_leases.py",)
WAITS_END = ("tests/unit/ledger/fold/test_waits_end.py",)

breaks(
    "a throttle has no end",
    3,
    "The guard's machine burns down; a job runs at a tenth of its speed for 60 days.",
    (adjustments.decided, "if changed and _lasts(job):", "if False:"),
    judge="hostile",
    seed=1,
    tests=TEMPORARY,
)
breaks(
    "what could not be given back is not tried again",
    3,
    "A node is silent when a throttle ends; afterwards nobody remembers the throttle.",
    (
        adjustments.expired,
        '    if _lasts(job):\n        yield timer(state, job.job_id, "adjustment", ADJUSTED_FOR_MS, '
        "job.attempt)\n",
        "",
    ),
    judge="hostile",
    seed=22,
    tests=TEMPORARY,
)
breaks(
    "throttles of older ledgers get no end",
    3,
    "A ledger of last month has a throttle without a timer; nodes join, and nothing changes.",
    (adjustments.without_end, "if _lasts(job) and", "if False and"),
    tests=TEMPORARY,
)
breaks(
    "caps of memory bandwidth stay",
    3,
    "The cores come back after a throttle, the memory bandwidth does not.",
    (adjustments.expired, "        if _capped(task):\n", "        if False:\n"),
    judge="hostile",
    tests=TEMPORARY,
)
breaks(
    "cores that a throttle took stay away",
    3,
    "The memory bandwidth comes back after a throttle, the cores do not.",
    (adjustments._own_cores, "return max(used, task.cores.throttled_from)", "return used"),
    judge="hostile",
    seed=1,
    tests=TEMPORARY,
)
breaks(
    "cores on loan stay on loan",
    3,
    "A guard that has died lent a training three cores for a probe.",
    (
        adjustments._own_cores,
        "return used if task.cores.settled or not task.cores.placed else task.cores.placed",
        "return used",
    ),
    judge="hostile",
    seed=1,
    tests=TEMPORARY,
)
breaks(
    "cores that come back are offered to nobody",
    3,
    "A loan ends beside a waiting job.",
    (adjustments.expired, "    if freed:\n        yield continuation(state)\n", ""),
    tests=WAITS_END,
)
breaks(
    "throttles by cores are not counted",
    3,
    "A guard that errs slows a job down to one core.",
    (evolve_adjustments._count_cores, "        _throttled(job, after < before)\n", ""),
    tests=WAITS_END,
)
breaks(
    "throttles by bandwidth are not counted",
    3,
    "A guard that errs caps a job again and again.",
    (evolve_adjustments.bandwidth_decided, "_throttled(state.jobs[fact.job_id], 1)", "pass"),
    judge="hostile",
    seed=1,
    tests=WAITS_END,
)
breaks(
    "a service's throttle counts as an operator's word",
    3,
    "What a guard has set stays for ever, as if a person had set it.",
    (guard.set_by_operator, 'adjustment.by not in ("", PROPOSER)', 'adjustment.by != ""'),
    judge="hostile",
    seed=1,
    tests=TEMPORARY,
)
breaks(
    "an operator's word ends",
    3,
    "A person caps a job, and fifteen minutes later the cap is gone.",
    (guard.set_by_operator, 'adjustment.by not in ("", PROPOSER)', "False"),
    judge="hostile",
    tests=TEMPORARY,
)
breaks(
    "a throttle that is renewed is counted again",
    3,
    "After an hour of contention a job may be slowed no more.",
    (validate_adjustments._adjusted_enough, "if renews(found, proposal):", "if False:"),
    judge="hostile",
    seed=1,
    tests=TEMPORARY,
)
breaks(
    "a guard that lives forgets to renew",
    3,
    "A training is slowed each quarter of an hour, until the guard notices anew.",
    (ContentionGuard._renews_at, "heapq.heappush(self._timers,", "heapq.heappush([],"),
    tests=TEMPORARY,
)
breaks(
    "a silent node is never proven dead",
    3,
    "A machine burns down at night; its jobs wait for an operator.",
    (
        silent_nodes.due,
        "if due_ms is not None and state.now_ms >= due_ms and",
        "if False and due_ms is not None and",
    ),
    judge="hostile",
    tests=LEASES,
)
breaks(
    "a silent node is proven dead at once",
    3,
    "A switch restarts, and tasks that live are placed a second time.",
    (ledger_lease.proven_ms, "return doubt.sent_ms + wait_ms(lease_ms)", "return doubt.sent_ms"),
    judge="hostile",
    tests=LEASES,
)
breaks(
    "the end of a throttle outlives its attempt",
    3,
    "A job's next attempt is given back what was never taken from it.",
    (
        evolve_jobs.job_requeued,
        "drop_timers(state, job.job_id, *ATTEMPT_TIMERS)",
        "drop_timers(state, job.job_id, *ATTEMPT_TIMERS[:-1])",
    ),
    tests=WAITS_END,
)
