"""A cell whose nodes are those of a real Kubernetes cluster: API server, hollow kubelets, Penstock's services
and the cluster's reporter as processes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infra.devservers.build_cache import INFRA
from infra.devservers.kubernetes import KubernetesCluster
from infra.devservers.processes import Child, free_port
from tests.support.installation.system import Gateway, clean_environment, file_ends, python_service
from tests.support.story import told
from tests.support.waiting import left_s

FILES = INFRA / "helm" / "penstock" / "files"
NAMESPACE = "penstock"
REPORTER = f"system:serviceaccount:{NAMESPACE}:penstock-node-reporter"
IMAGE = {"environment": {"container": "registry.example/train:1"}}
ONE_GPU: dict[str, Any] = {**IMAGE, "resources": {"gpus": 1, "cores": 1, "host_memory_mib": 256}}
"""Parts of a submission."""
SERVICES = ("placer", "estimator", "projector", "gateway")


def install(cluster: KubernetesCluster, *names: str) -> None:
    """The namespace, and these of the chart's files (`rbac`, `fence`, `door`)."""
    cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for name in names:
        cluster.kubectl("apply", "-f", "-", stdin=(FILES / f"{name}.yaml").read_text())


class KubernetesCell:
    """Services on the embedded log in `dsn`, and the reporter of `cluster`, called `k8s`."""

    def __init__(
        self, cluster: KubernetesCluster, dsn: str, folder: Path, kubeconfig: Path | None = None
    ) -> None:
        """`kubeconfig`: of the reporter; None: as if the chart had installed it."""
        self.cluster, self._folder = cluster, folder
        self._kubeconfig = kubeconfig or cluster.kubeconfig(REPORTER)
        port = free_port()
        self.gateway = Gateway(f"http://127.0.0.1:{port}")
        self._env = clean_environment(
            PENSTOCK_LOG=dsn,
            PENSTOCK_DSN=dsn,
            PENSTOCK_GATEWAY_BIND=f"127.0.0.1:{port}",
            PENSTOCK_OPERATOR_KEY="trust-log",
        )
        self._services = [self._started(name, name) for name in SERVICES]
        self.reporter = self.start_reporter()

    def start_reporter(self, *options: str, name: str = "reporter") -> Child:
        """Up to its joining; another one takes over from the first."""
        given = ["--backend", "kubernetes", "--cluster", "k8s", "--kubeconfig", str(self._kubeconfig)]
        given += ["--gpu-memory-mib", "16384"]  # hollow kubelets have no labels of their GPUs
        return self._started("node_reporter", name, *given, *options)

    def pods(self) -> list[dict[str, Any]]:
        """Of the namespace."""
        answer = self.cluster.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")
        found: list[dict[str, Any]] = answer.body["items"]
        return found

    def stop(self) -> None:
        for child in (self.reporter, *reversed(self._services)):
            child.stop(max(0.0, left_s()))

    def logs(self) -> str:
        """Their ends."""
        return file_ends(self._folder.glob("*.log"))

    def _started(self, service: str, name: str, *arguments: str) -> Child:
        return python_service(service, arguments, log_path=self._folder / f"{name}.log", env=self._env)


@contextmanager
def kubernetes_cell(
    cluster: KubernetesCluster, dsn: str, folder: Path, kubeconfig: Path | None = None
) -> Iterator[KubernetesCell]:
    """A failure tells the ends of all logs."""
    with ExitStack() as stack:
        stack.enter_context(told("logs of the cell", lambda: file_ends(folder.glob("*.log"))))
        cell = KubernetesCell(cluster, dsn, folder, kubeconfig)
        stack.callback(cell.stop)
        yield cell


def requests_of(pod: dict[str, Any]) -> dict[str, str]:
    """Resources of its only container."""
    [container] = pod["spec"]["containers"]
    found: dict[str, str] = container["resources"]["requests"]
    return found
