"""Promise 7: groups harm nobody for long."""

from penstock.policies import gang_turns
from penstock.sdk.turns import Turn
from tests.faults.promises.mutant import breaks

TURNS = ("tests/unit/test_sdk_turns.py", "tests/unit/test_sdk_stuck_turns.py")

breaks(
    "a stuck holder is never given up",
    7,
    "A member hangs in its stage, and the others stand still.",
    (Turn._wait, "            if late:\n", "            if False:\n"),
    tests=TURNS,
)
breaks(
    "who has given up a holder takes no turn at all",
    7,
    "A forked child keeps the lock: exclusion among all others ends for ever.",
    (Turn._hold, "range(LANES if self._given_up else 1)", "range(1)"),
    tests=TURNS,
)
breaks(
    "two take their turns at once in two lanes",
    7,
    "Two members that have given up a third use the GPU together.",
    (Turn._hold, "        if self._holders():\n", "        if False:\n"),
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
    tests=TURNS,
)
breaks(
    "who is next in line and stopped is waited for",
    7,
    "A stopped process is next in line, and the turn stays free.",
    (Turn._wait, "free_for_long or not self._in_line(place)", "not self._in_line(place)"),
    tests=TURNS,
)
breaks(
    "missed turns are not counted",
    7,
    "Stages overlap for hours, and nobody is told.",
    (Turn._hold, "        self.missed += bool(self._given_up)\n", ""),
    tests=TURNS,
)
breaks(
    "who has given up a holder forgets so",
    7,
    "Each stage waits ten seconds for the stuck member again.",
    (Turn._wait, "                self._given_up |= late\n", "                self._given_up = late - late\n"),
    tests=TURNS,
)
breaks(
    "members take turns on different nodes",
    7,
    "Two gangs each hold one node's turn, and wait for the other's.",
    (gang_turns.why_no_turns, "if len(set(chiefs)) > 1:", "if False:"),
    tests=("tests/unit/policies/test_gang_turns.py", "tests/unit/test_groups.py"),
)
