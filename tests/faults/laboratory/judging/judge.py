"""The laboratory's judge: the log's bytes by the rules of `ledger_rules`, and what machines really do.

It believes no service: GPUs are identified by UUID, processes and faults are as the machines had them. Only
the rules `chain`, `check`, `fold` and `replay` ask the product's code, since they compare it with the judge
or with itself.

Rules, beside those of `ledger_rules` and `process_rules`: `proof` (nothing is freed or placed anew while it
lives), `outcome` (each job ends rightly), `gang` (a task knows all members of its gang), `order` (processes,
too, follow from valid records alone), `durable` (a task's token is on the disk before it starts), `fault`
(nothing new starts on a GPU whose fault is in the ledger, before a boot or a repair), `signal` (no task is
stopped unasked), `stop` (who is to be stopped gets a signal), `report` (a node reports only what happened),
`drain` (a drained node's jobs are stopped), `hold` (holds and releases are obeyed), `adjust` (see
`adjustment_judge`), `checkpoint` (see `checkpoint_judge`), `commit` (on a conditional log no decision of a
placer is void), `chain`, `check`, `fold`, `replay`, `fresh` (a decider that starts from a snapshot decides
the same), `crash`, `liveness`, `rest`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import orjson

from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Partition, Record
from penstock.model.schema.topics import Topic
from penstock_services.node_reporter.shell.ports import Key
from penstock_services.placer.core.waiting.retries import MAX_LOSSES
from tests.faults.laboratory.injection.policies import PolicyBug
from tests.faults.laboratory.inputs.jobs import CANCELLED, FAILED, SUCCEEDED, UNSCHEDULABLE
from tests.faults.laboratory.judging.adjustment_judge import AdjustmentJudge
from tests.faults.laboratory.judging.checkpoint_judge import CheckpointJudge
from tests.faults.laboratory.machines.log import Broker
from tests.faults.laboratory.machines.machine import Machine, Program, TaskProcess
from tests.faults.laboratory.world import World
from tests.faults.rules.findings import Fact, Violation, kind_of
from tests.faults.rules.ledger_book import TERM_STARTED
from tests.faults.rules.ledger_rules import FINAL_STOPS, PLACER, START_TASK, STOP_TASK, LedgerRules
from tests.faults.rules.process_rules import ProcessRules, Running
from tests.support.cluster.readers import Readers

# of its lease without contact, a node stops its tasks (5/6 less what a slow boot-time clock makes of timers)
STOP_AFTER = 0.75
MAX_UNDERWAY_S = 120.0  # of a record, between its stamp and its landing: placers sleep, and appends are late
CORDONED = "penstock.node.cordoned."
HOLD = "penstock.job.hold_requested"
REPORTER = b"/penstock/node-reporter/"


class Judge:
    """`machines` and `programs` are what really is; both are filled by the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker: Broker
        self.rules = LedgerRules(self._next_input)
        self.rules.injected = PolicyBug.__name__
        self.book, self.placed, self.ended = self.rules.book, self.rules.placed, self.rules.ended
        self.readers: Readers | None = None
        """The fold of every service that reads the ledger, in runs with numbers at the ends of their
        ranges."""
        self.replica = Replica()
        """The product's fold of the same records, for the rules that ask it, and for who chooses faults."""
        self.machines: dict[str, Machine] = {}
        self.programs: dict[str, Program] = {}
        self.submitted: dict[str, None] = {}
        """Jobs whose submission is in the log."""
        self.ordered: dict[tuple[int, str], None] = {}
        """(token, task id) of starts whose order is in the log."""
        self.cancelled: dict[str, None] = {}
        """Jobs that somebody asked to cancel."""
        self.commands: dict[str, tuple[str, Fact]] = {}
        """Event id → kind and contents of a hold or a release in the log."""
        self.may_stop: dict[tuple[str, str], None] = {}
        """(node, task id): tasks that an order or a drain stops."""
        self.faults: dict[str, int] = {}
        """UUID → seq of the record with its latest fault."""
        self._since: tuple[int, float] | None = None
        """The ledger's time and the real one at the first record of those behind which a deadline was always
        pending."""
        self._processes = ProcessRules()
        self.has_lost = False
        """Whether the ledger was ever restored from an older copy."""
        self._lost: dict[Key, None] = {}
        """What had been placed until then: nodes may still start it."""
        self._lost_groups: dict[Key, str] = {}
        """Of it what took turns with others on its GPUs → with the same value."""
        self._false_reports: dict[str, None] = {}
        """Machines that run although somebody reported them fenced, until they join again."""
        self._disowned: dict[Key, None] = {}
        """Processes on them: the cell has given them up, wrongly, and cannot know of them."""
        self.adjustments = AdjustmentJudge(self)
        self.checkpoints = CheckpointJudge(self)

    def _next_input(self, topic: str, offset: int) -> int | None:
        place = Partition(topic, 0)
        return offset if offset < max(self.broker.end(place), self.broker.ended.get(place, 0)) else None

    def restored(self, records: Sequence[Record]) -> None:
        """The ledger is what it was when these were its records. What runs by the others is still judged."""
        rules = self.rules.after(record.value for record in records)
        for (token, task_id), found in self.placed.items():
            self._lost[task_id, token] = None
            job = self.book.jobs.get(found.job_id)
            if job is not None and job.token == token and job.group:
                self._lost_groups[task_id, token] = job.group
        self.rules, self.replica, self.has_lost = rules, Replica(), True
        self.readers = None if self.readers is None else Readers()
        self.book, self.placed, self.ended = rules.book, rules.placed, rules.ended
        for record in records:
            if self.replica.take(record.value, record.offset) is not None:
                if self.readers is not None:
                    self.readers.take(record.value)
                self.checkpoints.restored(orjson.loads(record.value))

    def landed(self, record: Record) -> None:
        """One record of any partition, as it lands."""
        topic = record.partition.topic
        if topic == Topic.ORDERS:
            self._order(record)
        elif topic == Topic.NODES:
            self._report(record)
        elif topic == Topic.DEAD_LETTERS:
            self._letter(record.value)
        elif topic == Topic.JOBS:
            event_id = dict(record.headers).get("ce_id", b"").decode()
            if event_id.startswith("submit-"):
                self.submitted[event_id.removeprefix("submit-")] = None
            elif event_id.startswith("command/"):
                kind = kind_of(dict(record.headers)["ce_type"].decode())
                self.commands[event_id] = kind, orjson.loads(record.value)

    def _letter(self, value: bytes) -> None:
        """No reader has another state than the placer."""
        letter = orjson.loads(value)
        if letter.get("differs") is not None:
            raise Violation("fold", letter["detail"])
        self.rules.letter(value)

    # ------------------------------------------------------------------------------------- the ledger

    def ledger(self, record: Record) -> bool:
        """One record of the ledger's partition; whether it is valid."""
        rules, book = self.rules, self.book
        found = rules.take(record.value)
        raw = self.replica.take(record.value, record.offset)
        if (raw is None) != (found is None):
            raise Violation("chain", f"offset {record.offset}: the product takes it for {raw and 'valid'}")
        if found is None:
            self._void(record)
            return False
        if self.readers is not None:
            self.readers.take(record.value)
        self._time(found["now_ms"])
        rules.record(found)
        self._obeys(found)
        for entry in found["facts"]:
            kind, fact = kind_of(entry["type"]), entry["data"]
            before = BEFORE.get(kind)
            if before is not None:
                before(self, fact)
            rules.fact(kind, fact)
            self.checkpoints.fact(kind, fact, found["now_ms"])
            if kind in LINES:
                self.world.trace(f"seq {book.seq}: {LINES[kind](fact)}")
        self._drained_by(found["facts"])
        problems = check(self.replica.state) if found["facts"] else []  # without a fact nothing has changed
        if problems:
            raise Violation("check", f"seq {book.seq}: {'; '.join(problems)}")
        timers = [t.about.id for t in self.replica.state.timers.values() if t.about.id in self.ended]
        if timers:
            raise Violation("rest", f"seq {book.seq}: {timers} have ended, their timers stay")
        return True

    def _time(self, now_ms: int) -> None:
        """While a deadline is pending, the ledger's time goes on no faster than time itself, whatever clocks
        show."""
        now_s = self.world.now_s
        if self._since is not None:
            since_ms, since_s = self._since
            passed_ms = (now_s - since_s + MAX_UNDERWAY_S) * 1_000
            if now_ms - since_ms > passed_ms:
                raise Violation(
                    "time", f"seq {self.book.seq}: {now_ms - since_ms} ms in {now_s - since_s:.1f} s"
                )
        if not any(timer.about.kind != "place_more" for timer in self.replica.state.timers.values()):
            self._since = None
        elif self._since is None:
            self._since = now_ms, now_s

    def _drained_by(self, facts: list[Fact]) -> None:
        """The record that drains a node stops what runs there, unless the cell is frozen."""
        drained = [
            e["data"]["node_id"] for e in facts if e["type"].startswith(CORDONED) and e["data"].get("drain")
        ]
        for job_id, job in self.book.jobs.items():
            living = [place for task_id, place in job.places.items() if task_id in job.living]
            left = [place["node_id"] for place in living if place["node_id"] in drained]
            if left and job.stop_reason is None and not self.book.frozen:
                raise Violation("drain", f"seq {self.book.seq}: {job_id} is not stopped on {left}")

    def _obeys(self, found: Fact) -> None:
        """A hold of what is not held, and an operator's release of what is, are obeyed."""
        kind, command = self.commands.get(found["cause"].get("event_id", ""), ("", {}))
        job = self.book.jobs.get(command.get("job_id", ""))
        if job is None or 0 < command.get("after", 0) < job.commanded:
            return
        if kind == HOLD:
            applies = not job.held and job.stop_reason not in FINAL_STOPS
        else:
            applies = job.held and "tenant" not in command
        if applies and [kind_of(entry["type"]) for entry in found["facts"][:1]] != [kind]:
            raise Violation("hold", f"seq {self.book.seq}: {command} is not obeyed: {found.get('reason')}")

    def _void(self, record: Record) -> None:
        """Where record and orders are one commit, a placer that was replaced writes nothing (decision 19)."""
        ours = dict(record.headers).get("ce_source") == PLACER
        if (
            ours
            and self.broker.conditional
            and not self.has_lost
            and TERM_STARTED.encode() not in record.value
        ):
            raise Violation("commit", f"offset {record.offset}: a placer's record is there, and void")

    # ------------------------------------------------------------------------------- before each fact

    def _placement(self, fact: Fact) -> None:
        job_id = fact["job_id"]
        for process in self._processes_now():
            if process.order.job_id == job_id and not self._unknown(process):
                raise Violation("proof", f"seq {self.book.seq}: {job_id} is placed anew, {process.key} lives")

    def _unknown(self, process: TaskProcess) -> bool:
        """Whether the ledger cannot know that it lives: it was reported dead, and falsely."""
        return process.key in self._disowned or process.order.node_id in self._false_reports

    def _join(self, fact: Fact) -> None:
        if (
            self._false_reports.pop(fact["node"]["node_id"], "") is None
        ):  # what it has accepted may still start
            self._disowned |= {(task["task_id"], task["token"]): None for task in fact["tasks"]}

    def _departure(self, fact: Fact) -> None:
        machine = self.machines[fact["node_id"]]
        if machine.up and machine.spec.boot_id == fact["boot_id"] and fact["proof"] == "fenced":
            self._false_reports[fact["node_id"]] = None

    def _gpu_fault(self, fact: Fact) -> None:
        if "uuid" in fact:
            self.faults[fact["uuid"]] = self.book.token

    def _input_accepted(self, fact: Fact) -> None:
        self.broker.ended.pop(Partition(fact["topic"], 0), None)

    def _freed(self, fact: Fact) -> None:
        """A task is reported dead, or never to live: it must be."""
        processes = self.machines[fact["node_id"]].processes.values()
        job = self.book.job_of(fact["task_id"])
        process = next((found for found in processes if found.order.task_id == fact["task_id"]), None)
        if process is not None and process.key in self._lost and (job is None or job.token != process.key[1]):
            return  # of the same name, by a record that the ledger has lost
        if process is not None and (fact["node_id"] in self._false_reports or self._stuck(process)):
            self._disowned[process.key] = None
        elif process is not None:
            raise Violation("proof", f"seq {self.book.seq}: {fact['task_id']} is freed, {process.key} lives")

    def _stuck(self, process: TaskProcess) -> bool:
        """Whether it was killed and does not die before its lease is over: it executes nothing more, and its
        GPUs wait for its node (decision 40, exposure)."""
        machine = self.machines[process.order.node_id]
        killed = not process.shim_alive and process.immortal_until_s > self.world.now_s
        return killed and machine.lease_ends(1.0)

    def _end(self, fact: Fact) -> None:
        job_id, outcome = fact["job_id"], fact["outcome"]
        if job_id not in self.book.jobs or outcome == UNSCHEDULABLE:
            return  # which `ledger_rules` judges
        at = f"seq {self.book.seq}: {job_id} ended {outcome}"
        job, program = self.book.jobs[job_id], self.programs[job_id]
        allowed = program.job.allowed
        if job_id in self.cancelled:
            allowed = (*allowed, CANCELLED)
        worn_out = outcome == FAILED and job.losses >= MAX_LOSSES
        if outcome not in allowed and not worn_out:
            raise Violation("outcome", f"{at}; right is one of {allowed}")
        workers = sum(place["role"] == "worker" for place in self.gang(job.token, job_id))
        if outcome == SUCCEEDED and len(program.good.get(job.token, {})) != workers:
            raise Violation("outcome", f"{at}, but of its workers only {program.good} came to a good end")
        failures = len(program.own_failures)
        if outcome == FAILED and not worn_out and failures < job.spec["retry"]["max_attempts"]:
            raise Violation("outcome", f"{at} after {failures} failures of its own")

    # ------------------------------------------------------------------------- what is in the log

    def _order(self, record: Record) -> None:
        found = self.rules.order(record.headers, record.value)
        if found is None:
            return  # nonsense
        kind, order = found
        if kind == START_TASK:
            self.ordered[order["token"], order["task_id"]] = None
        elif kind == STOP_TASK:
            self.may_stop[order["node_id"], order["task_id"]] = None

    def _report(self, record: Record) -> None:
        """A node-reporter reports starts that happened, and exits when nothing of the task is left."""
        headers = dict(record.headers)
        if not headers.get("ce_source", b"").startswith(REPORTER):
            return
        fact, kind = orjson.loads(record.value), headers["ce_type"].decode().rpartition(".")[0]
        key = (fact.get("task_id", ""), fact.get("token", 0))
        launched = kind != "penstock.task.started" or key in self.machines[fact["node_id"]].launched
        if not launched and key not in self._processes.started:
            raise Violation("report", f"{key} is reported started, and never was")
        if kind == "penstock.task.adjusted":
            self.adjustments.reported(self.machines[fact["node_id"]], fact)
        if kind == "penstock.task.exited" and key in self.machines[fact["node_id"]].processes:
            raise Violation("report", f"{key} is reported {fact['cause']}, and lives")

    # ----------------------------------------------------------------------------- what machines do

    def signalled(self, machine: Machine, task_id: str) -> None:
        """A signal goes only to what was ordered to stop, is drained, or whose lease is nearly over."""
        key = machine.node_id, task_id
        if machine.lease_ends(STOP_AFTER):
            self.may_stop[key] = None  # it goes on after its grace, though the log may be there again
        if key not in self.may_stop:
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

    def _processes_now(self) -> Iterator[TaskProcess]:
        for machine in self.machines.values():
            yield from machine.processes.values()

    def gang(self, token: int, job_id: str) -> list[Fact]:
        """The places of all members, as they were placed under this token."""
        placed = self.placed.items()
        return [found.place for key, found in placed if key[0] == token and found.job_id == job_id]

    def starts(self, machine: Machine, process: TaskProcess) -> None:
        """A program is about to start."""
        order, key, rules = process.order, process.key, self._processes
        at = f"{machine.node_id} starts {order.task_id}@{order.token}"
        self.world.trace(at)
        job = self.book.jobs.get(order.job_id)
        if job is None or job.token != order.token or order.task_id not in job.living:
            if key in self._lost:
                pass
            elif machine.node_id not in self._false_reports and key not in self._disowned:
                raise Violation("order", f"{at}, which the ledger does not know as living")
            if key not in self._lost:
                self._disowned[key] = None
        if order.boot_id != machine.spec.boot_id:
            raise Violation("attempt", f"{at} for the boot {order.boot_id}")
        own = self.placed.get((order.token, order.task_id))
        gang = {(place["rank"], place["node_id"]) for place in self.gang(order.token, order.job_id)}
        if own is not None and (known := {(peer.rank, peer.node_id) for peer in order.peers}) != gang:
            raise Violation("gang", f"{at} with the peers {sorted(known)}; its gang is {sorted(gang)}")
        if own is not None and own.gpus != process.gpus:
            raise Violation("gpu", f"{at} with {process.gpus}; the ledger gave it {own.gpus}")
        broken = [
            gpu
            for gpu in process.gpus
            if gpu in machine.broken and order.token > self.faults.get(gpu, order.token)
        ]
        if broken:
            raise Violation(
                "fault", f"{at} on {broken}, broken since seq {[self.faults[gpu] for gpu in broken]}"
            )
        new = _running(process)
        rules.starts_once(new)
        if not machine.disk.has_synced(*key):
            raise Violation("durable", f"{at}, and its token is not on the disk")
        if key not in self._disowned:
            owned = (found for found in self._processes_now() if not self._unknown(found))
            rules.no_other_attempt(new, map(_running, owned))
        others = (found for found in machine.processes.values() if found is not process)
        strangers = (found for found in others if not self.companions(process, found))
        grouped = key in self._lost_groups or (
            job is not None and job.token == order.token and bool(job.group)
        )
        rules.gpus_are_free(new, map(_running, strangers), grouped=grouped)
        self.adjustments.starts(machine, process)
        self.checkpoints.starts(machine, process)

    def adjusted(self, machine: Machine, process: TaskProcess, what: str) -> None:
        """A program has other cores, or another cap of its memory bandwidth."""
        (self.adjustments.pinned if what == "cores" else self.adjustments.capped)(machine, process)

    def companions(self, one: TaskProcess, other: TaskProcess) -> bool:
        """Whether the ledger lets both have the same GPUs and cores, or let them before it was restored."""
        group = self._lost_groups.get(one.key)
        if group is not None and group == self._lost_groups.get(other.key):
            return True
        for process in (one, other):
            job = self.book.jobs.get(process.order.job_id)
            if job is None or job.token != process.order.token or process.key in self._disowned:
                return False
        return self.book.together(one.order.task_id, other.order.task_id)

    def owns(self, key: Key) -> bool:
        """Whether all that was ever decided of this program is in the ledger as it is."""
        return key not in self._disowned and key not in self._lost


def _running(process: TaskProcess) -> Running:
    order = process.order
    share_milli = order.place.gpu_share_milli
    return Running(order.node_id, order.job_id, order.task_id, order.token, process.gpus, share_milli)


BEFORE: Mapping[str, Callable[[Judge, Fact], None]] = MappingProxyType(
    {
        "penstock.placement.decided": Judge._placement,
        "penstock.input.accepted": Judge._input_accepted,
        "penstock.node.joined": Judge._join,
        "penstock.node.left": Judge._departure,
        "penstock.gpu.faulted": Judge._gpu_fault,
        "penstock.task.exited": Judge._freed,
        "penstock.order.refused": Judge._freed,
        "penstock.task.lost": Judge._freed,
        "penstock.job.ended": Judge._end,
        "penstock.cores.decided": lambda judge, fact: judge.adjustments.decided(fact),
        "penstock.bandwidth.decided": lambda judge, fact: judge.adjustments.decided(fact),
        "penstock.ledger.accepted": lambda judge, fact: judge.adjustments.decided(fact),
    }
)

LINES: Mapping[str, Callable[[Fact], str]] = MappingProxyType(
    {
        "penstock.placement.decided": lambda fact: (
            "places " + ", ".join(f"{t['task_id']} on {t['node_id']}{t['gpus']}" for t in fact["tasks"])
        ),
        "penstock.stop.decided": lambda fact: f"stops {fact['job_id']}.{fact['attempt']}: {fact['reason']}",
        "penstock.move.decided": lambda fact: (
            "moves " + ", ".join(f"{t['task_id']} to {t['node_id']}{t['gpus']}" for t in fact["tasks"])
        ),
        "penstock.group.decided": lambda fact: f"{fact['job_ids']} are group {fact['group_id']}",
        "penstock.move.given_up": lambda fact: f"{fact['job_id']} gives up its target: {fact['reason']}",
        "penstock.task.started": lambda fact: f"{fact['task_id']}@{fact['token']} runs on {fact['node_id']}",
        "penstock.cores.decided": lambda fact: f"{fact['task_id']} gets the cores {fact['cores']}",
        "penstock.bandwidth.decided": lambda fact: (
            f"{fact['task_id']} gets {fact['memory_bandwidth_percent']} % of the memory bandwidth"
        ),
        "penstock.task.adjusted": lambda fact: (
            f"{fact['task_id']} has its {fact['what']} by {fact['order_token']}: "
            f"{fact['enforced'] or 'refused'}"
        ),
        "penstock.task.checkpointed": lambda fact: f"{fact['task_id']} has saved {fact.get('path')}",
        "penstock.task.checkpoint_fetched": lambda fact: (
            f"{fact['task_id']} fetches from {fact['from_node']}: {fact.get('path') or fact.get('problem')}"
        ),
        "penstock.task.exited": lambda fact: (
            f"{fact['task_id']}@{fact['token']} {fact['cause']} on {fact['node_id']}"
        ),
        "penstock.order.refused": lambda fact: f"{fact['task_id']}@{fact['token']} refused: {fact['reason']}",
        "penstock.task.lost": lambda fact: f"{fact['task_id']} is given up: {fact['reason']}",
        "penstock.job.requeued": lambda fact: f"{fact['job_id']} queues again: {fact['reason']}",
        "penstock.job.ended": lambda fact: f"{fact['job_id']} ended {fact['outcome']}",
        "penstock.job.hold_requested": lambda fact: f"{fact['job_id']} is held",
        "penstock.job.release_requested": lambda fact: f"{fact['job_id']} is released",
        "penstock.node.left": lambda fact: f"{fact['node_id']} left: {fact['proof']}",
        "penstock.node.joined": lambda fact: f"{fact['node']['node_id']} joined as {fact['node']['boot_id']}",
        "penstock.node.cordoned": lambda fact: (
            f"{fact['node_id']} is cordoned, drain: {fact.get('drain', False)}"
        ),
        "penstock.node.uncordoned": lambda fact: f"{fact['node_id']} is uncordoned",
        "penstock.node.suspected": lambda fact: f"{fact['node_id']} is suspect: {fact['reason']}",
        "penstock.node.probed": lambda fact: f"{fact['node_id']} is probed",
        "penstock.node.probe_sent": lambda fact: (
            f"the probe {fact['probe']} of {fact['node_id']} is in the log"
        ),
        "penstock.node.probe_expired": lambda fact: f"the probe {fact['probe']} of {fact['node_id']} expires",
        "penstock.node.restored": lambda fact: f"{fact['node_id']} reports again",
        "penstock.input.accepted": lambda fact: f"{fact['topic']} is read on from {fact['offset']}",
        "penstock.ledger.accepted": lambda fact: f"the ledger goes on in epoch {fact['epoch']}",
        "penstock.cell.frozen": lambda fact: f"the cell freezes: {fact['reason']}",
        "penstock.cell.thawed": lambda fact: f"the cell thaws: {fact['reason']}",
    }
)
