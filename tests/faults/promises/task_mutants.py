"""What all promises rest on: attempts end, leases fence, checkpoints are whose they say."""

from penstock.ledger.fold import evolve_jobs
from penstock_services.node_reporter.shell.checkpoints import checkpoint_bundle
from penstock_services.node_reporter.shell.checkpoints.checkpoint_fetch import CheckpointFetcher
from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import CheckpointServer
from penstock_services.node_reporter.shell.watchdogs.lease import Lease
from penstock_services.placer.core.waiting.retries import Attempts
from tests.faults.promises.mutant import breaks

CORE = ("tests/unit/placer/test_placer_core.py",)
BETWEEN = ("tests/integration/node_reporter/checkpoints/test_checkpoints_between_nodes.py",)
BUNDLE = ("tests/unit/node_reporter/checkpoints/test_checkpoint_bundle.py",)
LEASES = ("tests/unit/ledger/fold/test_leases.py",)

breaks(
    "losses never end a job",
    9,
    "Every node refuses a job, and the job is tried until the end of time.",
    (Attempts._failed, "if cause in LOST and job.retries.losses < MAX_LOSSES:", "if cause in LOST:"),
    judge="hostile",
    tests=CORE,
)
breaks(
    "losses are not counted",
    9,
    "A job is lost to its nodes for the hundredth time.",
    (evolve_jobs._retried, "        losses=before.losses + (fact.reason in LOSSES),\n", ""),
    judge="hostile",
    tests=CORE,
)
breaks(
    "tasks begin after the lease",
    9,
    "A node was cut off beyond its lease; what had waited there begins all the same.",
    (Lease.give_up, "if not self.holds(task.order)]", "if False]"),
    judge="leases",
    tests=LEASES,
)
breaks(
    "a lease that has run out is renewed",
    9,
    "The log is back after the lease: tasks that count as dead go on.",
    (Lease._renew, "        if self.lapsed():", "        if False:"),
    judge="leases",
    seed=73,
    tests=LEASES,
)
breaks(
    "contact is the time of the answer",
    9,
    "A query takes half a lease; the node believes to have been in contact all the time.",
    (Lease._renew, "self._contact_s = asked_s", "self._contact_s = boot_s()"),
    (Lease._renew, "self._host.renew(asked_s,", "self._host.renew(boot_s(),"),
    judge="leases",
    tests=LEASES,
)
breaks(
    "the orders up to the query need not be read",
    9,
    "A probe lies in the log, and the node renews its lease without having answered.",
    (
        Lease._renew,
        "while self._position < end or not self._joined.is_set():",
        "while not self._joined.is_set():",
    ),
    judge="leases",
    tests=LEASES,
)
breaks(
    "a checkpoint's signature is not verified",
    9,
    "Whoever answers at a node's address gives a job another job's weights.",
    (
        CheckpointFetcher._stored,
        "if not signed_by(place.source.public_key, received.signature, signed):",
        "if False:",
    ),
    judge="handovers",
    tests=BETWEEN,
)
breaks(
    "an older checkpoint is as good as the one that was named",
    9,
    "A node sends the checkpoint before, and an hour of work is lost.",
    (
        CheckpointFetcher._stored,
        'if not age(order.checkpoint or "") <= age(name) < (order.attempt,):',
        "if False:",
    ),
    judge="handovers",
    tests=BETWEEN,
)
breaks(
    "what came is not compared with its digests",
    9,
    "A byte changes on the way, and training goes on with it.",
    (checkpoint_bundle.unpack, "if expected != writing.found:", "if False:"),
    judge="handovers",
    tests=BUNDLE,
)
breaks(
    "a checkpoint is given to whoever asks",
    9,
    "A node that the ledger has not named reads another tenant's weights.",
    (
        CheckpointServer._asked,
        "if scheme != SCHEME.encode() or not signed_by(order.public_key, proof, asks(self._node_id, query)):",
        "if scheme != SCHEME.encode():",
    ),
    judge="handovers",
    tests=BETWEEN,
)
breaks(
    "a checkpoint is given under any token",
    9,
    "A node asks with the order of an attempt that has ended.",
    (
        CheckpointServer._asked,
        'if order is None or fields.get("token") != str(order.token):',
        "if order is None:",
    ),
    judge="handovers",
    tests=BETWEEN,
)
