"""Promise 1: nothing is appended that its readers cannot decode, and a record that is there all the same is
repaired."""

from penstock.ledger.fold import evolve
from penstock.ledger.record import amendment
from penstock.model.nouns import types
from penstock.model.wire import nearest
from penstock.runtime.following.amended_log import AmendedLog, AmendedReader, Repairs
from penstock.scheduling.make_room.backfill import Reservation
from penstock_services.placer.core.plans import proposals
from penstock_services.placer.core.step import PlacerCore
from penstock_services.projector.shell import store
from tests.faults.promises.mutant import breaks

EXTREMES = ("tests/unit/model/test_legal_extremes.py",)
READERS = ("tests/unit/ledger/record/test_readers_at_extremes.py",)
AMENDMENTS = ("tests/unit/ledger/record/test_amendments.py",)
AMENDED = ("tests/unit/log/test_amended_log.py",)

breaks(
    "the writer proves no record readable",
    1,
    "A policy of tomorrow computes a time beyond all bounds; every reader stops at its record.",
    (PlacerCore.step, "                prove_readable(decision)\n", ""),
    judge="hostile",
    tests=EXTREMES,
)
breaks(
    "computed times have no largest value",
    1,
    "A job trains for 2^53 steps; the timer of its end is lost, and with it the choice.",
    (types.within_ms, "max(0, round(ms)) if ms < MAX_MS else MAX_MS", "max(0, round(min(ms, 1e18)))"),
    judge="extremes",
    tests=EXTREMES,
)
breaks(
    "computed times may be negative",
    1,
    "A time before the ledger's beginning is computed, and refused by every reader.",
    (types.within_ms, "max(0, round(ms))", "round(ms)"),
    tests=EXTREMES,
)
breaks(
    "the end of a reservation is computed by itself",
    1,
    "Small jobs pass a large one for days, beside a job that never ends.",
    (Reservation._first, "within_ms(end_s * 1_000)", "round(end_s * 1_000)"),
    judge="extremes",
    tests=EXTREMES,
)
breaks(
    "a plan leaves no room for the profile's own units",
    1,
    "A batch service fills its plan while the profile keeps a node: 513 units.",
    (proposals.adopt, "MAX_UNITS - len(own)", "MAX_UNITS"),
    tests=EXTREMES,
)
breaks(
    "tables do not hold numbers that events hold",
    1,
    "A node reports a process of 2^70 ms; the projector stops at its row.",
    (store._saturate, "if not -largest <= value <= largest:", "if value < -largest:"),
    tests=("tests/unit/projector/test_projector_hostile.py",),
)
breaks(
    "a record that cannot be decoded is folded in part",
    1,
    "A reader stops at a broken record, and its state is of no record any more.",
    (
        evolve.fold,
        "    facts = record.events(offset)\n    begin(state, record.seq, record.now_ms, record.term)\n",
        "    begin(state, record.seq, record.now_ms, record.term)\n    facts = record.events(offset)\n",
    ),
    judge="repairs",
    tests=AMENDMENTS,
)
breaks(
    "a reader tries an amendment that did not help again and again",
    1,
    "The first amendment was of no use; every reader restarts in a loop.",
    (Repairs.wait, "self._tried[found.offset] = record.offset + 1", "self._tried[found.offset] = 0"),
    judge="repairs",
    tests=AMENDED,
)
breaks(
    "amendments need no signature",
    1,
    "Who may write the topic rewrites the ledger's history.",
    (AmendedLog.read, "if self._signer is not None:", "if False:"),
    judge="repairs",
    seed=1,
    tests=AMENDED,
)
breaks(
    "an amendment fits any record",
    1,
    "An operator mistypes an offset, and a sound record is replaced.",
    (amendment.amend, "if digest(value) != amendment.sha256:", "if False:"),
    judge="repairs",
    tests=AMENDMENTS,
)
breaks(
    "the last amendment of a record counts",
    1,
    "Two readers, opened before and after a second amendment, hold different states.",
    (
        AmendedReader._amended,
        "for amendment in known.get((record.partition.index, record.offset), ()):",
        "for amendment in reversed(known.get((record.partition.index, record.offset), ())):",
    ),
    judge="repairs",
    tests=AMENDED,
)
breaks(
    "what is too large becomes the bound itself, where the bound is not legal",
    1,
    "`penstock repair` proposes an amendment that does not help.",
    (
        nearest._nearest,
        "bounds[bound] + step if isinstance(given, int)",
        "bounds[bound] if isinstance(given, int)",
    ),
    judge="repairs",
    tests=AMENDMENTS,
)
