"""Nemesis: what befalls a life, drawn one misfortune after another until the weather clears."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.ledger.record import Draft, Head, write
from penstock.model.event import Event
from penstock.model.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobProgress,
    NodeChanged,
    NodeLeft,
    NodeSuspected,
    TaskExited,
    TaskStarted,
    WorkProgressed,
)
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.model.transitions import JobStatus
from tests.faults.lab.log import Record, wire
from tests.faults.lab.machine import Machine
from tests.faults.lab.reporter import JOIN

if TYPE_CHECKING:
    from tests.faults.lab.life import Laboratory

HOUR_MS = 3_600_000
SLANDEROUS = (NodeSuspected.TYPE.encode(), GpuFaulted.TYPE.encode())
"""What makes a node unused until it speaks again, also when it is heard late."""
LATEST = 40  # placements whose orders may still be under way
WATCH = "watch"
"""Who tells of machines from outside: a cloud, an operator."""


class Nemesis:
    """Acts on a laboratory every so often; `happened` counts by name."""

    def __init__(self, lab: "Laboratory", faults: tuple[str, ...], every_s: float) -> None:
        self._lab = lab
        self._world = lab.world
        self._every_s = every_s
        self._faults = [name for name in FAULTS if name in faults and name not in WEATHER]
        self.happened: dict[str, int] = {}
        self.suspected: dict[str, None] = {}
        """Machines that were slandered, or were silent: their reporter must speak before they are used again."""
        self._told = 0
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

    def _machine(self) -> Machine:
        machines = list(self._lab.machines.values())
        return machines[int(self._world.rng.integers(len(machines)))]

    def _say(self, event: NodeLeft | NodeSuspected) -> None:
        """Tells the cell of a machine."""
        if event.TYPE == NodeSuspected.TYPE:
            self.suspected[event.node_id] = None
        self._told += 1
        self._tell_nodes(wire(event, f"{WATCH}/{self._told}", "/operator", self._lab.clock.wall_ms()))

    def _tell_nodes(self, record: Record) -> None:
        """Goes to the topic of the nodes; now and then twice."""
        self._lab.log.append(WATCH, self._lab.log.partition(Topic.NODES), [record])
        if self._world.chance(self._world.rates.twice):
            self._world.at(self._world.within(0, 60), lambda: _again(self._lab, record))

    def _power_off(self, machine: Machine, *, power_loss: bool, away_s: float) -> None:
        machine.go_down(power_loss=power_loss)
        self._lab.reporters[machine.node_id].machine_died()
        self._world.at(away_s, lambda: self._lab.power_on(machine))

    # ------------------------------------------------------------------------------------- services

    def crash(self) -> None:
        """One service dies where it stands."""
        lab = self._lab
        lives = [placer.term.life for placer in lab.placers if placer.term is not None]
        lives += [lab.estimator.work.life] if lab.estimator.work is not None else []
        lives += [r.work.life for r in lab.reporters.values() if r.work is not None]
        lives = [life for life in lives if life.alive]
        if lives:
            lives[int(self._world.rng.integers(len(lives)))].crash("killed")

    def zombie(self) -> None:
        """The placer in office falls asleep, whole or with one ear, and another takes its place."""
        lab, rng = self._lab, self._world.rng
        for placer in lab.placers:
            term = placer.serving
            if term is not None:
                until_s = self._world.now_s + self._world.within(1, 40)
                parts = [term.deciding, term.appending, term.following, term.sending]
                if rng.random() < 0.4:
                    term.life.stalled_until_s = until_s
                else:
                    parts[int(rng.integers(len(parts)))].stalled_until_s = until_s
                self._world.tell(f"{placer.name} falls asleep until {until_s:.1f} s")
        self.rival()

    def rival(self) -> None:
        """Somebody starts one more placer, which takes over at once."""
        lab = self._lab
        idle = [p for p in lab.placers if p.serving is None]
        if idle:
            rival = idle[int(self._world.rng.integers(len(idle)))]
            if rival.term is not None:
                rival.term.life.alive = False
            rival.start()

    def clock(self) -> None:
        """Some machine's clock jumps."""
        clocks = self._lab.clocks
        clock = clocks[int(self._world.rng.integers(len(clocks)))]
        jump_ms = int(self._world.rng.integers(-2 * HOUR_MS, 2 * HOUR_MS))
        clock.wrong_ms += jump_ms if self._world.rng.random() < 0.3 else jump_ms // 1_000
        self._world.tell(f"a clock jumps by {jump_ms} ms or a thousandth of it")

    # ------------------------------------------------------------------------------------- machines

    def reboot(self) -> None:
        """A kernel panics and comes back, sooner or later than anybody notices."""
        machine = self._machine()
        if machine.up:
            self._power_off(machine, power_loss=False, away_s=self._world.within(1, 60))

    def power(self) -> None:
        """A machine loses power; the cell is told for sure, told a suspicion, or told nothing."""
        machine = self._machine()
        if not machine.up:
            return
        boot_id = machine.spec.boot_id
        for_good = self._world.rng.random() < 0.3 and not any(
            other.destroyed for other in self._lab.machines.values()
        )
        machine.destroyed = machine.destroyed or for_good
        self._power_off(machine, power_loss=True, away_s=self._world.within(5, 200))
        if for_good:
            self._say(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="deleted"))
        else:
            self._tell_of(machine, boot_id)

    def swear(self) -> None:
        """Of what is gone for good the operator says so once more, for the boot that the cell knows."""
        for machine in self._lab.machines.values():
            known = self._lab.judge.state.nodes.get(machine.node_id)
            if machine.destroyed and known is not None:
                boot_id = known.spec.boot_id
                self._say(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="fenced"))

    def disk(self) -> None:
        """A machine comes back with an empty disk."""
        machine = self._machine()
        if machine.up:
            self._power_off(machine, power_loss=True, away_s=self._world.within(5, 60))
            machine.lose_disk()

    def slander(self) -> None:
        """Somebody swears that a machine is off, and it is not: its tasks run on beside their successors."""
        machine = self._machine()
        if machine.up and not machine.destroyed:
            self.suspected[machine.node_id] = None
            boot_id = machine.spec.boot_id
            self._say(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="fenced"))
            self._world.at(self._world.within(1, 30), lambda: self._restart(machine))

    def _restart(self, machine: Machine) -> None:
        """Its operator sees that it runs after all."""
        reporter = self._lab.reporters[machine.node_id]
        if reporter.work is not None:
            reporter.work.life.crash("restarted by its operator")
            self._world.at(1.0, reporter.start)

    def _tell_of(self, machine: Machine, boot_id: str) -> None:
        how = float(self._world.rng.random())
        if how < 0.6:
            proof: Any = "fenced" if how < 0.2 else "lease_outlived" if how < 0.4 else "deleted"
            self._say(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof=proof))
        elif how < 0.8:
            self._say(NodeSuspected(node_id=machine.node_id, reason="its lease was missed"))

    def vanish(self) -> None:
        """Most machines go at once, as when a switch room loses power."""
        machines = [machine for machine in self._lab.machines.values() if machine.up]
        gone = machines[: max(1, (3 * len(machines) + 3) // 4)]
        away_s = self._world.within(5, 120)
        for machine in gone:
            boot_id = machine.spec.boot_id
            self._power_off(machine, power_loss=True, away_s=away_s + self._world.within(0, 30))
            if self._world.rng.random() < 0.9:
                self._say(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="lease_outlived"))
        if self._world.rng.random() < 0.5:
            self._world.at(self._world.within(1, 20), self.drain)

    def silence(self) -> None:
        """A machine is cut off: it works on and hears and says nothing."""
        machine = self._machine()
        work = self._lab.reporters[machine.node_id].work
        if work is None or not work.life.alive:
            return
        until_s = self._world.now_s + self._world.within(5, 150)
        work.reading.stalled_until_s = work.sending.stalled_until_s = until_s
        self._world.tell(f"{machine.node_id} is cut off until {until_s:.1f} s")
        if self._world.rng.random() < 0.5:
            self.suspected[machine.node_id] = None
            self._say(NodeSuspected(node_id=machine.node_id, reason="it is silent"))

    def gpu(self) -> None:
        """A GPU breaks; repaired without a reboot now and then."""
        machine = self._machine()
        if not machine.up:
            return
        self.suspected[machine.node_id] = None
        gpu = int(self._world.rng.integers(len(machine.spec.gpus)))
        fault = GpuFaulted(node_id=machine.node_id, gpu=gpu, fault="xid", code=79)
        reporter = self._lab.reporters[machine.node_id]
        if reporter.alive and reporter.work is not None:
            reporter.work.say(fault)
        if self._world.rng.random() < 0.5:
            self._world.at(self._world.within(10, 100), lambda: self._repaired(machine))

    def _repaired(self, machine: Machine) -> None:
        reporter = self._lab.reporters[machine.node_id]
        if machine.up and reporter.alive and reporter.work is not None:
            reporter.work.say(NodeChanged(node=machine.spec))

    def shim(self) -> None:
        """The kernel kills a task's guardian."""
        machine = self._machine()
        keys = list(machine.processes)
        if keys:
            machine.kill_shim(keys[int(self._world.rng.integers(len(keys)))])

    def drain(self) -> None:
        """A machine is taken out of service in good order, and comes back."""
        work = self._lab.reporters[self._machine().node_id].work
        if work is not None and work.life.alive:
            work.drain()

    # ------------------------------------------------------------------------------------- messages

    def garbage(self) -> None:
        """Somebody writes nonsense."""
        topic = INPUT_TOPICS[int(self._world.rng.integers(len(INPUT_TOPICS)))]
        if self._world.rng.random() < 0.5:
            topic = Topic.NODES
        nonsense = [
            *self._stale(),
            Record(b"\xff\xfe"),
            wire(GpuFaulted(node_id="nobody", gpu=0, fault="ecc"), "x", "/nobody", 1),
        ]
        record = nonsense[int(self._world.rng.integers(len(nonsense)))]
        self._lab.log.append("nobody", self._lab.log.partition(topic), [record])

    def _stale(self) -> list[Record]:
        """A node restored from an old image speaks of tasks that live under a newer token."""
        said: list[Record] = []
        for node in self._lab.judge.state.nodes.values():
            for task_id, job_id in list(node.tasks.items())[:1]:
                fields: dict[str, Any] = {
                    "node_id": node.spec.node_id,
                    "task_id": task_id,
                    "token": self._lab.judge.state.jobs[job_id].token - 1,
                    "started_ms": 1,
                }
                said.append(wire(TaskStarted(**fields, pid=1), "z", "/nobody", 1))
                said.append(wire(TaskExited(**fields, cause="lost", exited_ms=1), "z", "/nobody", 1))
        return said

    def hearsay(self) -> None:
        """Jobs tell how far they are, those that wait too: wrongly, now and then twice; and one that nobody knows."""
        rng, lab = self._world.rng, self._lab
        told = tuple(
            JobProgress(
                job_id=job_id,
                attained_s=float(rng.integers(0, 80)),
                remaining_s=float(rng.integers(0, 90)) if rng.random() < 0.7 else None,
            )
            for job_id in (*lab.judge.state.jobs, "nobody")
        )
        record = wire(WorkProgressed(node_id="n0", jobs=told), "hearsay", "/nobody", 1)
        self._tell_nodes(record)

    def echo(self) -> None:
        """Something that was said long ago is heard once more: a mirror, a bridge, a dispatcher that woke up late."""
        rng, lab = self._world.rng, self._lab
        topics = [lab.log.partition(topic) for topic in (Topic.NODES, Topic.JOBS, Topic.ESTIMATES)]
        lanes = [lab.log.partition(Topic.ORDERS, node_id) for node_id in lab.machines]
        spoken = [partition for partition in (*topics, *lanes) if partition.records]
        if not spoken:
            return
        partition = spoken[int(rng.integers(len(spoken)))]
        joins = [record for record in partition.records if record.id.startswith(JOIN)]
        for _ in range(int(rng.integers(1, 6))):
            among = joins if joins and rng.random() < 0.5 else partition.records
            record = among[int(rng.integers(len(among)))]
            lab.log.append("mirror", partition, [record])
            if any(raw.startswith(SLANDEROUS) for _, raw in record.headers):
                self.suspected |= dict.fromkeys(lab.machines)

    def cancel(self) -> None:
        """A user changes his mind, best while his job is being launched; the placer may die over it."""
        lab, rng = self._lab, self._world.rng
        jobs = list(lab.judge.state.jobs.values())
        launching = [job for job in jobs if job.status is JobStatus.LAUNCHING] or jobs
        if launching:
            job_id = launching[int(rng.integers(len(launching)))].job_id
            lab.judge.cancelled[job_id] = None
            record = wire(JobCancelRequested(job_id=job_id), f"cancel-{job_id}", "/penstock/gateway", 1)
            lab.log.append("gateway", lab.log.partition(Topic.JOBS), [record])
            for placer in lab.placers:
                if placer.term is not None and rng.random() < 0.4:
                    placer.term.life.crash("killed beside a cancellation")

    def sleeper(self) -> None:
        """A dispatcher fell asleep between reading a placement back and sending its orders; now it sends them."""
        judge, lab = self._lab.judge, self._lab
        latest = list(judge.placed.items())[-LATEST:]
        placed = [order for key, order in latest if key not in judge.read] or [order for _, order in latest]
        for _ in range(3):
            if placed:
                order = placed[int(self._world.rng.integers(len(placed)))]
                lane = lab.log.partition(Topic.ORDERS, order.node_id)
                lab.log.append("sleeper", lane, [Record(order)])

    def stranger(self) -> None:
        """The placer of another cell, or of a restored backup, writes to this ledger: nothing of it may count."""
        lab, rng = self._lab, self._world.rng
        head, state = lab.judge.head, lab.judge.state
        fact: list[Event] = [JobCancelRequested(job_id=job_id) for job_id in list(state.jobs)[:1]]
        cause: dict[str, object] = {"timer_id": "none"}
        wrong = int(rng.integers(4))
        if wrong == 0:
            value = b"\x00 no record"
        elif wrong == 1:
            other = Head(head.seq, "f" * 32, head.term)
            value = write(other, Draft(head.term, state.now_ms, cause, "committed", None, fact))[1]
        else:
            term = head.term - 1 if wrong == 2 else head.term + 1
            value = write(head, Draft(term, state.now_ms, cause, "committed", None, fact))[1]
        lab.log.put(lab.log.partition(Topic.LEDGER), Record(value))

    def propose(self) -> None:
        """Somebody proposes placements, as of what it last saw."""
        self._lab.proposer.propose()


def _again(lab: "Laboratory", record: Record) -> None:
    if lab.world.calm:
        return
    lab.log.append(WATCH, lab.log.partition(Topic.NODES), [record])


def _weather(nemesis: Nemesis) -> None:
    """Is there all the time; see `Rates`."""


WEATHER = ("late", "twice", "turns")
FAULTS: Mapping[str, Callable[[Nemesis], None]] = MappingProxyType(
    {
        "turns": _weather,
        "late": _weather,
        "twice": _weather,
        "crash": Nemesis.crash,
        "zombie": Nemesis.zombie,
        "rival": Nemesis.rival,
        "clock": Nemesis.clock,
        "reboot": Nemesis.reboot,
        "power": Nemesis.power,
        "vanish": Nemesis.vanish,
        "silence": Nemesis.silence,
        "disk": Nemesis.disk,
        "slander": Nemesis.slander,
        "gpu": Nemesis.gpu,
        "shim": Nemesis.shim,
        "drain": Nemesis.drain,
        "garbage": Nemesis.garbage,
        "hearsay": Nemesis.hearsay,
        "echo": Nemesis.echo,
        "cancel": Nemesis.cancel,
        "sleeper": Nemesis.sleeper,
        "stranger": Nemesis.stranger,
        "propose": Nemesis.propose,
    }
)
"""All that may happen, by the names that `--faults` takes. `turns`: services die between any two turns."""
