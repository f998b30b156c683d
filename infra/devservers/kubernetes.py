"""A real Kubernetes cluster on loopback, without containers: etcd, kube-apiserver, hollow kubelets.

    with kubernetes_cluster(users=["penstock"]) as cluster:
        cluster.add_node("gpu-1", gpus=4)
        ... cluster.kubeconfig("penstock") ...

Hollow kubelets are real ones without containers: they refuse what does not fit, resize, and end pods. The
annotation `penstock.test/run-for: 500ms` ends a pod by itself, with `penstock.test/exit-code`. kube-scheduler
and kube-controller-manager run where asked for. A user has no rights until a role gives some, but for
`ADMIN`. All calls block the calling thread. Nothing here was tested against power loss.
"""

import base64
import contextlib
import json
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infra.devservers.certificates import make_signing_key
from infra.devservers.kubernetes_parts import (
    ADMIN,
    CONTROLLERS,
    GPU,
    KUBELET,
    SCHEDULER,
    SERVER,
    Machine,
    Users,
    client_command,
    etcd_command,
    kubelet_command,
    kwok_command,
    obtain_etcd,
    obtain_kubernetes,
    pinned_version,
    server_command,
)
from infra.devservers.processes import (
    Child,
    LaunchError,
    as_command,
    free_port,
    on_free_ports,
    until_signalled,
)

ETCD, KWOK = "etcd", "kwok"
PROBE_TIMEOUT_S = 5.0  # of one look at a server's health; then it is asked again
LEASE_S = 40  # a kubelet's usual value
CREATED, OK = 201, 200


class Answer(NamedTuple):
    """Of the API server to one request."""

    status: int
    body: Any
    """Decoded JSON, or text."""


class KubernetesCluster:
    """One cluster in `folder`, whose servers keep their ports and records for all their lives."""

    def __init__(
        self,
        folder: Path,
        *,
        users: Sequence[str] = (),
        controllers: bool = False,
        scheduler: bool = False,
        lease_s: int = LEASE_S,
        server_options: Sequence[str] = (),
    ) -> None:
        """Starts nothing yet. Raises `LaunchError` where a part cannot be had.

        `folder`: a path of at most 40 bytes, since kubelets make sockets in it. `users`: each has a token;
        `system:serviceaccount:NAMESPACE:NAME` is one as well. `lease_s`: a node that is silent for so long
        is NotReady, which `controllers` alone find. `server_options`: more options of kube-apiserver.
        """
        self.folder = folder
        self.users = Users(folder / "users", users)
        self.port = 0
        self._programs, self._etcd_program = obtain_kubernetes(), obtain_etcd()
        self._clients = [CONTROLLERS] * controllers + [SCHEDULER] * scheduler
        self._lease_s = lease_s
        self._server_options = tuple(server_options)
        self._children: dict[str, Child] = {}
        self._machines: dict[str, tuple[Machine, str]] = {}
        """Node → its machine and boot id."""
        self._etcd_port = self._peer_port = 0
        self._trust: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """`https://127.0.0.1:PORT`."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def ca(self) -> Path:
        """PEM file of the authority that signed the server's certificate."""
        return self.folder / "pki" / "apiserver.crt"

    @property
    def pids(self) -> dict[str, int]:
        """Program or node → number of its process, of those that run."""
        return {name: child.pid for name, child in self._children.items() if child.running}

    def token(self, user: str = ADMIN) -> str:
        """The user's present bearer token. Raises `KeyError` for an unknown user."""
        return self.users.token(user)

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """File with which clients connect as this user. It names `users.token_file(user)`."""
        return self.users.kubeconfig(user)

    def start(self) -> None:
        """Starts an empty cluster and waits until it answers. Raises `LaunchError` with the log's tail."""
        on_free_ports(self._start_anew)

    def _start_anew(self) -> None:
        """On new ports, with nothing in etcd."""
        self.stop()
        for name in ("etcd", "pki"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._children, self._trust = {}, None
        self._etcd_port, self._peer_port, self.port = free_port(), free_port(), free_port()
        self.users.write(self.url, self.ca)
        make_signing_key(self._signing_key)
        try:
            self.restart_etcd()
            self.restart_server()
            ports = {name: free_port() for name in self._clients}
            for name, port in ports.items():
                self._launch_client(name, port)
            for name, port in ports.items():
                self._wait_client(name, port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGKILL to all of its processes. Idempotent."""
        for child in reversed(self._children.values()):
            child.kill9()

    def pause_server(self) -> None:
        """SIGSTOP to kube-apiserver: connections stay open, and nothing is answered."""
        self._children[SERVER].pause()

    def resume_server(self) -> None:
        """SIGCONT, after `pause_server`."""
        self._children[SERVER].resume()

    def kill_server(self) -> None:
        """SIGKILL to kube-apiserver; returns when it is gone."""
        self._children[SERVER].kill9()

    def restart_server(self) -> None:
        """Ends kube-apiserver if it runs, starts it on its port and waits until it answers. Raises
        `LaunchError`."""
        argv = server_command(
            self._programs, self._etcd_port, self.port, self.ca.parent, self.users.table, self._signing_key
        )
        self._launch(SERVER, [*argv, *self._server_options])
        self._children[SERVER].wait_ready(self._server_ready, needs=[self._children[ETCD]])

    def kill_etcd(self) -> None:
        """SIGKILL to etcd; returns when it is gone."""
        self._children[ETCD].kill9()

    def restart_etcd(self) -> None:
        """Ends etcd if it runs, starts it with its records and waits until it answers. Raises
        `LaunchError`."""
        argv = etcd_command(self._etcd_program, self.folder / "etcd", self._etcd_port, self._peer_port)
        self._launch(ETCD, argv)
        self._children[ETCD].wait_ready(lambda: _answers(f"http://127.0.0.1:{self._etcd_port}/health"))

    def compact_etcd(self) -> int:
        """Drops the history in etcd up to its present revision, and returns that.

        kube-apiserver goes on serving older versions from its memory: a watch from before gets 410 only after
        `restart_server`.
        """
        head = self._etcd("range", {"key": base64.b64encode(b"/").decode()})["header"]
        self._etcd("compaction", {"revision": head["revision"], "physical": True})
        return int(head["revision"])

    def rotate_token(self, user: str) -> None:
        """Gives the user another token, in the files as well; the one before gets 401 from then on.

        It restarts kube-apiserver, which reads tokens only when it starts. Raises `KeyError` for an unknown
        user, and `LaunchError`.
        """
        self.users.rotate(user)
        self.kill_server()
        self.users.write(self.url, self.ca)
        self.restart_server()

    def add_node(
        self,
        name: str,
        gpus: int = 4,
        *,
        cpus: int = 32,
        memory_mib: int = 131_072,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Starts a hollow kubelet and waits until its node is Ready. Raises `LaunchError`."""
        self.add_nodes([name], Machine(gpus, cpus, memory_mib, labels=labels))

    def add_nodes(self, names: Sequence[str], machine: Machine | None = None) -> None:
        """Starts hollow kubelets (70 MiB each) at once and waits until all nodes are Ready. Raises
        `LaunchError`."""
        for name in names:
            self._launch_node(name, machine or Machine(), secrets.token_hex(16))
        for name in names:
            self._wait_node(name)

    def kill_node(self, name: str) -> None:
        """SIGKILL to the node's kubelet: its Node object and its pods stay in the API."""
        self._children[name].kill9()

    def restart_node(self, name: str, *, rebooted: bool = False) -> None:
        """Starts the node's kubelet again and waits until the node is Ready. Raises `LaunchError`.

        `rebooted`: with another boot id. The kubelet finds no containers in either case: its runtime ended
        with it.
        """
        machine, boot_id = self._machines[name]
        self._launch_node(name, machine, secrets.token_hex(16) if rebooted else boot_id)
        self._wait_node(name)

    def pause_node(self, name: str) -> None:
        """SIGSTOP to the node's kubelet: it falls silent."""
        self._children[name].pause()

    def resume_node(self, name: str) -> None:
        """SIGCONT, after `pause_node`."""
        self._children[name].resume()

    def start_kwok(self) -> None:
        """Starts KWOK, the kubelet of `add_simulated_nodes`, which refuses nothing. Raises `LaunchError`."""
        port = free_port()
        self._launch(KWOK, kwok_command(self.kubeconfig(), self.ca, port, free_port(), self._lease_s))
        self._children[KWOK].wait_ready(lambda: _answers(f"http://127.0.0.1:{port}/readyz"))

    def add_simulated_nodes(self, names: Sequence[str], machine: Machine | None = None) -> None:
        """Nodes for KWOK, which makes them Ready a moment later. Raises `LaunchError`."""
        of = machine or Machine()
        room = {"cpu": str(of.cpus), "memory": f"{of.memory_mib}Mi", "pods": str(of.pods), GPU: str(of.gpus)}
        for name in names:
            labels = {"kubernetes.io/hostname": name, **(of.labels or {})}
            metadata = {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": labels}
            status = {"capacity": room, "allocatable": room, "nodeInfo": {"bootID": secrets.token_hex(16)}}
            answer = self.request("POST", "/api/v1/nodes", {"metadata": metadata, "status": status})
            if answer.status != CREATED:
                raise LaunchError(f"node {name}: {answer.status} {answer.body}")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        user: str = ADMIN,
        content_type: str = "application/json",
        timeout_s: float | None = None,
    ) -> Answer:
        """One call of the API, also where it is refused. Raises `OSError` where nobody answers.

        `timeout_s` None: as long as the server holds the connection.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token(user)}", "Content-Type": content_type}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        if self._trust is None:
            self._trust = ssl.create_default_context(cafile=self.ca)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._trust) as answer:
                return Answer(answer.status, _decoded(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _decoded(error.read()))

    def kubectl(self, *words: str, stdin: str = "", user: str = ADMIN) -> str:
        """What `kubectl WORDS` prints. Raises `LaunchError` with its complaint."""
        argv = [str(self._programs / "kubectl"), f"--kubeconfig={self.kubeconfig(user)}"]
        argv += [f"--cache-dir={self.folder / 'kubectl'}", *words]
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LaunchError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    @property
    def _signing_key(self) -> Path:
        return self.folder / "service-accounts.key"

    def _launch(self, name: str, argv: Sequence[str]) -> None:
        """In the place of the process with this name, which ends first."""
        if name in self._children:
            self._children[name].kill9()
        self._children[name] = Child(name, argv, log_path=self.folder / f"{name}.log")

    def _launch_client(self, name: str, port: int) -> None:
        argv = client_command(self._programs, name, self.kubeconfig(), port, self.folder / name)
        if name == CONTROLLERS:
            argv += [f"--node-monitor-grace-period={self._lease_s}s", "--node-monitor-period=1s"]
            argv += [f"--service-account-private-key-file={self._signing_key}", f"--root-ca-file={self.ca}"]
        self._launch(name, argv)

    def _wait_client(self, name: str, port: int) -> None:
        certificate = self.folder / name / f"{name}.crt"
        health = f"https://127.0.0.1:{port}/healthz"
        self._children[name].wait_ready(lambda: certificate.exists() and _answers(health, certificate))

    def _launch_node(self, name: str, machine: Machine, boot_id: str) -> None:
        # a short name, for the sockets in the folder
        folder = Path(tempfile.mkdtemp(prefix="n", dir=self.folder))
        kubeconfig = self.kubeconfig(KUBELET)
        argv = kubelet_command(self._programs, name, machine, folder, kubeconfig, boot_id, self._lease_s)
        self._launch(name, argv)
        self._machines[name] = (machine, boot_id)

    def _wait_node(self, name: str) -> None:
        self._children[name].wait_ready(lambda: self._node_ready(name), needs=[self._children[SERVER]])

    def _node_ready(self, name: str) -> bool:
        """By its status, with this start's boot id: the one before may have left a Ready."""
        try:
            answer = self.request("GET", f"/api/v1/nodes/{name}", timeout_s=PROBE_TIMEOUT_S)
        except OSError:
            return False
        if answer.status != OK:
            return False
        status, (machine, boot_id) = answer.body["status"], self._machines[name]
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        gpus = int(status.get("allocatable", {}).get(GPU, 0))
        return bool(
            conditions.get("Ready") == "True"
            and gpus == machine.gpus
            and status["nodeInfo"]["bootID"] == boot_id
        )

    def _server_ready(self) -> bool:
        try:
            return self.request("GET", "/readyz", timeout_s=PROBE_TIMEOUT_S).status == OK
        except OSError:  # it does not listen, or has no certificate yet
            return False

    def _etcd(self, call: str, body: Mapping[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self._etcd_port}/v3/kv/{call}"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            return json.loads(answer.read())


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _answers(url: str, certificate: Path | None = None) -> bool:
    """Whether a GET gives 200."""
    try:
        trust = None if certificate is None else ssl.create_default_context(cafile=certificate)
        with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT_S, context=trust) as answer:
            return bool(answer.status == OK)
    except OSError:
        return False


@contextlib.contextmanager
def kubernetes_cluster(
    *,
    users: Sequence[str] = (),
    controllers: bool = False,
    scheduler: bool = False,
    lease_s: int = LEASE_S,
    server_options: Sequence[str] = (),
) -> Iterator[KubernetesCluster]:
    """A started cluster without nodes; afterwards no process and no file is left. Its arguments are those of
    `KubernetesCluster`. Raises `LaunchError`."""
    # a short path, whatever TMPDIR says
    with tempfile.TemporaryDirectory(prefix="pskube-", dir="/tmp") as folder:
        cluster = KubernetesCluster(
            Path(folder),
            users=users,
            controllers=controllers,
            scheduler=scheduler,
            lease_s=lease_s,
            server_options=server_options,
        )
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main() -> int:
    """`make kube`."""
    parser = ArgumentParser(description="A real Kubernetes cluster on loopback, until Ctrl-C.")
    parser.add_argument("--nodes", type=int, default=2, help="hollow kubelets, 70 MiB each")
    parser.add_argument("--gpus", type=int, default=4, help="of each node")
    parser.add_argument("--controllers", action="store_true", help="run kube-controller-manager")
    parser.add_argument("--scheduler", action="store_true", help="run kube-scheduler")
    options = parser.parse_args()

    def serve() -> None:
        with kubernetes_cluster(controllers=options.controllers, scheduler=options.scheduler) as cluster:
            names = [f"node-{number}" for number in range(options.nodes)]
            cluster.add_nodes(names, Machine(gpus=options.gpus))
            until_signalled(
                f"Kubernetes {pinned_version()} is ready on {cluster.url}, with {options.nodes} nodes of "
                f"{options.gpus} GPUs; Ctrl-C ends it and forgets everything.\nIn another shell:\n\n"
                f"  export KUBECONFIG={cluster.kubeconfig()}\n"
                f"  {obtain_kubernetes()}/kubectl get nodes\n"
            )

    return as_command(serve)


if __name__ == "__main__":
    sys.exit(main())
