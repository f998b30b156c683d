"""Safety rules of the event log, for the fault laboratory and for real processes: chain, causes, orders, dead
letters.

Judged by the log's bytes alone, with a chain rule and a bookkeeping that share no code with the product
(`ledger_book`). A judge gives every partition's records, dead letters first; each method raises `Violation`
and can go on afterwards.

Rules: `time` (the ledger's time never goes back), `law2` (each input exactly one record, in order), `letter`
(dead letters match records), `placement` (only what waits and is not held, whole gangs, on sound nodes),
`freeze` (no mass eviction), `outcome` (each job is submitted and ends once, with no task left), `estimate`
(one per job, and one for each attempt that follows on one which ran out of memory), `checkpoint` (starts and
fetches), `core` (what lives on a node shares no core), `group` (see `group_rules`), `prelaunch` (see
`prelaunch_rules`), `hold` (commands are obeyed, old ones not, and no job ends by waiting while it is held),
`attempt` (a task starts once), `order` (orders follow from valid records alone).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

import orjson

from penstock.log.port import Headers
from tests.faults.rules.checkpoint_rules import CHECKPOINT_ORDERS, CheckpointRules
from tests.faults.rules.findings import Fact, Placed, Violation, kind_of
from tests.faults.rules.group_rules import GroupRules
from tests.faults.rules.ledger_book import SEQ_BITS, Book, Node
from tests.faults.rules.move_rules import MoveRules
from tests.faults.rules.plan_rules import PlanRules
from tests.faults.rules.prelaunch_rules import PrelaunchRules
from tests.faults.rules.probe_rules import ProbeRules

FINAL_STOPS, UNSCHEDULABLE = ("cancelled", "completed", "run_timeout", "queue_timeout"), "unschedulable"
BY_WAITING = ("timed_out_queued", UNSCHEDULABLE)
PROBE_NODE, ANSWER_JOIN = b"penstock.order.probe_node.v1", b"penstock.order.answer_join.v1"
START_TASK, STOP_TASK = b"penstock.order.start_task.v1", b"penstock.order.stop_task.v1"
SET_CORES, SET_BANDWIDTH = b"penstock.order.set_cores.v1", b"penstock.order.set_bandwidth.v1"
LATE = b"order-("  # begins the id of an order that a run sends long after its placer would have
PLACER = b"/penstock/placer"
InputPlace = tuple[str, int]
"""(topic, offset)."""


T = TypeVar("T")
Key = tuple[str, int]
"""(task id, token of its start)."""


def _decided(changes: Mapping[Key, Mapping[int, T]], token: int, task_id: str) -> list[T]:
    """What the record of this token gave this task; at most one."""
    return [found[token] for (name, _), found in changes.items() if name == task_id and token in found]


def _united(one: Mapping[Key, dict[int, T]], other: Mapping[Key, dict[int, T]]) -> dict[Key, dict[int, T]]:
    return {key: one.get(key, {}) | other.get(key, {}) for key in (*one, *other)}


class LedgerRules:
    """One cell's log. `next_input(topic, offset)`: the first input at this offset or behind it, None without
    one."""

    def __init__(self, next_input: Callable[[str, int], int | None]) -> None:
        book = self.book = Book()
        self.placed: dict[tuple[int, str], Placed] = {}
        """(token, task id) → what follows from its placement."""
        self.ended: dict[str, str] = {}
        """Job id → outcome."""
        self.outcomes: Counter[str] = Counter()
        """Of records that answer inputs."""
        self.letters: Counter[InputPlace] = Counter()
        """Dead letters of the placer, by input."""
        self.injected: str | None = None
        """Name of an exception that policies of this run raise on purpose."""
        self.undecided = 0
        """Records of which such an exception cost a choice."""
        self.freezes = 0
        self._next_input = next_input
        self._answered: dict[str, int] = {}
        self._dead_lettered: dict[InputPlace, None] = {}
        self._lost_choices: dict[InputPlace, None] = {}
        self.submissions: dict[str, None] = {}
        self._estimates: dict[str, None] = {}
        self._started: dict[tuple[str, int], int] = {}
        """(task id, token) → token of the record that has its start."""
        self._stops: dict[tuple[int, str], None] = {}
        self.cores: dict[Key, dict[int, list[int]]] = {}
        """(task id, token of its start) → token of each change of its cores → cores."""
        self.caps: dict[Key, dict[int, int | None]] = {}
        """Likewise: percent of the memory bandwidth."""
        self.answered_adjustments: dict[tuple[str, int, str], None] = {}
        """(task id, token of the order, what)."""
        self._adjusting: dict[tuple[str, int], None] = {}
        """(task id, token) of orders to adjust that are in the log."""
        self._term_token = 0
        """Of the record with which this term began."""
        self._answers: dict[int, tuple[str, str, int, str]] = {}
        """Seq → (node, boot, incarnation, verdict) of the joining that it answers."""
        self.moves, self.groups, self.plans = MoveRules(book), GroupRules(book), PlanRules(book)
        self._early = PrelaunchRules(book)
        self._probes = ProbeRules(self.book)
        self.checkpoints = CheckpointRules(self.book)
        self._left: dict[str, int] = {}
        """Node → ledger time of its latest departure."""
        self._cause: Fact = {}

    def after(self, records: Iterable[bytes]) -> "LedgerRules":
        """The rules as they were when these were all records, of a ledger that has lost the others; what
        those decided may still be ordered, as no node can know of the loss yet."""
        found = LedgerRules(self._next_input)
        found.letters, found.injected = self.letters, self.injected
        for value in records:
            record = found.take(value)
            if record is not None:
                with suppress(Violation):
                    found.record(record)
                for entry in record["facts"]:
                    with suppress(Violation):
                        found.fact(kind_of(entry["type"]), entry["data"])
        found._dead_lettered |= self._dead_lettered
        found._lost_choices |= self._lost_choices
        found.placed = self.placed | found.placed
        found._stops = self._stops | found._stops
        found.cores = _united(self.cores, found.cores)
        found.caps = _united(self.caps, found.caps)
        found._adjusting |= self._adjusting
        found._answers = self._answers | found._answers
        found.checkpoints.include(self.checkpoints)
        found._probes.latest = self._probes.latest | found._probes.latest
        found.freezes = self.freezes
        return found

    # ------------------------------------------------------------------------------------- records

    def take(self, value: bytes) -> Fact | None:
        """One record of the ledger's partition, if it is valid. `record` and `fact` judge it then."""
        return self.book.take(value)

    def record(self, found: Fact) -> None:
        """Time and cause of the valid record that was just taken."""
        book, cause, at = self.book, found["cause"], f"seq {self.book.seq}"
        self._cause = found["facts"][0]["data"] if found["facts"] else {}
        last_ms, book.now_ms = book.now_ms, found["now_ms"]
        if "topic" in cause and cause["topic"] is not None:
            self._answer(cause["topic"], cause["offset"], found)
        if book.now_ms < last_ms:
            raise Violation("time", f"{at}: {book.now_ms} after {last_ms}")
        if found["outcome"] == "rejected" and found["facts"]:
            raise Violation("law2", f"{at} is rejected and has facts")
        self._failure(found, str(found.get("reason") or ""))

    def _failure(self, found: Fact, reason: str) -> None:
        """A bug is a finding; one that the run put into policies costs choices, and never the input's own
        fact."""
        undecided = reason.startswith("undecided: ")
        injected = undecided and self.injected is not None and self.injected in reason
        if reason.startswith("failed: ") or (undecided and not injected):
            raise Violation("crash", f"seq {self.book.seq}: {reason}")
        self.undecided += undecided
        if undecided and not found["facts"]:
            raise Violation("law2", f"seq {self.book.seq} is undecided, and its input is lost with it")

    def _answer(self, topic: str, offset: int, found: Fact) -> None:
        self.outcomes[found["outcome"]] += 1
        expected = self._next_input(topic, self.answered(topic))
        self._answered[topic] = offset + 1
        at = f"seq {self.book.seq}"
        if offset != expected:
            raise Violation("law2", f"{at} answers {topic}/{offset}; {expected} is the next to answer")
        if found["outcome"] == "dead_lettered":
            self._dead_lettered[topic, offset] = None
            if (topic, offset) not in self.letters:
                raise Violation("letter", f"{at}: the dead letter of {topic}/{offset} is not there")

    def answered(self, topic: str) -> int:
        """All inputs before this offset have their record."""
        return self._answered.get(topic, 0)

    def unanswered(self, topic: str) -> int | None:
        """The first input without a record."""
        return self._next_input(topic, self.answered(topic))

    def letter(self, value: bytes) -> None:
        """One dead letter; before the record that answers for its input."""
        letter = orjson.loads(value)
        if letter["service"] == "placer":
            place = letter["source_topic"], letter["source_offset"]
            self.letters[place] += 1
            if self.injected is not None and self.injected in letter["detail"]:
                self._lost_choices[place] = None

    def unexplained_letters(self) -> list[InputPlace]:
        """Dead letters of inputs that a valid record answered otherwise; at the end.

        A policy that raised for a record that became void need not raise again for the one that counts.
        """
        explained = self._dead_lettered | self._lost_choices
        return [place for place in self.letters if place not in explained]

    def order(self, headers: Headers, value: bytes) -> tuple[bytes, Fact] | None:
        """A node gets no order but what a valid record decided (LAW 4). Kind and order; None: it is not the
        placer's."""
        labels = dict(headers)
        if labels.get("ce_source") != PLACER:
            return None
        kind, order = labels["ce_type"], orjson.loads(value)
        if order["token"] >> SEQ_BITS < self.book.epoch:
            return kind, order  # of a history that was lost: nodes have to refuse it
        if (wrong := self.checkpoints.wrong_order(kind, order)) is not None:
            raise Violation("checkpoint", wrong)
        if kind in CHECKPOINT_ORDERS:
            return kind, order
        if kind == ANSWER_JOIN:
            joining = (order["node_id"], order["boot_id"], order["incarnation"], order["verdict"])
            if self._answers.get(order["token"]) != joining:
                raise Violation("order", f"{joining} is answered; seq {order['token']} did not decide that")
            return kind, order
        if kind == PROBE_NODE:
            if self._probes.latest.get(order["node_id"], (0, 0, 0))[0] < order["token"]:
                raise Violation(
                    "order", f"{order['node_id']} is probed; seq {order['token']} did not decide that"
                )
            return kind, order
        key = (order["token"], order["task_id"])
        if kind == START_TASK:
            own = self.placed.get(key)
            follows = own is not None and (own.place, own.place["node_id"], list(own.gpus)) == (
                order["place"],
                order["node_id"],
                order.get("gpu_uuids", []),
            )
        elif kind == SET_CORES:
            follows = order["cores"] in _decided(self.cores, *key)
        elif kind == SET_BANDWIDTH:
            follows = order["memory_bandwidth_percent"] in _decided(self.caps, *key)
        else:
            follows = kind == STOP_TASK and key in self._stops
        if not follows:
            name = kind.decode().split(".")[2]
            raise Violation("order", f"{name} of {key} is ordered that no valid record decided")
        if kind in (SET_CORES, SET_BANDWIDTH):
            self._adjusting[order["task_id"], order["token"]] = None
        if order["token"] > self._term_token or (kind == START_TASK and not labels["ce_id"].startswith(LATE)):
            self._after_adjustments(order, order["token"] if kind == START_TASK else self._term_token)
        return kind, order

    def _after_adjustments(self, order: Fact, up_to: int) -> None:
        """Before a placer orders anything by a decision of its own term, and before any start, a node has in
        its partition what was changed there until then and it has not answered: else it obeys in another
        order than was decided."""
        for (task_id, token), changes in self.cores.items():
            job, newest = self.book.job_of(task_id), max(changes)
            if job is None or job.token != token or task_id not in job.living or job.stop_reason is not None:
                continue
            waits = (task_id, newest, "cores") not in self.answered_adjustments and newest <= up_to
            here = job.places[task_id]["node_id"] == order["node_id"]
            runs = self._started.get((task_id, token), up_to + 1) <= up_to
            if waits and here and runs and (task_id, newest) not in self._adjusting:
                raise Violation("order", f"{order} comes before the change of {task_id}'s cores by {newest}")

    def token_in(self, epoch: int) -> int:
        """Of what this record decides for that epoch."""
        return epoch << SEQ_BITS | self.book.seq

    # --------------------------------------------------------------------------------------- facts

    def fact(self, kind: str, fact: Fact) -> None:
        """The next fact of the record, which is booked whatever is wrong with it."""
        try:
            for rule, wrong in (
                ("move", self.moves.wrong(kind, fact)),
                ("prelaunch", self._early.wrong(kind, fact)),
                ("group", self.groups.wrong(kind, fact)),
                ("plan", self.plans.wrong(kind, fact)),
                ("probe", self._probes.wrong(kind, fact)),
                ("checkpoint", self.checkpoints.wrong(kind, fact)),
            ):
                if wrong is not None:
                    raise Violation(rule, f"seq {self.book.seq}: {wrong}")
            before = BEFORE.get(kind)
            if before is not None:
                before(self, fact)
        finally:
            self.book.write(kind, fact)

    def _input_accepted(self, fact: Fact) -> None:
        """What was lost has no record, and its letters none."""
        topic = fact["topic"]
        self._answered[topic] = fact["offset"]
        for place in [place for place in self.letters if place[0] == topic]:
            if place not in self._dead_lettered:
                del self.letters[place]

    def _submission(self, fact: Fact) -> None:
        if fact["job_id"] in self.submissions:
            raise Violation("outcome", f"{fact['job_id']} is submitted twice")
        self.submissions[fact["job_id"]] = None

    def _estimate(self, fact: Fact) -> None:
        job, attempt = self.book.jobs.get(fact["job_id"]), fact.get("attempt", 0)
        asked = job is not None and (job.estimate_again or job.backs_off) and attempt == job.attempt + 1
        if attempt and not asked:
            raise Violation("estimate", f"{fact['job_id']} is estimated for attempt {attempt}, unasked")
        if not attempt and fact["job_id"] in self._estimates:
            raise Violation("estimate", f"{fact['job_id']} is estimated twice")
        self._estimates[fact["job_id"]] = None

    def _requeue(self, fact: Fact) -> None:
        if fact.get("estimate_again") and not self.book.jobs[fact["job_id"]].exhausted:
            raise Violation("estimate", f"{fact['job_id']} is estimated anew, and had enough memory")

    def _placement(self, fact: Fact) -> None:
        book, job_id = self.book, fact["job_id"]
        at = f"seq {book.seq}: {job_id}"
        faults = []
        for place in fact["tasks"]:
            node = book.nodes[place["node_id"]]
            gpus = tuple(node.uuid(slot) for slot in place["gpus"])
            self.placed[book.token, place["task_id"]] = Placed(
                job_id, place, gpus, node.spec["boot_id"], node.incarnation
            )
            faulted = [gpu for gpu in gpus if gpu in node.faulted or gpu not in node.present]
            if node.status != "ready" or node.cordoned or faulted:
                how = ", cordoned" if node.cordoned else ""
                faults.append(f"{place['node_id']} is {node.status}{how}, faulted {faulted}")
        job = book.jobs.get(job_id)
        if job is None or not job.waits or job.held:
            raise Violation("placement", f"{at} is not waiting, or is held")
        if book.frozen:
            raise Violation("freeze", f"{at} is placed while the cell is frozen")
        if fact["attempt"] != job.attempt + 1 or not job.whole(len(fact["tasks"])):
            raise Violation("placement", f"{at}: attempt {fact['attempt']} with {len(fact['tasks'])} tasks")
        if faults:
            raise Violation("placement", f"{at}: {'; '.join(faults)}")
        for place in fact["tasks"]:
            node, cores = book.nodes[place["node_id"]], set(place["cores"])
            before = node.followed(place, fact.get("after", ()))
            self._apart(place["task_id"], node, cores, book.members(fact.get("group", "")) | before)
            node.cores[place["task_id"]] = cores  # for the others of its gang

    def _cores(self, fact: Fact) -> None:
        book, task_id, cores = self.book, fact["task_id"], set(fact["cores"])
        at, job, node = f"seq {book.seq}: {task_id}", book.jobs[fact["job_id"]], book.nodes[fact["node_id"]]
        self.cores.setdefault((task_id, job.token), {})[book.token] = fact["cores"]
        if task_id not in job.living or fact["attempt"] != job.attempt:
            raise Violation("core", f"{at} gets cores and does not live")
        if job.stop_reason is not None:
            raise Violation("core", f"{at} gets cores and is to be stopped")
        if node.status != "ready" or book.frozen or not cores or max(cores) >= node.spec["cores"]:
            raise Violation(
                "core", f"{at} gets {cores} on {fact['node_id']}, {node.status}, frozen: {book.frozen}"
            )
        self._apart(task_id, node, cores, book.members(job.group))

    def _apart(self, task_id: str, node: Node, cores: set[int], free: set[str]) -> None:
        """What a task is given nobody else has. `free`: tasks that do not count."""
        for other, taken in node.cores.items():
            if other != task_id and taken & cores and other not in free:
                raise Violation("core", f"seq {self.book.seq}: {task_id} gets {cores}, {other} has {taken}")

    def _cap(self, fact: Fact) -> None:
        key = fact["task_id"], self.book.jobs[fact["job_id"]].token
        self.caps.setdefault(key, {})[self.book.token] = fact["memory_bandwidth_percent"]

    def _adjusted(self, fact: Fact) -> None:
        self.answered_adjustments[fact["task_id"], fact["order_token"], fact["what"]] = None

    def _term(self, fact: Fact) -> None:
        self._term_token = self.book.token

    def _ledger_accepted(self, fact: Fact) -> None:
        """What the lost records had changed is undone: each living task is to have again what this ledger
        gives it."""
        token = self.token_in(fact["epoch"])
        for job in self.book.jobs.values():
            for task_id in job.living:
                key = task_id, job.token
                self.cores.setdefault(key, {})[token] = job.places[task_id]["cores"]
                isolation = self.book.nodes[job.places[task_id]["node_id"]].spec.get("isolation") or {}
                if isolation.get("bandwidth", "none") != "none":
                    self.caps.setdefault(key, {})[token] = job.caps.get(task_id)

    def _start(self, fact: Fact) -> None:
        key = (fact["task_id"], fact["token"])
        if key in self._started:
            raise Violation("attempt", f"seq {self.book.seq}: {key} is reported started a second time")
        self._started[key] = self.book.token

    def _stop(self, fact: Fact) -> None:
        job, seq, token = self.book.jobs[fact["job_id"]], self.book.seq, self.book.token
        self._stops |= dict.fromkeys((token, task_id) for task_id in job.places)
        if job.stop_reason in FINAL_STOPS:
            raise Violation("outcome", f"seq {seq}: {fact['job_id']} is ending already; {fact['reason']}")

    def _join(self, fact: Fact) -> None:
        self._stops |= dict.fromkeys((self.book.token, task["task_id"]) for task in fact["tasks"])
        node = fact["node"]
        self._left.pop(node["node_id"], None)
        self._answers[self.book.token] = (
            node["node_id"],
            node["boot_id"],
            fact.get("incarnation", 0),
            "accepted",
        )

    def _join_refused(self, fact: Fact) -> None:
        known = self.book.nodes[fact["node_id"]]
        if fact["reason"] == "stale_join" and fact["incarnation"] > known.incarnation:
            raise Violation(
                "join", f"seq {self.book.seq}: {fact} is refused; the last was {known.incarnation}"
            )
        joining = (fact["node_id"], fact["boot_id"], fact["incarnation"], fact["reason"])
        self._answers[self.book.token] = joining

    def _departure(self, fact: Fact) -> None:
        self._left[fact["node_id"]] = self.book.now_ms

    def _lost(self, fact: Fact) -> None:
        certain = "node" in self._cause or self._cause.get("proof") == "fenced"
        if self.book.frozen and not certain:
            raise Violation("freeze", f"seq {self.book.seq}: {fact['task_id']} is given up in a frozen cell")

    def _node_lost(self, fact: Fact) -> None:
        """Departures that nobody made sure of: never of most nodes at once."""
        proof, seq = self._cause.get("proof"), self.book.seq
        if self.book.frozen and proof != "fenced":
            raise Violation("freeze", f"seq {seq}: {fact['node_id']} is given up in a frozen cell")
        if proof in (None, "fenced", "shutdown"):
            return
        since_ms = self.book.now_ms - self.book.settings["freeze_window_ms"]
        missing = [node_id for node_id, at_ms in self._left.items() if at_ms >= since_ms]
        of = len(missing) + sum(node_id not in self._left for node_id in self.book.nodes)
        if of > 1 and len(missing) > self.book.settings["freeze_fraction"] * of:
            raise Violation("freeze", f"seq {seq}: {len(missing)} of {of} nodes are given up")

    def _frozen(self, fact: Fact) -> None:
        self.freezes += 1

    def _end(self, fact: Fact) -> None:
        job_id, outcome = fact["job_id"], fact["outcome"]
        at, earlier = f"seq {self.book.seq}: {job_id} ended {outcome}", self.ended.get(job_id)
        self.ended[job_id] = outcome
        if earlier is not None:
            raise Violation("outcome", f"{at} after {earlier}")
        job = self.book.jobs[job_id]
        if job.living:
            raise Violation("outcome", f"{at}, but {list(job.living)} have not")
        if outcome == UNSCHEDULABLE and self.book.could_fit(job):
            raise Violation("outcome", f"{at}, but it fits the empty cell")
        if job.held and outcome in BY_WAITING:
            raise Violation("hold", f"{at}, while it is held")

    def _command(self, fact: Fact) -> None:
        job, after = self.book.jobs[fact["job_id"]], fact.get("after", 0)
        if 0 < after < job.commanded:
            what = f"sent as of seq {after}; the latest one is of seq {job.commanded}"
            raise Violation("hold", f"seq {self.book.seq}: {fact['job_id']} obeys a command that was {what}")


BEFORE: Mapping[str, Callable[[LedgerRules, Fact], None]] = MappingProxyType(
    {
        "penstock.input.accepted": LedgerRules._input_accepted,
        "penstock.job.submitted": LedgerRules._submission,
        "penstock.job.estimated": LedgerRules._estimate,
        "penstock.job.requeued": LedgerRules._requeue,
        "penstock.placement.decided": LedgerRules._placement,
        "penstock.task.started": LedgerRules._start,
        "penstock.stop.decided": LedgerRules._stop,
        "penstock.cores.decided": LedgerRules._cores,
        "penstock.bandwidth.decided": LedgerRules._cap,
        "penstock.task.adjusted": LedgerRules._adjusted,
        "penstock.term.started": LedgerRules._term,
        "penstock.ledger.accepted": LedgerRules._ledger_accepted,
        "penstock.node.joined": LedgerRules._join,
        "penstock.node.join_refused": LedgerRules._join_refused,
        "penstock.node.left": LedgerRules._departure,
        "penstock.task.lost": LedgerRules._lost,
        "penstock.node.lost": LedgerRules._node_lost,
        "penstock.cell.frozen": LedgerRules._frozen,
        "penstock.job.hold_requested": LedgerRules._command,
        "penstock.job.release_requested": LedgerRules._command,
        "penstock.job.ended": LedgerRules._end,
    }
)
