"""Promises 5 to 7: a fresh decider decides the same; slots are not indexes; groups harm nobody for long."""

from penstock.ledger.fold import evolve_nodes
from penstock.ledger.state.node.node_state import NodeState
from penstock.scheduling.groups import gang_turns
from penstock.scheduling.make_room.backfill import Reservation
from penstock.scheduling.order.genie import Genie
from penstock.scheduling.order.job_rows import JobRows
from penstock.sdk.sharing.turns import Turn
from penstock_services.placer.core import orders
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.members.membership import Membership
from penstock_services.placer.core.still_waiting import StillWaiting
from tests.faults.promises.mutant import breaks

FRESH = ("tests/unit/placer/test_fresh_decider.py",)
SLOTS = ("tests/unit/ledger/state/test_slots.py",)
TURNS = ("tests/unit/sdk/turns/test_sdk_turns.py", "tests/unit/sdk/turns/test_sdk_stuck_turns.py")

breaks(
    "shapes are offered as they first were",
    5,
    "A GPU has a fault; GENIE still offers the shape that needs the GPU, until its placer restarts.",
    (Genie._see_capacity, "            self._offers.clear()\n", ""),
    judge="hostile",
    seed=2,
    tests=FRESH,
    profile="genie",
)
breaks(
    "how many nodes could hold a shape is counted once",
    5,
    "A node is cordoned, and GENIE counts on the node.",
    (Genie._see_capacity, "            self._could_hold.clear()\n", ""),
    judge="hostile",
    seed=2,
    tests=FRESH,
    profile="genie",
)
breaks(
    "shapes do not follow faults, silence and cordons",
    5,
    "The live placer and one restored from its snapshot choose differently.",
    (
        Genie._see_capacity,
        "(state.capacity_version, state.sound_version)",
        "(state.capacity_version, 0)",
    ),
    tests=FRESH,
)
breaks(
    "a unit that waits is never looked at again",
    5,
    "A node becomes free, and the unit that waited for the node waits on.",
    (
        StillWaiting._changed_nodes,
        "return {node_id for node_id, version in self._node_versions.items() if before.get(node_id) != "
        "version}",
        "return set()",
    ),
    tests=("tests/unit/ledger/fold/test_waits_end.py",),
)
breaks(
    "the queue is swept once",
    5,
    "A node leaves for good, and a job that needs it waits for ever.",
    (Membership.sweep_queue, "if self._swept == state.capacity_version:", "if self._swept >= 0:"),
    judge="hostile",
    tests=FRESH,
    profile="srtf",
)
breaks(
    "what is reserved at a time is computed once",
    5,
    "Jobs have started since; the reservation counts with the cell of an hour ago.",
    (
        Reservation._then,
        "made_for = state.change_log.count, state.progress_log.count, unit",
        "made_for = 0, 0, unit",
    ),
    tests=(
        "tests/unit/scheduling/test_penstock.py",
        f"{FRESH[0]}::test_a_fresh_decider_decides_the_same[penstock]",
    ),
)
breaks(
    "rows of jobs miss those that leave the queue",
    5,
    "A job is held; the index of waiting jobs still has the job.",
    (
        JobRows._update,
        "            if job.in_line:\n",
        "            if job.in_line or job.held is not None:\n",
    ),
    judge="hostile",
    seed=16,
    tests=FRESH,
)
breaks(
    "random numbers go on from input to input",
    5,
    "A placer that restarts draws others than the one that lived on.",
    (
        Decider.decide,
        "        self._rng.seed(event_id)\n",
        "        self._rng.used or self._rng.seed(event_id)\n",
    ),
    judge="random",
    tests=FRESH,
    profile="random",
)
breaks(
    "a GPU's slot is its index",
    6,
    "A GPU was removed; a fault of the next one is marked at another.",
    (
        NodeState.slot_of,
        "uuids = self.gpu_uuids",
        "uuids = tuple(gpu.uuid for gpu in self.spec.gpus)",
    ),
    tests=SLOTS,
)
breaks(
    "a slot's model is that of the inventory's entry",
    6,
    "`node.spec.gpus[gpu]` raises after a GPU was removed.",
    (
        NodeState.gpu_model,
        '        return next((gpu.model for gpu in self.spec.gpus if gpu.uuid == uuid), "")\n',
        "        return self.spec.gpus[slot].model\n",
    ),
    tests=SLOTS,
)
breaks(
    "removed GPUs count as present",
    6,
    "A GPU is taken out, and a job is placed on its slot.",
    (NodeState.__dict__["present_gpu_mask"], "if not self.slots:", "if True:"),
    judge="hostile",
    tests=SLOTS,
)
breaks(
    "orders name the inventory's GPUs",
    6,
    "After a GPU was removed a task starts on its neighbour's GPU.",
    (
        orders._start,
        "uuids = node.gpu_uuids if place.gpus else ()",
        "uuids = tuple(gpu.uuid for gpu in node.spec.gpus) * 4",
    ),
    judge="hostile",
    tests=SLOTS,
)
breaks(
    "a new GPU takes the slot of one that is held",
    6,
    "A GPU is exchanged under a running job; two jobs hold one slot.",
    (
        evolve_nodes.bound_slots,
        "uuid if slot in held or uuid in present else",
        "uuid if uuid in present else",
    ),
    judge="hostile",
    tests=SLOTS,
)
breaks(
    "a stuck holder is never given up",
    7,
    "A member hangs in its stage, and the others stand still.",
    (Turn._wait, "            if late:\n", "            if False:\n"),
    judge="members",
    tests=TURNS,
)
breaks(
    "who has given up a holder takes no turn at all",
    7,
    "A forked child keeps the lock: exclusion among all others ends for ever.",
    (Turn._hold, "range(LANES if self._given_up else 1)", "range(1)"),
    judge="members",
    tests=TURNS,
)
breaks(
    "two take their turns at once in two lanes",
    7,
    "Two members that have given up a third use the GPU together.",
    (Turn._hold, "        if self._holders():\n", "        if False:\n"),
    judge="members",
    tests=TURNS,
)
breaks(
    "holders of other lanes are not seen",
    7,
    "A member that waits for the stuck one meets those who do not.",
    (
        Turn._holders,
        "{lane: self._test(HELD + lane * LANE, 1) for lane in range(LANES)}",
        "{lane: self._test(HELD + lane * LANE, 1) for lane in range(1)}",
    ),
    judge="members",
    tests=TURNS,
)
breaks(
    "who is next in line and stopped is waited for",
    7,
    "A stopped process is next in line, and the turn stays free.",
    (Turn._wait, "free_for_long = now_s - free_s >= PATIENCE_S", "free_for_long = False"),
    judge="members",
    tests=TURNS,
)
breaks(
    "missed turns are not counted",
    7,
    "Stages overlap for hours, and nobody is told.",
    (Turn._hold, "        self.missed += bool(self._given_up)\n", ""),
    judge="members",
    tests=TURNS,
)
breaks(
    "who has given up a holder forgets so",
    7,
    "Each stage waits ten seconds for the stuck member again.",
    (
        Turn._wait,
        "                self._given_up |= late\n",
        "                self._given_up = late - late\n",
    ),
    judge="members",
    tests=TURNS,
)
breaks(
    "members take turns on different nodes",
    7,
    "Two gangs each hold one node's turn, and wait for the other's.",
    (gang_turns.why_no_turns, "if len(set(chiefs)) > 1:", "if False:"),
    tests=("tests/unit/scheduling/groups/test_gang_turns.py",),
)
