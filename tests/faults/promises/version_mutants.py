"""Promises 8 and 9: upgrade and back; backup and restore."""

from penstock.backup import epochs, partitions, restore, take
from penstock.ledger.fold import evolve_jobs
from penstock.ledger.record import amendment
from penstock.ledger.replica import snapshot
from penstock.ledger.state import lease
from penstock.model.wire import codec, upcasters
from penstock_services.placer.core.members import silent_nodes
from penstock_services.placer.shell import history
from tests.faults.promises.mutant import breaks

LEASES = ("tests/unit/ledger/fold/test_leases.py",)
UPCASTERS = ("tests/replay/test_upcasters.py",)
LOST = ("tests/unit/ledger/record/test_lost_ledger.py",)
AMENDMENTS = ("tests/unit/ledger/record/test_amendments.py",)
BACKUP = ("tests/integration/backup/test_backup.py",)

breaks(
    "a record of a newer version is repaired away",
    8,
    "A service of yesterday meets a record of today, and an operator amends what it says away.",
    (amendment.propose, "if isinstance(cause, UnknownType | UnknownVersion):", "if False:"),
    tests=AMENDMENTS,
)
breaks(
    "an old event becomes what it meant no more",
    8,
    "A ledger of last year has findings with an empty reason, which revoked them.",
    (upcasters._found, "return event if event.reason else", "return event if True else"),
    tests=("tests/unit/model/test_old_versions.py",),
)
breaks(
    "a plan of the first version loses its kind",
    8,
    "A batch of an old ledger becomes one group.",
    (upcasters._plan_v1_to_v2, 'data.pop("kind") == "group"', 'data.pop("kind") != ""'),
    tests=("tests/unit/model/test_old_versions.py",),
)
breaks(
    "old versions are read in one step alone",
    8,
    "An event of two versions ago is refused.",
    (
        codec._old_version,
        "if (known, str(number)) == (base, version):",
        "if known == base and number + 1 == int(version):",
    ),
    tests=UPCASTERS,
)
breaks(
    "snapshots of any meaning are loaded",
    8,
    "After an upgrade a placer goes on from a state that the new fold does not reach.",
    (snapshot.format_id, "{FOLD_VERSION}-", ""),
    tests=("tests/unit/ledger/state/test_snapshot.py",),
)
breaks(
    "a node of an earlier version is probed",
    8,
    "A reporter that knows no probes does not answer, and its living tasks count as dead.",
    (silent_nodes.probe, "if node.leases and not node.leaving", "if not node.leaving"),
    judge="hostile",
    seed=3,
    tests=LEASES,
)
breaks(
    "tasks of a node of an earlier version have a lease",
    8,
    "The node never renews the lease, and the cell takes its tasks for dead.",
    (
        evolve_jobs.placement_decided,
        "state.settings.lease_ms if node.leases else 0",
        "state.settings.lease_ms",
    ),
    judge="hostile",
    seed=3,
    tests=LEASES,
)
breaks(
    "an epoch begins twice",
    9,
    "Two restorations of one copy give out the same tokens.",
    (epochs.choose, "epoch = known + 1 if wanted is None", "epoch = max(1, known) if wanted is None"),
    (epochs.choose, "if not known < epoch <= MAX_EPOCH", "if not epoch <= MAX_EPOCH"),
    judge="copies",
    tests=BACKUP,
)
breaks(
    "used epochs are not registered",
    9,
    "An older copy begins the epoch that a newer one has used.",
    (epochs.enter, "if known.get(cell, -1) >= epoch:", "if True:"),
    judge="copies",
    tests=BACKUP,
)
breaks(
    "the inputs' ends are read before the ledger's",
    9,
    "A copied ledger answers an input that the copy does not have.",
    (
        take._spans,
        "    ends = await log.end_offsets(places[:1])\n    ends |= await log.end_offsets(places[1:])\n",
        "    ends = await log.end_offsets(places[1:])\n    ends |= await log.end_offsets(places[:1])\n",
    ),
    judge="copies",
    tests=BACKUP,
)
breaks(
    "a damaged copy is restored",
    9,
    "One byte of a segment has changed on the disk.",
    (restore.restore, "    await check_digests(copy, manifest)\n", ""),
    judge="copies",
    seed=16,
    tests=BACKUP,
)
breaks(
    "a copy whose chain is broken verifies",
    9,
    "A copy that lacks records is found sound, until it is needed.",
    (partitions.check_chain, "if part.first == 0 and follower.head", "if False and follower.head"),
    judge="copies",
    tests=BACKUP,
)
breaks(
    "records come back at other offsets",
    9,
    "The ledger names inputs by offsets that they do not have any more.",
    (partitions._batches, 'messages += [Message(place, b"")] * (record.offset - at)', "messages += []"),
    tests=("tests/unit/backup/test_copies.py",),
)
breaks(
    "nodes of before a restoration are proven dead",
    9,
    "A restored ledger knows nothing of what a node runs, and frees the node's GPUs.",
    (lease.lease_of, "or node.epoch != state.epoch", ""),
    tests=LOST,
)
breaks(
    "a lost ledger is noticed in its own epoch alone",
    9,
    "A placer that has read more than the ledger holds goes on, and gives out tokens twice.",
    (history.check_ledger, "if found != one.head.id:", "if found is not None and found != one.head.id:"),
    tests=LOST,
)
