"""Simulated kubelets: admission by allocatable resources, containers that really run, terminal phases, boots.

What runs is here (`Kubelet.running`), apart from what the API server says: a judge compares both.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from penstock_services.node_reporter.kubernetes.core.requests import Request, amounts, request_of
from tests.support.kubernetes.simulated_api import ApiError, ApiServer, Json, pod_of

GPU = "nvidia.com/gpu"
Schedule = Callable[[int, Callable[[], None]], None]


class Kubelet:
    """One node. `lasts_ms`: how long a container runs before it ends by itself with code 0."""

    def __init__(
        self, api: ApiServer, schedule: Schedule, rng: Random, name: str, *, gpus: int, cores: int = 16
    ) -> None:
        self.api, self.schedule, self.rng, self.name = api, schedule, rng, name
        self.boot = 1
        self.machine = f"machine-{name}"
        self.powered = True
        self.taints: list[Json] = []
        self.unschedulable = False
        self.ready = True
        self.allocatable: Json = {"cpu": str(cores), "memory": "64Gi", GPU: str(gpus), "pods": "110"}
        self.running: dict[str, Json] = {}
        """Uid → pod whose container runs on the machine."""
        self.admitted: dict[str, Json] = {}
        self.refused: list[str] = []
        self.restarts = False
        """Whether containers of an earlier boot are started again, as when a runtime has lost its records."""
        self.exit_codes: dict[str, int] = {}
        api.listeners.append(self.soon)
        self._due = False
        self.publish()

    def describe(self) -> Json:
        """The node's object."""
        return {
            "metadata": {
                "name": self.name,
                "uid": f"node-{self.name}",
                "labels": {"nvidia.com/gpu.product": "NVIDIA-A100", "nvidia.com/gpu.memory": "40960"},
            },
            "spec": {"unschedulable": self.unschedulable, "taints": self.taints},
            "status": {
                "allocatable": self.allocatable,
                "conditions": [{"type": "Ready", "status": "True" if self.ready else "Unknown"}],
                "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
                "nodeInfo": {"bootID": f"{self.name}-boot-{self.boot}", "machineID": self.machine},
            },
        }

    def publish(self) -> None:
        """Its status, as the API server has it from now on."""
        self.api.put_node(self.describe(), self.name)

    def soon(self) -> None:
        """Looks at its pods shortly."""
        if not self._due and self.powered:
            self._due = True
            self.schedule(self.rng.randint(5, 60), self.sync)

    def sync(self) -> None:
        """Does what its pods ask for."""
        self._due = False
        if not self.powered:
            return
        for pod in list(self.api.pods.values()):
            if pod["spec"].get("nodeName") == self.name:
                self._sync(pod)
        for uid in list(self.running):
            if self._present(uid) is None:  # removed by force: the container ends some time later
                self.schedule(self.rng.randint(100, 30_000), partial(self._killed, uid))

    def _sync(self, pod: Json) -> None:
        uid, meta = pod["metadata"]["uid"], pod["metadata"]
        terminal = pod["status"]["phase"] in ("Succeeded", "Failed")
        if meta.get("deletionTimestamp"):
            if uid in self.running:
                grace_ms = 1_000 * meta["deletionGracePeriodSeconds"]
                self.schedule(self.rng.randint(0, grace_ms or 1), lambda: self._killed(uid))
            elif not terminal and not pod["status"].get("containerStatuses"):
                self._status(pod, "Failed", code=None)
                self._finally(pod)
            elif not terminal or self._unseen(pod):
                self._status(pod, "Failed", code=137, reason="ContainerStatusUnknown")
                self._finally(pod)
            elif meta["deletionGracePeriodSeconds"]:
                self._finally(pod)
            return
        if terminal or uid in self.running or uid in self.admitted:
            return
        if pod["status"].get("containerStatuses") and not self.restarts:  # of an earlier boot
            self._status(pod, "Failed", code=255, reason="Unknown")
            return
        lacks = self._lacks(pod)
        if lacks:
            self.refused.append(meta["name"])
            self._status(pod, "Failed", code=None, why=f"OutOf{lacks}")
            return
        self.admitted[uid] = pod
        boot = self.boot
        self.schedule(self.rng.randint(50, 900), lambda: self._start(uid, boot))

    def _unseen(self, pod: Json) -> bool:
        """Whether somebody else has failed the pod, so that its containers' ends are not in its status."""
        statuses = pod["status"].get("containerStatuses", [])
        collected = bool(pod["status"].get("conditions"))
        return collected and not any("terminated" in found["state"] for found in statuses)

    def _lacks(self, pod: Json) -> str:
        left = amounts(self.allocatable, GPU)
        for found in self.admitted.values():
            left = left.less(request_of(pod_of(found), GPU))
        lacks = Request(*left).lacks(request_of(pod_of(pod), GPU))
        return {"cpu_milli": "cpu", "memory_bytes": "memory", "gpus": GPU}[lacks[0]] if lacks else ""

    def _start(self, uid: str, boot: int) -> None:
        pod = self._present(uid)
        if boot != self.boot or not self.powered or uid not in self.admitted:
            return
        if pod is None or pod["metadata"].get("deletionTimestamp"):
            self.admitted.pop(uid, None)
            self.soon()
            return
        self.running[uid] = pod
        self._status(pod, "Running", begun=self.api.stamp())
        annotations = pod["metadata"].get("annotations", {})
        lasts_ms = int(annotations.get("test/lasts_ms", self.rng.randint(500, 20_000)))
        self.schedule(lasts_ms, lambda: self._ended(uid, boot))

    def _ended(self, uid: str, boot: int) -> None:
        if boot == self.boot and self.powered and uid in self.running:
            code = self.exit_codes.get(self.running[uid]["metadata"]["name"], 0)
            self._over(uid, "Succeeded" if code == 0 else "Failed", code)

    def _killed(self, uid: str) -> None:
        if self.powered and uid in self.running:
            self._over(uid, "Failed", 143)

    def _over(self, uid: str, phase: str, code: int) -> None:
        self.running.pop(uid)
        self.admitted.pop(uid, None)
        pod = self._present(uid)
        if pod is not None:
            self._status(pod, phase, code=code)
            if pod["metadata"].get("deletionTimestamp"):
                self._finally(pod)

    def _finally(self, pod: Json) -> None:
        """The last DELETE of a kubelet, with grace 0."""
        self.admitted.pop(pod["metadata"]["uid"], None)
        try:
            self.api.delete(_key(pod), pod["metadata"]["uid"], 0)
        except ApiError:
            return

    def _present(self, uid: str) -> Json | None:
        return next((pod for pod in self.api.pods.values() if pod["metadata"]["uid"] == uid), None)

    def _status(
        self,
        pod: Json,
        phase: str,
        *,
        begun: str = "",
        code: int | None = None,
        reason: str = "",
        why: str = "",
    ) -> None:
        statuses = pod["status"].get("containerStatuses", [])
        state: Json = {}
        if begun:
            state = {"running": {"startedAt": begun}}
        elif code is not None:
            former = statuses[0]["state"].get("running", {}) if statuses else {}
            text = reason or ("Completed" if code == 0 else "Error")
            state = {
                "terminated": {
                    "exitCode": code,
                    "reason": text,
                    "startedAt": former.get("startedAt"),
                    "finishedAt": self.api.stamp(),
                }
            }
        status: Json = {"phase": phase, "reason": why, "message": f"Node {self.name}: {why}" if why else ""}
        if pod["status"].get("conditions"):
            status["conditions"] = pod["status"]["conditions"]
        if state:
            status["containerStatuses"] = [{"name": "task", "state": state}]
        try:
            self.api.set_status(_key(pod), pod["metadata"]["uid"], status)
        except ApiError:
            return

    # ------------------------------------------------------------------------------------------------ faults

    def power_off(self) -> None:
        """Everything on the machine ends at once; nobody says so."""
        self.powered = False
        self.running.clear()
        self.admitted.clear()

    def power_on(self) -> None:
        """Boots anew and registers."""
        self.boot += 1
        self.powered = self.ready = True
        self.taints = []
        self.publish()
        self.soon()


def _key(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def foreign_pod(name: str, node: str, **requests: Any) -> Json:
    """A pod of somebody else, already bound."""
    return {
        "metadata": {"name": name, "namespace": "others", "annotations": {"test/lasts_ms": "3000"}},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": {"requests": requests}}]},
    }
