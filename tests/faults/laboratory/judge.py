"""The judge: sees the bytes of the log and what machines really do, and believes no service.

Its reading of the chain and of the ledger's facts is its own (`ledger_book`), GPUs are told apart by UUID, processes
and faults are as the machines had them. Only the rules `check`, `fold` and `replay` ask the product's code, since they
compare it with itself.

Rules: `law2` (each input exactly one record), `time` (the ledger's time never goes back), `placement` (only on what is
there and sound, whole gangs, when nothing of the job lives), `proof` (nothing is freed while it lives), `freeze` (no mass
eviction), `outcome` (each job ends once, and rightly), `estimate` (one per job), `order` (orders and processes follow from
valid records alone), `gpu` (a GPU is not overcommitted), `attempt` (one attempt of a job at a time, no task twice),
`token` (tokens on a GPU never go back), `durable` (a task's token is on the disk before it starts), `signal` (nobody is stopped unasked), `stop` (who is to be stopped gets a signal), `report` (a node reports only what
happened), `commit` (on a conditional log no decision of a placer is void), `letter` (dead letters match records), `check`, `fold`, `replay`, `crash`, `liveness`, `rest`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from penstock.ledger.check import check
from penstock.ledger.replica import Replica
from penstock.log.port import Partition, Record
from penstock.model.topics import Topic
from penstock.model.types import WHOLE_GPU
from penstock_services.node_reporter.shell.ports import Key
from penstock_services.placer.core.decide import MAX_LOSSES
from tests.faults.laboratory.jobs import CANCELLED, FAILED, SUCCEEDED, UNSCHEDULABLE
from tests.faults.laboratory.ledger_book import TERM_STARTED, Book
from tests.faults.laboratory.log import Broker
from tests.faults.laboratory.machine import Machine, Program, TaskProcess
from tests.faults.laboratory.world import Violation, World

FINAL_STOPS = ("cancelled", "completed", "run_timeout")
START_TASK, STOP_TASK = b"penstock.order.start_task.v1", b"penstock.order.stop_task.v1"
REPORTER, PLACER = b"/penstock/node-reporter/", b"/penstock/placer"
Fact = dict[str, Any]


class Placed(NamedTuple):
    """What a valid record decided for one task, and the joining of its node at that time."""

    job_id: str
    place: Fact
    boot_id: str
    incarnation: int


class Judge:
    """`machines` and `programs` are what really is; both are filled by the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker: Broker
        self.book = Book()
        self.replica = Replica()
        """The product's fold of the same records, for the rules that ask it, and for who chooses faults."""
        self.machines: dict[str, Machine] = {}
        self.programs: dict[str, Program] = {}
        self.submitted: dict[str, None] = {}
        """Jobs whose submission is in the log."""
        self.ended: dict[str, str] = {}
        self.freezes = 0
        self.placed: dict[tuple[int, str], Placed] = {}
        """(token, task id) → what follows from its placement."""
        self.ordered: dict[tuple[int, str], None] = {}
        """Of them, those whose order is in the log."""
        self.cancelled: dict[str, None] = {}
        """Jobs that somebody asked to cancel."""
        self.may_stop: dict[tuple[str, str], None] = {}
        """(node, task id): tasks that an order or a drain stops."""
        self._stops: dict[tuple[int, str], None] = {}
        self._answered: dict[str, int] = {}
        self._letters: dict[tuple[str, int], None] = {}
        self._dead_lettered: dict[tuple[str, int], None] = {}
        self._submissions: dict[str, None] = {}
        self._estimates: dict[str, None] = {}
        self._started: dict[Key, None] = {}
        self._gpu_tokens: dict[str, int] = {}
        self._left: dict[str, int] = {}
        """Node → ledger time of its latest departure."""
        self._reported_started: dict[Key, None] = {}
        self._false_reports: dict[str, None] = {}
        """Machines that run although somebody reported them fenced, until they join again."""
        self._disowned: dict[Key, None] = {}
        """Processes on them: the cell has given them up, wrongly, and cannot know of them."""
        self._cause: Fact = {}

    def landed(self, record: Record) -> None:
        """One record of any partition, as it lands."""
        topic = record.partition.topic
        if topic == Topic.ORDERS:
            self._order(record)
        elif topic == Topic.NODES:
            self._report(record)
        elif topic == Topic.DEAD_LETTERS:
            self._letter(record)
        elif topic == Topic.JOBS:
            event_id = dict(record.headers).get("ce_id", b"").decode()
            if event_id.startswith("submit-"):
                self.submitted[event_id.removeprefix("submit-")] = None

    # ------------------------------------------------------------------------------------- the ledger

    def ledger(self, record: Record) -> bool:
        """One record of the ledger's partition; whether it is valid."""
        book = self.book
        found = book.take(record.value)
        raw = self.replica.take(record.value, record.offset)
        if (raw is None) != (found is None):
            raise Violation("chain", f"offset {record.offset}: the product takes it for {raw and 'valid'}")
        if found is None:
            self._void(record)
            return False
        if found["now_ms"] < book.now_ms:
            raise Violation("time", f"seq {book.seq}: {found['now_ms']} after {book.now_ms}")
        book.now_ms = found["now_ms"]
        self._law2(found)
        self._cause = found["facts"][0]["data"] if found["facts"] else {}
        for entry in found["facts"]:
            kind, _, _ = entry["type"].rpartition(".")
            before = BEFORE.get(kind)
            if before is not None:
                before(self, entry["data"])
            book.write(kind, entry["data"])
            if kind in LINES:
                self.world.trace(f"seq {book.seq}: {LINES[kind](entry['data'])}")
        problems = check(self.replica.state)
        if problems:
            raise Violation("check", f"seq {book.seq}: {'; '.join(problems)}")
        timers = [t.about.id for t in self.replica.state.timers.values() if t.about.id in self.ended]
        if timers:
            raise Violation("rest", f"seq {book.seq}: {timers} have ended, their timers stay")
        return True

    def _void(self, record: Record) -> None:
        """Where record and orders are one commit, a placer that was replaced writes nothing (decision 19)."""
        ours = dict(record.headers).get("ce_source") == PLACER
        if ours and self.broker.conditional and TERM_STARTED.encode() not in record.value:
            raise Violation("commit", f"offset {record.offset}: a placer's record is there, and void")

    def _law2(self, found: Fact) -> None:
        cause, at = found["cause"], f"seq {self.book.seq}"
        if found["outcome"] == "rejected" and found["facts"]:
            raise Violation("law2", f"{at} is rejected and has facts")
        if str(found.get("reason") or "").startswith("failed: "):
            raise Violation("crash", f"{at}: {found['reason']}")
        topic = cause.get("topic")
        if topic is None:
            return
        expected, offset = self._answered.get(topic, 0), cause["offset"]
        if offset != expected or offset >= self.broker.end(Partition(topic, 0)):
            raise Violation("law2", f"{at} answers {topic}/{offset}; {expected} is the next to answer")
        self._answered[topic] = offset + 1
        if found["outcome"] == "dead_lettered":
            self._dead_lettered[topic, offset] = None
            if (topic, offset) not in self._letters:
                raise Violation("letter", f"{at}: the dead letter of {topic}/{offset} is not there")

    def answered(self, topic: str) -> int:
        """So many inputs of the topic have their record."""
        return self._answered.get(topic, 0)

    def _letter(self, record: Record) -> None:
        letter = orjson.loads(record.value)
        if letter["service"] == "placer":
            self._letters[letter["source_topic"], letter["source_offset"]] = None

    def unexplained_letters(self) -> list[tuple[str, int]]:
        """Dead letters of inputs that a valid record answered otherwise; at the end."""
        return [place for place in self._letters if place not in self._dead_lettered]

    # ------------------------------------------------------------------------------- before each fact

    def _submission(self, fact: Fact) -> None:
        if fact["job_id"] in self._submissions:
            raise Violation("outcome", f"{fact['job_id']} is submitted twice")
        self._submissions[fact["job_id"]] = None

    def _estimate(self, fact: Fact) -> None:
        if fact["job_id"] in self._estimates:
            raise Violation("estimate", f"{fact['job_id']} is estimated twice")
        self._estimates[fact["job_id"]] = None

    def _placement(self, fact: Fact) -> None:
        book, job_id = self.book, fact["job_id"]
        at = f"seq {book.seq}: {job_id}"
        job = book.jobs.get(job_id)
        if job is None or not job.waits:
            raise Violation("placement", f"{at} is not waiting")
        if book.frozen:
            raise Violation("freeze", f"{at} is placed while the cell is frozen")
        if fact["attempt"] != job.attempt + 1 or len(fact["tasks"]) != job.tasks:
            raise Violation("placement", f"{at}: attempt {fact['attempt']} with {len(fact['tasks'])} tasks")
        for place in fact["tasks"]:
            node = book.nodes[place["node_id"]]
            faulted = [gpu for gpu in place["gpus"] if node.uuid(gpu) in node.faulted]
            if node.status != "ready" or faulted:
                raise Violation("placement", f"{at}: {place['node_id']} is {node.status}, faulted {faulted}")
            boot_id = node.spec["boot_id"]
            self.placed[book.seq, place["task_id"]] = Placed(job_id, place, boot_id, node.incarnation)
        for machine in self.machines.values():
            for process in machine.processes.values():
                if process.order.job_id == job_id and process.key not in self._disowned:
                    raise Violation("proof", f"{at} is placed anew, {process.key} lives")

    def _start(self, fact: Fact) -> None:
        key = (fact["task_id"], fact["token"])
        if key in self._reported_started:
            raise Violation("attempt", f"seq {self.book.seq}: {key} is reported started a second time")
        self._reported_started[key] = None

    def _stop(self, fact: Fact) -> None:
        job, seq = self.book.jobs[fact["job_id"]], self.book.seq
        if job.stop_reason in FINAL_STOPS:
            raise Violation("outcome", f"seq {seq}: {fact['job_id']} is ending already; {fact['reason']}")
        self._stops |= dict.fromkeys((seq, task_id) for task_id in job.places)

    def _join(self, fact: Fact) -> None:
        name = fact["node"]["node_id"]
        self._stops |= dict.fromkeys((self.book.seq, task["task_id"]) for task in fact["tasks"])
        self._left.pop(name, None)
        if self._false_reports.pop(name, "") is None:  # what it has accepted may still start
            self._disowned |= {(task["task_id"], task["token"]): None for task in fact["tasks"]}

    def _departure(self, fact: Fact) -> None:
        self._left[fact["node_id"]] = self.book.now_ms
        machine = self.machines[fact["node_id"]]
        if machine.up and machine.spec.boot_id == fact["boot_id"] and fact["proof"] == "fenced":
            self._false_reports[fact["node_id"]] = None

    def _freed(self, fact: Fact) -> None:
        """A task is reported dead, or never to live: it must be."""
        processes = self.machines[fact["node_id"]].processes.values()
        process = next((found for found in processes if found.order.task_id == fact["task_id"]), None)
        if process is not None and fact["node_id"] in self._false_reports:
            self._disowned[process.key] = None
        elif process is not None:
            raise Violation("proof", f"seq {self.book.seq}: {fact['task_id']} is freed, {process.key} lives")

    def _lost(self, fact: Fact) -> None:
        self._freed(fact)
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

    def _ended(self, fact: Fact) -> None:
        job_id, outcome = fact["job_id"], fact["outcome"]
        at = f"seq {self.book.seq}: {job_id} ended {outcome}"
        if job_id in self.ended:
            raise Violation("outcome", f"{at} after {self.ended[job_id]}")
        self.ended[job_id] = outcome
        job, program = self.book.jobs[job_id], self.programs[job_id]
        if job.living:
            raise Violation("outcome", f"{at}, but {list(job.living)} have not")
        allowed = program.job.allowed
        if job_id in self.cancelled:
            allowed = (*allowed, CANCELLED)
        worn_out = outcome == FAILED and job.losses >= MAX_LOSSES
        if outcome == UNSCHEDULABLE:
            if self.book.could_fit(job):
                raise Violation("outcome", f"{at}, but it fits the empty cell")
        elif outcome not in allowed and not worn_out:
            raise Violation("outcome", f"{at}; right is one of {allowed}")
        if outcome == SUCCEEDED and len(program.good.get(job.token, {})) != job.spec["workers"]:
            raise Violation("outcome", f"{at}, but of its workers only {program.good} came to a good end")
        if (
            outcome == FAILED
            and not worn_out
            and len(program.own_failures) < job.spec["retry"]["max_attempts"]
        ):
            raise Violation("outcome", f"{at} after {len(program.own_failures)} failures of its own")

    # ------------------------------------------------------------------------- what is in the log

    def _order(self, record: Record) -> None:
        """A node gets no order but what a valid record decided (LAW 4)."""
        kind = dict(record.headers).get("ce_type")
        if kind is None:
            return  # nonsense
        order = orjson.loads(record.value)
        key = (order["token"], order["task_id"])
        if kind == START_TASK:
            own = self.placed.get(key)
            if own is None or (own.place, own.place["node_id"]) != (order["place"], order["node_id"]):
                raise Violation("order", f"a start of {key} is ordered that no valid record decided")
            self.ordered[key] = None
        elif kind == STOP_TASK:
            if key not in self._stops:
                raise Violation("order", f"a stop of {key} is ordered that no valid record decided")
            self.may_stop[order["node_id"], order["task_id"]] = None

    def _report(self, record: Record) -> None:
        """A node-reporter reports starts that happened, and exits when nothing of the task is left."""
        headers = dict(record.headers)
        if not headers.get("ce_source", b"").startswith(REPORTER):
            return
        fact, kind = orjson.loads(record.value), headers["ce_type"].decode().rpartition(".")[0]
        key = (fact.get("task_id", ""), fact.get("token", 0))
        if kind == "penstock.task.started" and key not in self._started:
            raise Violation("report", f"{key} is reported started, and never was")
        if kind == "penstock.task.exited" and key in self.machines[fact["node_id"]].processes:
            raise Violation("report", f"{key} is reported {fact['cause']}, and lives")

    # ----------------------------------------------------------------------------- what machines do

    def signalled(self, machine: Machine, task_id: str) -> None:
        """A signal goes only to what was ordered to stop, or is drained."""
        if (machine.node_id, task_id) not in self.may_stop:
            raise Violation("signal", f"{machine.node_id} signals {task_id}, which nobody stopped")

    def unstopped(self, machine: Machine, process: TaskProcess) -> None:
        """What is to be stopped gets a signal."""
        what = "came to its own end, and its stop was in the journal"
        raise Violation("stop", f"{machine.node_id}: {process.key} {what}")

    def drained(self, machine: Machine) -> None:
        """Everything on a machine is about to be stopped."""
        node_id = machine.node_id
        own = (key[1] for key, found in self.placed.items() if found.place["node_id"] == node_id)
        self.may_stop |= dict.fromkeys((node_id, task_id) for task_id in own)

    def starts(self, machine: Machine, process: TaskProcess) -> None:
        """A program is about to start."""
        order, key = process.order, process.key
        at = f"{machine.node_id} starts {order.task_id}@{order.token}"
        self.world.trace(at)
        job = self.book.jobs.get(order.job_id)
        if job is None or job.token != order.token or order.task_id not in job.living:
            if machine.node_id not in self._false_reports and key not in self._disowned:
                raise Violation("order", f"{at}, which the ledger does not know as living")
            self._disowned[key] = None
        if key in self._started or order.boot_id != machine.spec.boot_id:
            raise Violation("attempt", f"{at} twice, or for the boot {order.boot_id}")
        self._started[key] = None
        if not machine.disk.has_synced(*key):
            raise Violation("durable", f"{at}, and its token is not on the disk")
        for other in self.machines.values():
            for found in other.processes.values():
                rival = found.order.job_id == order.job_id and found.order.token != order.token
                if rival and found.key not in self._disowned and key not in self._disowned:
                    raise Violation("attempt", f"{at} while {found.key} lives on {other.node_id}")
        share = order.place.gpu_share_milli
        for gpu in process.gpus:
            beside = [found.order.place for found in machine.processes.values() if gpu in found.gpus]
            if sum(place.gpu_share_milli for place in beside) + share > WHOLE_GPU:
                raise Violation("gpu", f"{at} on {gpu} beside {[place.task_id for place in beside]}")
            last = self._gpu_tokens.get(gpu, 0)
            if share == WHOLE_GPU and order.token < last:
                raise Violation("token", f"{at} on {gpu} after token {last}")
            self._gpu_tokens[gpu] = max(last, order.token)


BEFORE: Mapping[str, Callable[[Judge, Fact], None]] = MappingProxyType(
    {
        "penstock.job.submitted": Judge._submission,
        "penstock.job.estimated": Judge._estimate,
        "penstock.placement.decided": Judge._placement,
        "penstock.task.started": Judge._start,
        "penstock.stop.decided": Judge._stop,
        "penstock.node.joined": Judge._join,
        "penstock.node.left": Judge._departure,
        "penstock.task.exited": Judge._freed,
        "penstock.order.refused": Judge._freed,
        "penstock.task.lost": Judge._lost,
        "penstock.node.lost": Judge._node_lost,
        "penstock.cell.frozen": Judge._frozen,
        "penstock.job.ended": Judge._ended,
    }
)

LINES: Mapping[str, Callable[[Fact], str]] = MappingProxyType(
    {
        "penstock.placement.decided": lambda fact: (
            "places " + ", ".join(f"{t['task_id']} on {t['node_id']}{t['gpus']}" for t in fact["tasks"])
        ),
        "penstock.stop.decided": lambda fact: f"stops {fact['job_id']}.{fact['attempt']}: {fact['reason']}",
        "penstock.task.started": lambda fact: f"{fact['task_id']}@{fact['token']} runs on {fact['node_id']}",
        "penstock.task.exited": lambda fact: (
            f"{fact['task_id']}@{fact['token']} {fact['cause']} on {fact['node_id']}"
        ),
        "penstock.order.refused": lambda fact: f"{fact['task_id']}@{fact['token']} refused: {fact['reason']}",
        "penstock.task.lost": lambda fact: f"{fact['task_id']} is given up: {fact['reason']}",
        "penstock.job.requeued": lambda fact: f"{fact['job_id']} queues again: {fact['reason']}",
        "penstock.job.ended": lambda fact: f"{fact['job_id']} ended {fact['outcome']}",
        "penstock.node.left": lambda fact: f"{fact['node_id']} left: {fact['proof']}",
        "penstock.node.joined": lambda fact: f"{fact['node']['node_id']} joined as {fact['node']['boot_id']}",
        "penstock.node.suspected": lambda fact: f"{fact['node_id']} is suspect: {fact['reason']}",
        "penstock.cell.frozen": lambda fact: f"the cell freezes: {fact['reason']}",
        "penstock.cell.thawed": lambda fact: f"the cell thaws: {fact['reason']}",
    }
)
