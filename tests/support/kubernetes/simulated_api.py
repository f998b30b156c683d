"""In-memory API server of pods and nodes: versions, uids, preconditions, finalizers, the fence's admission, a
bounded history of changes, and requests that get no answer.

Modelled after Kubernetes 1.36 as it behaved on this project's machines. Not modelled: anything but pods,
nodes and one ConfigMap.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod

Json = dict[str, Any]
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
HISTORY = 2_000  # changes that a watch can resume over; beyond, 410 Gone


class ApiError(Exception):
    """An answer that is not 2xx."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Gone(Exception):
    """410: the version to resume from is no longer in the history."""


class ApiServer:
    """Pods by `NAMESPACE/NAME`, nodes by name. `now_ms` reads the simulation's time."""

    def __init__(self, now_ms: Callable[[], int], *, fenced: bool = True) -> None:
        self.now_ms = now_ms
        self.fenced = fenced
        """Whether the door's policy is installed."""
        self.pods: dict[str, Json] = {}
        self.nodes: dict[str, Json] = {}
        self.term = 0
        """The fence's ConfigMap."""
        self.admitted_term = 0
        """The term that admission compares with: its cache lags."""
        self.quota_text = ""
        """Set: creates in Penstock's namespace are refused with this text."""
        self.listeners: list[Callable[[], None]] = []
        self._version = 100
        self._history: list[tuple[int, str, str, Json]] = []
        self._uids = 0

    # ---------------------------------------------------------------------------------------------- reading

    def read(self, kind: str) -> tuple[list[Json], int]:
        """A consistent list, and its version."""
        found = self.pods if kind == "pods" else self.nodes
        return copy.deepcopy(list(found.values())), self._version

    def since(self, kind: str, version: int) -> Iterator[tuple[int, str, Json]]:
        """Changes after this version. Raises `Gone`."""
        if self._history and version < self._history[0][0] - 1:
            raise Gone
        for at, of, change, found in self._history:
            if of == kind and at > version:
                yield at, change, found

    def get(self, key: str) -> Json:
        """Raises `ApiError` 404."""
        if key not in self.pods:
            raise ApiError(404, f'pods "{key}" not found')
        return copy.deepcopy(self.pods[key])

    # ---------------------------------------------------------------------------------------------- writing

    def raise_fence(self, above: int, own: int) -> int:
        """Compare-and-set of the term. Raises `ApiError` 409 where `own` is not the present one."""
        if own and self.term != own:
            raise ApiError(409, f"the term is {self.term}")
        self.term = max(self.term, above) + 1
        return self.term

    def create(self, manifest: Json) -> Json:
        """POST of a pod. Raises `ApiError`."""
        pod = copy.deepcopy(manifest)
        meta, spec = pod["metadata"], pod["spec"]
        key = f"{meta['namespace']}/{meta['name']}"
        term = int(meta.get("annotations", {}).get("penstock.dev/term", self.admitted_term))
        if self.fenced and term < self.admitted_term:
            raise ApiError(403, f"penstock-term: term {term} is over; {self.admitted_term} has begun")
        if self.quota_text and meta["namespace"] == "penstock":
            raise ApiError(403, self.quota_text)
        if not NAME.match(meta["name"]) or len(meta["name"]) > 63:
            raise ApiError(422, f"{meta['name']}: not a DNS-1123 label")
        if spec.get("nodeName") and spec.get("schedulingGates"):
            raise ApiError(422, "nodeName cannot be set until all schedulingGates have been cleared")
        if key in self.pods:
            raise ApiError(409, f'pods "{key}" already exists')
        self._uids += 1
        meta["uid"] = f"uid-{self._uids}"
        for found in spec["containers"]:
            resources = found.setdefault("resources", {})
            resources["requests"] = {**resources.get("limits", {}), **resources.get("requests", {})}
        pod["status"] = {"phase": "Pending"}
        self.pods[key] = pod
        self._changed("pods", "ADDED", pod)
        return copy.deepcopy(pod)

    def delete(self, key: str, uid: str, grace_s: int) -> None:
        """DELETE with a uid. The grace can only be shortened. Raises `ApiError`."""
        pod = self._known(key, uid)
        meta = pod["metadata"]
        over = pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName")
        grace_s = 0 if over else min(grace_s, meta.get("deletionGracePeriodSeconds", grace_s))
        meta["deletionTimestamp"] = self.stamp()
        meta["deletionGracePeriodSeconds"] = grace_s
        self._changed("pods", "MODIFIED", pod)
        self._collected(key)

    def release(self, key: str, uid: str, version: str, finalizers: tuple[str, ...]) -> None:
        """PATCH of the finalizers. Raises `ApiError`."""
        pod = self._known(key, uid)
        if version and pod["metadata"]["resourceVersion"] != version:
            raise ApiError(409, "the object has been modified")
        pod["metadata"]["finalizers"] = list(finalizers)
        self._changed("pods", "MODIFIED", pod)
        self._collected(key)

    def set_status(self, key: str, uid: str, status: Json) -> None:
        """A kubelet's PATCH of the status. Raises `ApiError`."""
        pod = self._known(key, uid)
        pod["status"] = status
        self._changed("pods", "MODIFIED", pod)

    def put_node(self, node: Json | None, name: str) -> None:
        """A node is added, changed, or (None) deleted."""
        if node is None:
            if name in self.nodes:
                self._changed("nodes", "DELETED", self.nodes.pop(name))
            return
        change = "MODIFIED" if name in self.nodes else "ADDED"
        self.nodes[name] = copy.deepcopy(node)
        self._changed("nodes", change, self.nodes[name])

    def stamp(self) -> str:
        """The present time as RFC 3339, in whole seconds."""
        seconds = self.now_ms() // 1_000
        day, rest = divmod(seconds, 86_400)
        return f"2026-01-{1 + day % 28:02d}T{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}Z"

    def _known(self, key: str, uid: str) -> Json:
        if key not in self.pods:
            raise ApiError(404, f'pods "{key}" not found')
        if self.pods[key]["metadata"]["uid"] != uid:
            raise ApiError(409, "the UID in the precondition does not match")
        return self.pods[key]

    def _collected(self, key: str) -> None:
        meta = self.pods[key]["metadata"]
        if (
            meta.get("deletionTimestamp")
            and not meta["deletionGracePeriodSeconds"]
            and not meta.get("finalizers")
        ):
            self._changed("pods", "DELETED", self.pods.pop(key))

    def _changed(self, kind: str, change: str, found: Json) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, kind, change, copy.deepcopy(found)))
        del self._history[:-HISTORY]
        for listener in self.listeners:
            listener()


def pod_of(found: Json) -> Pod:
    """The pod as the reporter decodes it."""
    return msgspec.json.decode(json.dumps(found), type=Pod)


def node_of(found: Json) -> Node:
    """The node as the reporter decodes it."""
    return msgspec.json.decode(json.dumps(found), type=Node)
