"""Nemesis: the fault injector. Chooses one fault after another until the calm phase."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.ledger.record import Draft, Head, write
from penstock.log.port import Message, Partition
from penstock.model.event import Event
from penstock.model.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobProgress,
    NodeChanged,
    NodeCordoned,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    NodeUncordoned,
    TaskExited,
    TaskStarted,
    WorkProgressed,
)
from penstock.model.orders import StartTask
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.model.transitions import JobStatus
from penstock.model.types import TaskPlacement
from tests.faults.laboratory.machine import Machine, Node
from tests.faults.laboratory.wire import message, orders_of

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
DOUBTFUL = (NodeSuspected.TYPE.encode(), GpuFaulted.TYPE.encode())
"""What makes a node unused until it reports again, also when it comes late."""
LATEST = 40  # placements whose orders may still be under way
PLACER_STEPS = ("read inputs", "append ledger", "read ledger", "append orders")
JOINED = f"{NodeJoined.TYPE}.v{NodeJoined.VERSION}".encode()
WATCH = "watch"
"""Who reports about machines from outside: a cloud, an operator."""
MAX_LOST = 60  # records of the ledger, at once
STUCK_S = (20.0, 60.0)
POLL_S = 0.25


class Nemesis:
    """Acts on a laboratory every so often; `happened` counts by name."""

    def __init__(self, lab: "Laboratory", faults: tuple[str, ...], every_s: float) -> None:
        self._lab = lab
        self._world = lab.world
        self._every_s = every_s
        self._faults = [name for name in FAULTS if name in faults and name not in RATES]
        self.happened: dict[str, int] = {}
        self.suspected: dict[str, None] = {}
        """Machines with a false report, or that were silent: their reporter must report before they are used again."""
        self.cordoned: dict[str, None] = {}
        """Nodes that an operator must take back into use."""
        self._sent = 0
        if self._faults:
            self._next()

    def _next(self) -> None:
        self._world.at(self._world.within(0, 2 * self._every_s), self._strike)

    def _strike(self) -> None:
        if self._world.calm:
            return
        name = self._faults[int(self._world.rng.integers(len(self._faults)))]
        self.happened[name] = self.happened.get(name, 0) + 1
        FAULTS[name](self)
        self._next()

    # -------------------------------------------------------------------------------------- helpers

    def _node(self) -> Node:
        nodes = list(self._lab.nodes.values())
        return nodes[int(self._world.rng.integers(len(nodes)))]

    def _report(self, event: NodeLeft | NodeSuspected) -> None:
        """Reports about a machine to the cell."""
        if event.TYPE == NodeSuspected.TYPE:
            self.suspected[event.node_id] = None
        self._sent += 1
        self._send_maybe_twice(message(event, f"{WATCH}/{self._sent}", "/operator"))

    def _send_maybe_twice(self, found: Message) -> None:
        self._lab.send(found)
        if self._world.happens(self._world.rates.twice):
            self._world.at(self._world.within(0, 60), lambda: self._send_while_faulty(found))

    def _send_while_faulty(self, found: Message) -> None:
        if not self._world.calm:
            self._lab.send(found)

    def _power_off(self, node: Node, *, power_loss: bool, away_s: float) -> None:
        node.power_off(power_loss=power_loss)
        self._world.at(away_s, node.power_on)

    # ------------------------------------------------------------------------------------- services

    def crash(self) -> None:
        """One service is killed."""
        lab = self._lab
        reporters = [node.reporter for node in lab.nodes.values()]
        alive = [service for service in (*lab.placers, lab.estimator, *reporters) if service.alive]
        if alive:
            alive[int(self._world.rng.integers(len(alive)))].kill("a crash")

    def upgrade(self) -> None:
        """One service is stopped in good order and started again; a node's tasks run on meanwhile."""
        lab = self._lab
        reporters = [node.reporter for node in lab.nodes.values() if not node.drains]
        services = (*lab.placers, lab.estimator, *reporters)
        services[int(self._world.rng.integers(len(services)))].terminate()

    def zombie(self) -> None:
        """The placer in office falls asleep, whole or with one of its tasks, and another takes its place."""
        serving, rng = self._lab.serving(), self._world.rng
        if serving is not None and serving.process is not None:
            until_s = self._world.now_s + self._world.within(1, 40)
            kind = PLACER_STEPS[int(rng.integers(len(PLACER_STEPS)))] if rng.random() < 0.6 else ""
            serving.process.sleep(until_s, kind)
            self._world.trace(f"{serving.name} sleeps until {until_s:.1f} s: {kind or 'all of it'}")
        self.rival()

    def rival(self) -> None:
        """Somebody starts one more placer, which takes over at once."""
        serving = self._lab.serving()
        idle = [service for service in self._lab.placers if service is not serving]
        rival = idle[int(self._world.rng.integers(len(idle)))]
        rival.kill("to be started anew")
        rival.start()

    def duel(self) -> None:
        """All placers but the one in office start at once, and each begins a term."""
        serving = self._lab.serving()
        for service in self._lab.placers:
            if service is not serving:
                service.kill("to duel for the term")
                service.start()

    def clock(self) -> None:
        """Some machine's clock jumps."""
        clocks = self._lab.clocks
        clock = clocks[int(self._world.rng.integers(len(clocks)))]
        jump_ms = int(self._world.rng.integers(-2 * HOUR_MS, 2 * HOUR_MS))
        clock.error_ms += jump_ms if self._world.rng.random() < 0.3 else jump_ms // 1_000
        self._world.trace(f"a clock jumps by {jump_ms} ms or a thousandth of it")

    def years(self) -> None:
        """A machine's battery dies, or a time server errs: its clock jumps by up to forty years, and now and then back."""
        clocks = self._lab.clocks
        clock = clocks[int(self._world.rng.integers(len(clocks)))]
        usual_ms, years = clock.error_ms, int(self._world.rng.integers(-40, 41))
        clock.error_ms += years * YEAR_MS
        self._world.trace(f"a clock jumps by {years} years")
        if self._world.rng.random() < 0.5:
            mended_s = self._world.within(1, 60)
            self._world.at(mended_s, lambda: setattr(clock, "error_ms", usual_ms))

    def outage(self) -> None:
        """Nobody reaches the log for a while."""
        self._lab.broker.unreachable_until_s = self._world.now_s + self._world.within(0.5, 30)
        self._world.trace("the log cannot be reached")

    def retention(self) -> None:
        """The log forgets a node's old orders: a reporter that lags behind finds its position gone."""
        self._lab.broker.expire(orders_of(self._node().machine.node_id))

    def inputs(self) -> None:
        """An administrator truncates an input topic, or deletes it and creates it again: what was in it is lost."""
        place = Partition(INPUT_TOPICS[int(self._world.rng.integers(len(INPUT_TOPICS)))], 0)
        if self._lab.judge.rules.answered(place.topic):  # else nobody could know of it
            self._lab.lose_input(place, anew=bool(self._world.rng.random() < 0.5))

    def ledger(self) -> None:
        """The ledger is restored from an older copy, while everything else goes on."""
        self._lab.restore_ledger(int(self._world.rng.integers(1, MAX_LOST)))

    # ------------------------------------------------------------------------------------- machines

    def reboot(self) -> None:
        """A kernel panics and comes back, sooner or later than anybody notices."""
        node = self._node()
        if node.machine.up:
            self._power_off(node, power_loss=False, away_s=self._world.within(1, 60))

    def power(self) -> None:
        """A machine loses power; that is reported for sure, suspected, or not reported."""
        node = self._node()
        machine = node.machine
        if not machine.up:
            return
        boot_id = machine.spec.boot_id
        for_good = self._world.rng.random() < 0.3 and not any(
            other.machine.destroyed for other in self._lab.nodes.values()
        )
        machine.destroyed = machine.destroyed or for_good
        self._power_off(node, power_loss=True, away_s=self._world.within(5, 200))
        if for_good:
            self._report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="deleted"))
        else:
            self._report_loss(machine, boot_id)

    def confirm(self) -> None:
        """Of what is gone for good the operator reports once more that it is fenced, for the boot that the cell knows."""
        for node_id, node in self._lab.nodes.items():
            known = self._lab.judge.book.nodes.get(node_id)
            if node.machine.destroyed and known is not None:
                self._report(NodeLeft(node_id=node_id, boot_id=known.spec["boot_id"], proof="fenced"))

    def disk(self) -> None:
        """A machine comes back with an empty disk."""
        node = self._node()
        if node.machine.up:
            self._power_off(node, power_loss=True, away_s=self._world.within(5, 60))
            node.machine.lose_disk()

    def full(self) -> None:
        """A node's disk is full for a while."""
        disk = self._node().machine.disk
        disk.full = True
        self._world.at(self._world.within(1, 60), lambda: setattr(disk, "full", False))

    def sync(self) -> None:
        """A node's disk takes writes but does not sync them; sometimes power is lost before it is mended."""
        node = self._node()
        disk = node.machine.disk
        disk.sync_fails = True
        mended_s = self._world.within(1, 60)
        self._world.at(mended_s, lambda: setattr(disk, "sync_fails", False))
        if self._world.rng.random() < 0.5 and node.machine.up:
            loss_s = self._world.within(0, mended_s)
            self._world.at(loss_s, lambda: self._lose_power(node))

    def _lose_power(self, node: Node) -> None:
        if node.machine.up and not self._world.calm:
            self._power_off(node, power_loss=True, away_s=self._world.within(1, 60))

    def false_report(self) -> None:
        """Somebody reports that a machine is fenced, and it is not: its tasks run on beside their successors."""
        node = self._node()
        machine = node.machine
        if machine.up and not machine.destroyed:
            self.suspected[machine.node_id] = None
            boot_id = machine.spec.boot_id
            self._report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="fenced"))
            restart = "restarted by its operator"
            self._world.at(self._world.within(1, 30), lambda: node.reporter.kill(restart))

    def _report_loss(self, machine: Machine, boot_id: str) -> None:
        how = float(self._world.rng.random())
        if how < 0.6:
            proof: Any = "fenced" if how < 0.2 else "lease_outlived" if how < 0.4 else "deleted"
            self._report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof=proof))
        elif how < 0.8:
            self._report(NodeSuspected(node_id=machine.node_id, reason="its lease was missed"))

    def vanish(self) -> None:
        """Most machines go at once, as when a switch room loses power."""
        nodes = [node for node in self._lab.nodes.values() if node.machine.up]
        away_s = self._world.within(5, 120)
        for node in nodes[: max(1, (3 * len(nodes) + 3) // 4)]:
            boot_id = node.machine.spec.boot_id
            self._power_off(node, power_loss=True, away_s=away_s + self._world.within(0, 30))
            if self._world.rng.random() < 0.9:
                node_id = node.machine.node_id
                self._report(NodeLeft(node_id=node_id, boot_id=boot_id, proof="lease_outlived"))
        if self._world.rng.random() < 0.5:
            self._world.at(self._world.within(1, 20), self.drain)

    def silence(self) -> None:
        """A machine is cut off: it works on, but neither reads nor appends."""
        node = self._node()
        process = node.reporter.process
        if process is None or not process.alive:
            return
        until_s = self._world.now_s + self._world.within(5, 150)
        process.sleep(until_s, "read orders", "append inputs")
        self._world.trace(f"{node.machine.node_id} is cut off until {until_s:.1f} s")
        if self._world.rng.random() < 0.5:
            self._report(NodeSuspected(node_id=node.machine.node_id, reason="it is silent"))

    def gpu(self) -> None:
        """A GPU breaks; repaired without a reboot now and then."""
        machine = self._node().machine
        process = self._lab.nodes[machine.node_id].reporter.process
        if not machine.up or process is None or not process.alive or machine.gpu_fault is None:
            return
        self.suspected[machine.node_id] = None
        gpu = machine.spec.gpus[int(self._world.rng.integers(len(machine.spec.gpus)))]
        fault = GpuFaulted(node_id=machine.node_id, gpu=gpu.index, uuid=gpu.uuid, fault="xid", code=79)
        machine.broken[gpu.uuid], machine.repaired = None, False
        self._world.loop.call_soon(machine.gpu_fault, fault, context=process.context)
        if self._world.rng.random() < 0.5:
            self._world.at(self._world.within(10, 100), lambda: self._repaired(machine))

    def _repaired(self, machine: Machine) -> None:
        reporter = self._lab.nodes[machine.node_id].reporter
        if machine.up and reporter.alive and not self._world.calm:
            machine.repair_gpus()
            if self._world.rng.random() < 0.5:
                self._lab.send(message(NodeChanged(node=machine.spec), "repaired", "/operator"))
            reporter.kill("restarted by its operator, who has repaired GPUs")

    def cards(self) -> None:
        """A GPU is pulled, put back, or all get other indexes; then the reporter restarts while tasks run."""
        node = self._node()
        machine = node.machine
        if not machine.up:
            return
        how = self._world.rng.random()
        if how < 0.4:
            machine.pull_gpu()
        elif how < 0.7 or machine.pulled:
            machine.put_gpus_back()
        else:
            machine.shuffle_gpus()
        node.reporter.kill("restarted, since its GPUs have moved")

    def shim(self) -> None:
        """The kernel kills a task's guardian; something of the task is left now and then, and may not die at once."""
        machine = self._node().machine
        keys = [key for key, process in machine.processes.items() if process.shim_alive]
        if keys:
            immortal_s = float(self._world.rng.choice([0.0, 1.0, 40.0]))
            machine.kill_shim(keys[int(self._world.rng.integers(len(keys)))], immortal_s)

    def launcher(self) -> None:
        """A node's launcher is killed under its reporter."""
        launcher = self._node().machine.launcher
        if launcher is not None:
            launcher.die()

    def slow_start(self) -> None:
        """A machine takes long to start programs, as with a cold cache or a busy file server; users lose patience."""
        machine = self._node().machine
        machine.slow_start = True
        self._world.at(self._world.within(10, 90), lambda: setattr(machine, "slow_start", False))
        if self._world.rng.random() < 0.5:
            until_s = self._world.now_s + self._world.within(*STUCK_S)

            def launching() -> list[str]:
                return list(machine.launcher.launching()) if machine.launcher is not None else []

            self._once(lambda: bool(launching()), lambda: self._lab.cancel(launching()[0]), until_s)

    def cordon(self) -> None:
        """An operator takes a node out of use, with or without its jobs, and back into use; now and then not before the calm."""
        node_id = self._node().machine.node_id
        drain = self._world.rng.random() < 0.5
        self._operate(NodeCordoned(node_id=node_id, drain=bool(drain), by="operator", reason="fans"))
        self.cordoned[node_id] = None
        if self._world.rng.random() < 0.8:
            self._world.at(self._world.within(1, 60), lambda: self._uncordon(node_id))

    def _uncordon(self, node_id: str) -> None:
        if not self._world.calm:
            self._operate(NodeUncordoned(node_id=node_id, by="operator", reason="fans are new"))

    def uncordon_all(self) -> None:
        """The operator's last orders, after all that were under way."""
        for node_id in self.cordoned:
            self._operate(NodeUncordoned(node_id=node_id, by="operator", reason="fans are new"))

    def _operate(self, event: NodeCordoned | NodeUncordoned) -> None:
        self._sent += 1
        self._send_maybe_twice(message(event, f"operator/{self._sent}", "/operator"))

    def drain(self) -> None:
        """A machine is taken out of service in good order, and comes back."""
        node = self._node()
        if node.drains and node.reporter.alive:
            self._lab.judge.drained(node.machine)
            node.reporter.terminate()

    # ------------------------------------------------------------------------------------- messages

    def garbage(self) -> None:
        """Somebody writes nonsense."""
        topic = INPUT_TOPICS[int(self._world.rng.integers(len(INPUT_TOPICS)))]
        if self._world.rng.random() < 0.5:
            topic = Topic.NODES
        elif self._world.rng.random() < 0.2:
            self._lab.send(Message(orders_of(self._node().machine.node_id), b"garbage"))
        nonsense = [
            *self._stale(),
            Message(Partition(topic, 0), b"\xff\xfe"),
            message(GpuFaulted(node_id="nobody", gpu=0, fault="ecc"), "x", "/nobody"),
        ]
        found = nonsense[int(self._world.rng.integers(len(nonsense)))]
        self._lab.send(msgspec.structs.replace(found, partition=Partition(topic, 0)))

    def _stale(self) -> list[Message]:
        """A node restored from an old image reports tasks that live under a newer token."""
        found: list[Message] = []
        for job in self._lab.judge.book.jobs.values():
            for task_id, place in list(job.places.items())[:1]:
                fields: dict[str, Any] = {
                    "node_id": place["node_id"], "task_id": task_id, "token": job.token - 1, "started_ms": 1,
                }  # fmt: skip
                found.append(message(TaskStarted(**fields, pid=1), "z", "/nobody"))
                found.append(message(TaskExited(**fields, cause="lost", exited_ms=1), "z", "/nobody"))
        return found

    def wrong_progress(self) -> None:
        """Jobs report how far they are, those that wait too: wrongly, now and then twice; and one that nobody knows."""
        rng = self._world.rng
        jobs = tuple(
            JobProgress(
                job_id=job_id,
                attained_s=float(rng.integers(0, 80)),
                remaining_s=float(rng.integers(0, 90)) if rng.random() < 0.7 else None,
            )
            for job_id in (*self._lab.judge.book.jobs, "nobody")
        )
        self._send_maybe_twice(message(WorkProgressed(node_id="n0", jobs=jobs), "progress", "/nobody"))

    def duplicate(self) -> None:
        """Something that was sent long ago comes once more: a mirror, a bridge, a dispatcher that woke up late."""
        rng, broker = self._world.rng, self._lab.broker
        partitions = [Partition(topic, 0) for topic in (Topic.NODES, Topic.JOBS, Topic.ESTIMATES)]
        partitions += [orders_of(node_id) for node_id in self._lab.nodes]
        used = [partition for partition in partitions if broker.records(partition)]
        if not used:
            return
        records = broker.records(used[int(rng.integers(len(used)))])
        joins = [record for record in records if ("ce_type", JOINED) in record.headers]
        for _ in range(int(rng.integers(1, 6))):
            among = joins if joins and rng.random() < 0.5 else records
            record = among[int(rng.integers(len(among)))]
            self._lab.send(Message(record.partition, record.value, record.headers, record.key))
            if any(raw.startswith(DOUBTFUL) for _, raw in record.headers):
                self.suspected |= dict.fromkeys(self._lab.nodes)

    def cancel(self) -> None:
        """A user changes his mind, best while his job is being launched; the placer may die over it."""
        lab, rng = self._lab, self._world.rng
        jobs = list(lab.judge.replica.state.jobs.values())
        launching = [job for job in jobs if job.status is JobStatus.LAUNCHING] or jobs
        if launching:
            lab.cancel(launching[int(rng.integers(len(launching)))].job_id)
            for service in lab.placers:
                if rng.random() < 0.4:
                    service.kill("beside a cancellation")

    def sleeper(self) -> None:
        """A dispatcher fell asleep between reading a placement back and sending its orders; now it sends them."""
        judge = self._lab.judge
        latest = list(judge.placed)[-LATEST:]
        unsent = [key for key in judge.placed if key not in judge.ordered]
        overtaken = [key for key in unsent if (judge.placed[key].place["node_id"], key[1]) in judge.may_stop]
        placed = overtaken[-LATEST:] or unsent[-LATEST:] or latest
        for _ in range(3):
            if placed:
                self._send_start(placed[int(self._world.rng.integers(len(placed)))])

    def overtake(self) -> None:
        """Orders are stuck while a job that was just placed is cancelled; the next placer's stop overtakes the start."""
        serving, judge, lab = self._lab.serving(), self._lab.judge, self._lab
        if serving is None or serving.process is None:
            return
        until_s = self._world.now_s + self._world.within(*STUCK_S)
        serving.process.sleep(until_s, "append orders")

        def unsent() -> list[tuple[int, str]]:
            jobs = judge.book.jobs
            return [
                key
                for key, own in judge.placed.items()
                if key not in judge.ordered and own.job_id in jobs and jobs[own.job_id].token == key[0]
            ]

        def cancel() -> None:
            key = unsent()[-1]
            own = judge.placed[key]
            node_id, job = own.place["node_id"], judge.book.jobs[own.job_id]
            lab.cancel(own.job_id)
            self._once(lambda: job.stop_reason is not None, self.rival, until_s)
            self._once(lambda: (node_id, key[1]) in judge.may_stop, lambda: self._send_start(key), until_s)

        self._once(lambda: bool(unsent()), cancel, until_s)

    def _once(self, holds: Callable[[], bool], act: Callable[[], object], until_s: float) -> None:
        """Acts as soon as this holds; not in the calm phase, and not later than that."""
        if self._world.calm or self._world.now_s > until_s:
            return
        if holds():
            act()
        else:
            self._world.at(POLL_S, lambda: self._once(holds, act, until_s))

    def _send_start(self, key: tuple[int, str]) -> None:
        """The order that follows from a placement, as its placer would have sent it."""
        own = self._lab.judge.placed[key]
        order = StartTask(
            token=key[0],
            node_id=own.place["node_id"],
            task_id=key[1],
            job_id=own.job_id,
            attempt=int(key[1].rsplit(".", 2)[1]),
            boot_id=own.boot_id,
            incarnation=own.incarnation,
            command=("train",),
            place=msgspec.convert(own.place, TaskPlacement),
            gpu_uuids=own.gpus,
            peers=(),
            rendezvous_port=29_500,
            grace_ms=1_000,
        )
        self._lab.send(message(order, f"order-{key}", "/penstock/placer"))

    def stranger(self) -> None:
        """The placer of another cell, or of a restored backup, writes to this ledger: nothing of it may count."""
        lab, rng = self._lab, self._world.rng
        replica = lab.judge.replica
        head, state = replica.head, replica.state
        fact: list[Event] = [JobCancelRequested(job_id=job_id) for job_id in list(state.jobs)[:1]]
        cause: dict[str, object] = {"timer_id": "none"}
        wrong = int(rng.integers(5))
        if wrong == 0:
            value = b"\x00 no record"
        elif wrong == 1:
            other = Head(head.seq, "f" * 32, head.term)
            value = write(other, Draft(head.term, state.now_ms, cause, "committed", None, fact))[1]
        elif wrong == 4:
            other = Head(head.seq + 1, head.id, head.term)
            value = write(other, Draft(head.term, state.now_ms, cause, "committed", None, fact))[1]
        else:
            term = head.term - 1 if wrong == 2 else head.term + 1
            value = write(head, Draft(term, state.now_ms, cause, "committed", None, fact))[1]
        lab.broker.put([Message(Partition(Topic.LEDGER, 0), value)])

    def propose(self) -> None:
        """Somebody proposes placements, as of what it last saw."""
        self._lab.proposer.propose()


def _rate(nemesis: Nemesis) -> None:
    """Is there all the time; see `Rates`."""


RATES = ("late", "twice", "steps", "append", "policy")
FAULTS: Mapping[str, Callable[[Nemesis], None]] = MappingProxyType(
    dict.fromkeys(RATES, _rate)
    | {
        name: getattr(Nemesis, name)
        for name in (
            "crash", "upgrade", "zombie", "rival", "duel", "clock", "years", "outage", "retention", "inputs", "ledger", "reboot", "power", "vanish", "silence",
            "disk", "full", "sync", "false_report", "gpu", "cards", "shim", "launcher", "drain", "cordon", "garbage", "wrong_progress",
            "duplicate", "cancel", "sleeper", "stranger", "propose", "overtake", "slow_start",
        )
    }
)  # fmt: skip
"""All kinds of faults, by the names that `--faults` takes. `steps`: services are killed between any two steps."""
