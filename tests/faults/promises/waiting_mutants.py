"""Promise 2: a runnable job never waits beside free resources."""

from penstock.cluster import capacity
from penstock.scheduling import liveness
from penstock.scheduling.make_room.backfill import Reservation
from penstock_services.placer.core import step
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.members.membership import Membership
from penstock_services.placer.core.plans import plans
from penstock_services.placer.core.waiting import window
from penstock_services.placer.core.waiting.behind import Behind
from penstock_services.placer.core.waiting.pass_reservation import PassReservation
from penstock_services.placer.core.waiting.placing import Placing
from penstock_services.placer.core.waiting.reclaiming import Reclaiming
from penstock_services.placer.core.waiting.retries import Attempts
from tests.faults.promises.mutant import breaks

BY_HAND = (
    "a_job_that_got_its_nodes_starts_though_many_come_before_it",
    "a_small_job_uses_the_node_that_is_reserved_for_it_while_a_large_one_waits",
    "a_job_behind_the_window_starts_where_it_delays_nobody",
    "a_stalled_cell_is_seen_and_its_cause_is_named",
    "a_gang_whose_servers_fit_beside_no_worker_is_told_at_once",
)
LIVENESS = tuple(f"tests/unit/scheduling/test_liveness.py::test_{name}" for name in BY_HAND)
CORE = ("tests/unit/placer/test_placer_core.py",)
WAITS_END = ("tests/unit/ledger/fold/test_waits_end.py",)

breaks(
    "a reclaim reservation never ends",
    2,
    "Nodes stay reserved for a job for which nothing is awaited any more.",
    (Reclaiming._vain, "return not any(leaving_there)", "return False"),
    tests=LIVENESS,
)
breaks(
    "a backfill reservation never ends",
    2,
    "The job that nodes were reserved for has gone, and the nodes stay idle.",
    (
        PassReservation.done,
        "if self._stage is not None and self._unit is None and _reserved(state):",
        "if False:",
    ),
    tests=("tests/unit/scheduling/make_room/test_reservations.py",),
)
breaks(
    "a reservation outlives the time for which it was made",
    2,
    "The job that was to end has not; the nodes are kept as if it would end any moment.",
    (Reservation.unit, "if unit.expected_ms is not None and unit.expected_ms > state.now_ms:", "if True:"),
    tests=("tests/unit/scheduling/make_room/test_reservations.py",),
)
breaks(
    "nodes out of use stay reserved",
    2,
    "A reserved node is cordoned; its job waits for it, beside others that are free.",
    (Reclaiming._vain, "if any(node is None or not node.placeable for node in nodes):", "if False:"),
    tests=LIVENESS,
)
breaks(
    "a bounded pass does not reach the owners of reservations",
    2,
    "64 jobs of higher priority come while capacity is reclaimed for a job: the job is never tried.",
    (Reclaiming.due, "if self._stage is None:", "if True:"),
    tests=LIVENESS,
)
breaks(
    "a full record is not continued",
    2,
    "A large node joins: 32 jobs start, and the others wait for the next event.",
    (
        Placing.facts,
        "self.full = True\n                    yield continuation(state)\n",
        "self.full = True\n",
    ),
    tests=WAITS_END,
)
breaks(
    "a plan with many stops is not continued",
    2,
    "An urgent job stops 33 others, and is not started when these have ended.",
    (
        plans.carry_out_plan,
        "if len(plan.stops) > MAX_STOPPED:\n        yield continuation(state)\n",
        "if len(plan.stops) > MAX_STOPPED:\n",
    ),
    tests=WAITS_END,
)
breaks(
    "nobody behind the window is looked for",
    2,
    "64 jobs wait for one GPU model; a job for the other one waits behind them.",
    (Decider._place_waiting, "if placing.leaves_others():", "if False:"),
    judge="hostile",
    tests=LIVENESS,
    profile="fifo",
    jobs=150,
)
breaks(
    "starts behind the window are not continued",
    2,
    "33 jobs delay nobody; the last one waits on.",
    (Behind.start, "        if placed:\n            yield continuation(state)\n", ""),
    tests=LIVENESS,
)
breaks(
    "a preempting profile leaves those behind its plan",
    2,
    "The plan has no place for a job that fits beside it.",
    (
        Decider._reschedule,
        "if not (state.planned or state.stopping or state.frozen):",
        "if False:",
    ),
    tests=LIVENESS,
)
breaks(
    "the alarm sees no stall",
    2,
    "A placer passes a job over, and nobody is told.",
    (liveness.stalled, "if found is None:", "if found is not None or found is None:"),
    judge="hostile",
    seed=1,
    tests=LIVENESS,
)
breaks(
    "the alarm rings while a pass is under way",
    2,
    "An operator restarts a placer that was about to place the job.",
    (liveness.stalled, 'if timer_id("cell", "place_more") in state.timers:', "if False:"),
    judge="hostile",
    seed=3,
    tests=LIVENESS,
)
breaks(
    "the alarm names a job that could never start there",
    2,
    "Where other jobs wait for the same nodes, the alarm rings for ever.",
    (
        liveness.Undelaying.first,
        "ClusterView(state).fit(job.demand, wanted.nodes)",
        "ClusterView(state).fit(job.demand, 0)",
    ),
    tests=WAITS_END,
)
breaks(
    "a gang with servers that fits nowhere waits",
    2,
    "Its workers and servers fit alone, together in no arrangement: nobody tells its user.",
    (
        capacity._together,
        "if arranged(tables, demand.workers, demand.parameter_servers) is None:",
        "if False:",
    ),
    tests=LIVENESS,
)
breaks(
    "each node counts for one task of a gang",
    2,
    "A gang that fits the empty cell is told that it never will.",
    (capacity._capacity, "fits += each * (nodes", "fits += (nodes"),
    judge="hostile",
    tests=CORE,
)
breaks(
    "a joining node does not call back those who never fitted",
    2,
    "A larger node is bought for a job, and the job is ended all the same.",
    (
        Membership.joined,
        "        yield from self.thaw(state)\n        yield from self.reconsider(state)\n",
        "        yield from self.thaw(state)\n",
    ),
    judge="hostile",
    seed=2,
    tests=CORE,
)
breaks(
    "who can never run is never ended",
    2,
    "A job that fits no node stays, and no time ends its wait.",
    (Attempts.park, '        yield timer(state, job.job_id, "unschedulable", self._grace_ms)\n', ""),
    judge="hostile",
    tests=CORE,
)
breaks(
    "who waited behind a cancelled head waits on",
    2,
    "The head of the queue is cancelled; nobody is tried.",
    (Decider._cancel, "if matters:", "if False:"),
    tests=WAITS_END,
)
breaks(
    "a target that is lost frees nothing",
    2,
    "A node of a waiting plan is cordoned; what was reserved beside it stays.",
    (Decider._target_lost, "        if given_up:\n", "        if False:\n"),
    tests=("tests/unit/scheduling/acting/test_moves.py", "tests/unit/ledger/groups/test_waiting_groups.py"),
)
breaks(
    "a window for plans never ends",
    2,
    "The batcher has died: all jobs wait for its plan.",
    (window._opened, '    yield timer(state, "cell", "batch_window", settings.batch_window_ms)\n', ""),
    judge="hostile",
    seed=2,
    tests=("tests/unit/scheduling/test_batch_window.py",),
)
breaks(
    "after a plan was answered nobody is tried",
    2,
    "The batcher's plan was refused, and its jobs wait for the next event.",
    (
        Decider._plan_proposed,
        'yield BatchWindowClosed(reason="answered")\n            yield continuation(state)\n',
        'yield BatchWindowClosed(reason="answered")\n',
    ),
    tests=("tests/unit/scheduling/test_batch_window.py",),
)
breaks(
    "a choice that failed is not tried again",
    2,
    "A policy fails once, in a cell in which nothing else happens.",
    (step.PlacerCore._undecided, "if requested is None or requested.at_ms > again_ms:", "if False:"),
    tests=("tests/faults/guards/test_policy_failures.py",),
)
