"""Faults of machines: power, disks, GPUs, guardians and launchers of tasks, and operators who take nodes out
of use."""

from typing import TYPE_CHECKING, Any

from penstock.model.inputs.external_events import (
    GpuFaulted,
    NodeChanged,
    NodeCordoned,
    NodeLeft,
    NodeSuspected,
    NodeUncordoned,
)
from tests.faults.laboratory.injection.injector import Injector
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.machines.machine import Machine, Node

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

BROKEN_WITHIN_S = (20.0, 30.0)
"""Of a machine's end, its connection breaks: later than anything that it sent arrives."""
PATIENCE_S = (20.0, 60.0)
"""How long a user waits for a program that a slow machine starts."""


class MachineFaults(Injector):
    """Each public method is a fault, but for `confirm`, `suspect_again` and `uncordon_all`, by which an
    operator clears up."""

    def __init__(self, lab: "Laboratory") -> None:
        super().__init__(lab)
        self.cordoned: dict[str, None] = {}
        """Nodes that an operator must take back into use."""

    def _power_off(self, node: Node, *, power_loss: bool, away_s: float) -> None:
        node.power_off(power_loss=power_loss)
        self._world.at(away_s, node.power_on)

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
        for_good = self._world.rng.random() < 0.3 and not self._is_one_lost()
        machine.destroyed = machine.destroyed or for_good
        self._power_off(node, power_loss=True, away_s=self._world.within(5, 200))
        if for_good:
            self.report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="deleted"))
        else:
            self._report_loss(machine, boot_id)

    def confirm(self) -> None:
        """Of what is gone for good the operator reports once more that it is fenced, for the boot that the
        cell knows.

        Not of what the cell has to find out itself, unless the ledger was restored: then no service knows
        what ran there.
        """
        judge = self._lab.judge
        for node_id, node in self._lab.nodes.items():
            known = judge.book.nodes.get(node_id)
            if node.machine.destroyed and known is not None and (judge.has_lost or not node.machine.unproven):
                self.report(NodeLeft(node_id=node_id, boot_id=known.spec["boot_id"], proof="fenced"))

    def gone(self) -> None:
        """A machine is no more, and no operator confirms it: all that comes is the gateway's suspicion when
        the connection breaks."""
        node = self._node()
        if not node.machine.up or self._is_one_lost():
            return
        node.machine.destroyed = node.machine.unproven = True
        node.power_off(power_loss=True)
        self._world.at(self._world.within(*BROKEN_WITHIN_S), self.suspect_again)

    def _is_one_lost(self) -> bool:
        """Of two lost machines the cell would take the second for a mass loss, and wait for a person."""
        return any(node.machine.destroyed or node.machine.silent for node in self._lab.nodes.values())

    def suspect_again(self) -> None:
        """Of machines whose end no operator confirmed: their connection is broken."""
        for node in self._lab.nodes.values():
            if node.machine.unproven:
                self.report(NodeSuspected(node_id=node.machine.node_id, reason="its connection broke"))

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
        """An operator reports that a machine is fenced, and it is not: its tasks run on beside their
        successors."""
        node = self._node()
        machine = node.machine
        if machine.up and not machine.destroyed:
            self.suspected[machine.node_id] = None
            boot_id = machine.spec.boot_id
            self.report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof="fenced"))
            restart = "restarted by its operator"
            self._world.at(self._world.within(1, 30), lambda: node.reporter.kill(restart))

    def _report_loss(self, machine: Machine, boot_id: str) -> None:
        how = float(self._world.rng.random())
        if how < 0.6:
            proof: Any = "fenced" if how < 0.2 else "lease_outlived" if how < 0.4 else "deleted"
            self.report(NodeLeft(node_id=machine.node_id, boot_id=boot_id, proof=proof))
        elif how < 0.8:
            self.report(NodeSuspected(node_id=machine.node_id, reason="its lease was missed"))

    def vanish(self) -> None:
        """Most machines go at once, as when a switch room loses power."""
        nodes = [node for node in self._lab.nodes.values() if node.machine.up]
        away_s = self._world.within(5, 120)
        for node in nodes[: max(1, (3 * len(nodes) + 3) // 4)]:
            boot_id = node.machine.spec.boot_id
            self._power_off(node, power_loss=True, away_s=away_s + self._world.within(0, 30))
            if self._world.rng.random() < 0.9:
                node_id = node.machine.node_id
                self.report(NodeLeft(node_id=node_id, boot_id=boot_id, proof="lease_outlived"))
        if self._world.rng.random() < 0.5:
            self._world.at(self._world.within(1, 20), self.drain)

    def silence(self) -> None:
        """A machine is cut off: it works on, but neither reads nor appends."""
        node = self._node()
        process = node.reporter.process
        if process is None or not process.alive:
            return
        until_s = self._world.now_s + self._world.within(5, 150)
        process.sleep(until_s, "read orders", "append inputs", "ends")
        self._world.trace(f"{node.machine.node_id} is cut off until {until_s:.1f} s")
        if self._world.rng.random() < 0.5:
            self.report(NodeSuspected(node_id=node.machine.node_id, reason="it is silent"))

    def hang(self) -> None:
        """A reporter hangs and is ended, and its supervisor starts it late; the gateway notices that its
        connection ended."""
        node = self._node()
        if not node.machine.up or not node.reporter.alive:
            return
        node.reporter.enabled = False
        node.reporter.kill("hangs")
        self.report(NodeSuspected(node_id=node.machine.node_id, reason="its connection broke"))
        self._world.at(self._world.within(5, 150), lambda: self._supervised(node))

    def _supervised(self, node: Node) -> None:
        if node.machine.up:
            node.reporter.enabled = True
            node.reporter.start()

    def gpu(self) -> None:
        """A GPU breaks; repaired without a reboot now and then."""
        machine = self._node().machine
        process = self._lab.nodes[machine.node_id].reporter.process
        if not machine.up or process is None or not process.alive or machine.gpu_fault is None:
            return
        self.suspected[machine.node_id] = None
        gpu = machine.spec.gpus[int(self._world.rng.integers(len(machine.spec.gpus)))]
        fault = GpuFaulted(node_id=machine.node_id, gpu=gpu.index, uuid=gpu.uuid, fault="xid", code=79)
        if gpu.uuid not in machine.broken:
            # What the ledger has is a fault before, which was repaired.
            self._lab.judge.faults.pop(gpu.uuid, None)
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
        """The kernel kills a task's guardian; something of the task is left now and then, and may not die at
        once."""
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
        """A machine takes long to start programs, as with a cold cache or a busy file server; users lose
        patience."""
        machine = self._node().machine
        machine.slow_start = True
        self._world.at(self._world.within(10, 90), lambda: setattr(machine, "slow_start", False))
        if self._world.rng.random() < 0.5:
            until_s = self._world.now_s + self._world.within(*PATIENCE_S)

            def launching() -> list[str]:
                return list(machine.launcher.launching()) if machine.launcher is not None else []

            self._once(lambda: bool(launching()), lambda: self._lab.cancel(launching()[0]), until_s)

    def cordon(self) -> None:
        """An operator takes a node out of use, with or without its jobs, and back into use; now and then not
        before the calm."""
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
