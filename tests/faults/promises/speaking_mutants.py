"""Promise 4: who may say what about what."""

from penstock.ledger.fold import evolve_tasks
from penstock.model.wire import speakers
from penstock.runtime.keys.node_keys import PlacerKeys
from penstock_services.placer.core import guard
from penstock_services.placer.shell.identity import Identity
from tests.faults.promises.mutant import breaks

SPEAKERS = ("tests/unit/model/test_speakers.py",)
IDENTITY = ("tests/unit/placer/test_node_identity.py",)
CORE = ("tests/unit/placer/test_placer_core.py", "tests/unit/placer/test_placer_hostile.py")

breaks(
    "what no service sends is accepted",
    4,
    "A node reports that another node's job has a year of work left, and the job is preempted.",
    (Identity.forged, "if speaker is Speaker.NOBODY:", "if False:"),
    judge="senders",
    seed=1,
    tests=SPEAKERS,
)
breaks(
    "an operator's command needs no signature",
    4,
    "A node fences its neighbour.",
    (
        Identity.forged,
        "if self._gateways is None or by_gateway(self._gateways, read.headers, data):",
        "if True:",
    ),
    judge="senders",
    tests=IDENTITY,
)
breaks(
    "a node's reports need no signature",
    4,
    "Whoever may write the topic ends the tasks of any node.",
    (Identity.forged, "if not self._keys.proven(key, read.headers, data):", "if False:"),
    judge="senders",
    tests=SPEAKERS,
)
breaks(
    "a node may prove itself gone",
    4,
    "A node reports that it was fenced, and goes on with its tasks.",
    (
        speakers.speaker_of,
        'isinstance(event, external_events.NodeLeft) and event.proof != "shutdown"',
        "False",
    ),
    judge="senders",
    seed=1,
    tests=IDENTITY,
)
breaks(
    "progress may be reported by nodes",
    4,
    "The simulator's own report of work counts from any node.",
    (
        speakers.speaker_of,
        "return RULES[type(event)].speaker",
        "found = RULES[type(event)].speaker\n    return Speaker.NODE if found is Speaker.NOBODY else found",
    ),
    judge="senders",
    seed=1,
    tests=SPEAKERS,
)
breaks(
    "a node may speak of tasks on other nodes",
    4,
    "Node n2 ends a task of node n1, correctly signed.",
    (
        evolve_tasks.job_of_task,
        "    job_id = node.tasks.get(task_id) if node is not None else None\n",
        "    job_id = next((found.tasks[task_id] for found in state.nodes.values() if task_id in "
        "found.tasks), None)\n",
    ),
    judge="senders",
    seed=1,
    tests=SPEAKERS,
)
breaks(
    "a fault of an earlier joining counts",
    4,
    "A GPU that was repaired is faulted again by a record of yesterday.",
    (guard._gpu, 'return "stale_fault"', "pass"),
    judge="hostile",
    tests=CORE,
)
breaks(
    "a departure of an earlier joining counts",
    4,
    "A node that is back is gone again by a record of yesterday.",
    (guard._left, 'return "stale_leave"', "pass"),
    judge="hostile",
    tests=CORE,
)
breaks(
    "the time that is left is of any attempt",
    4,
    "An estimate of the attempt before decides who is preempted.",
    (guard._eta, 'return None if event.attempt == job.attempt else "stale_attempt"', "return None"),
    judge="hostile",
    seed=1,
    tests=CORE,
)
breaks(
    "two machines may have one name",
    4,
    "A second machine joins under the id of the first, whose tasks count as dead.",
    (guard._joined, "if node is not None and _other_machine(node, event.node):", "if False:"),
    judge="senders",
    seed=4,
    tests=IDENTITY + CORE,
)
breaks(
    "a tenant cancels the jobs of others",
    4,
    "Ada cancels Bert's job.",
    (guard._cancel, "if event.tenant not in (None, job.spec.owner):", "if False:"),
    judge="hostile",
    seed=1,
    tests=("tests/unit/ledger/fold/test_holds.py", *CORE),
)
breaks(
    "a GPU may be in two nodes",
    4,
    "A copied inventory offers one GPU twice.",
    (guard._ambiguous, 'return "gpu_of_another_node" if elsewhere else None', "return None"),
    judge="hostile",
    tests=CORE,
)
breaks(
    "a code of any placer proves a node",
    4,
    "A node's code for an earlier placer is taken for whatever it covers.",
    (
        PlacerKeys.proven,
        "if secret is not None and compare_digest(code, _code(secret, data)):",
        "if secret is not None:",
    ),
    judge="senders",
    tests=IDENTITY,
)
