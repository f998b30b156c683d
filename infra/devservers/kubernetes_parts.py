"""Programs of a Kubernetes on loopback, built once, their command lines, and its users.

| part | programs |
|---|---|
| `kubernetes` | hollow kubelet, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl |
| `etcd` | etcd |
| `kwok` | KWOK, which plays kubelets and checks nothing; built only when asked for |
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.devservers.build_cache import INFRA
from infra.devservers.go_parts import obtain_program, obtain_programs, pinned

MODULE, ETCD_MODULE, KWOK_MODULE = "k8s.io/kubernetes", "go.etcd.io/etcd/server/v3", "sigs.k8s.io/kwok"
SERVER, CONTROLLERS, SCHEDULER = "kube-apiserver", "kube-controller-manager", "kube-scheduler"
PROGRAMS = (".", *(f"{MODULE}/cmd/{name}" for name in (SERVER, CONTROLLERS, SCHEDULER, "kubectl")))
"""Packages of `infra/kubernetes/kube`; the first is the hollow kubelet."""
VERSION_VARIABLES = ("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion")
STAGES = INFRA / "kubernetes" / "kwok" / "stages.yaml"
ADMIN, KUBELET = "admin", "hollow-kubelet"
SERVICE_ACCOUNT = "system:serviceaccount:"
GPU = "nvidia.com/gpu"


def pinned_version() -> str:
    """Kubernetes' version as `infra/kubernetes/kube/go.mod` pins it."""
    return pinned("kubernetes/kube", MODULE).lstrip("v")


def obtain_kubernetes() -> Path:
    """Folder of `PROGRAMS`, built once. Raises `LaunchError` with the remedy."""
    return obtain_programs(
        "kubernetes",
        pinned_version(),
        PROGRAMS,
        expected="6 to 20 minutes on two cores",
        override="PENSTOCK_KUBERNETES",
        folder="kubernetes/kube",
        stamps=dict.fromkeys(VERSION_VARIABLES, f"v{pinned_version()}"),
    )


def obtain_etcd() -> Path:
    """The `etcd` program, built once. Raises `LaunchError` with the remedy."""
    folder = "kubernetes/etcd"
    return obtain_program(
        "etcd",
        pinned(folder, ETCD_MODULE).lstrip("v"),
        ETCD_MODULE,
        expected="about a minute on two cores",
        override="PENSTOCK_ETCD",
        folder=folder,
    )


def obtain_kwok() -> Path:
    """The `kwok` program, built once. Raises `LaunchError` with the remedy."""
    folder = "kubernetes/kwok"
    return obtain_program(
        "kwok",
        pinned(folder, KWOK_MODULE).lstrip("v"),
        f"{KWOK_MODULE}/cmd/kwok",
        expected="2 to 4 minutes on two cores",
        override="PENSTOCK_KWOK",
        folder=folder,
    )


def obtain_parts() -> Path:
    """All that a cluster needs but KWOK, built once. Returns the folder of Kubernetes' programs. Raises
    `LaunchError` with the remedy."""
    obtain_etcd()
    return obtain_kubernetes()


@dataclass(frozen=True)
class Machine:
    """What a kubelet reports of its node."""

    gpus: int = 4
    """Devices of `nvidia.com/gpu`."""
    cpus: int = 32
    memory_mib: int = 131_072
    pods: int = 110
    """At the same time, at most."""
    labels: Mapping[str, str] | None = None


def etcd_command(program: Path, folder: Path, port: int, peer_port: int) -> list[str]:
    """One etcd whose records are in `folder`."""
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(program),
        "--name=only",
        f"--data-dir={folder}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=only={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        "--heartbeat-interval=20",
        "--election-timeout=200",  # ms: it elects itself at once
    ]


def server_command(
    programs: Path, etcd_port: int, port: int, pki: Path, tokens: Path, signing_key: Path
) -> list[str]:
    """kube-apiserver, which makes its own certificate in `pki`. `signing_key`: of service accounts."""
    return [
        str(programs / SERVER),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--etcd-compaction-interval=0",  # history goes when `compact_etcd` says so
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--advertise-address=127.0.0.1",
        f"--cert-dir={pki}",
        "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--authorization-mode=RBAC",
        f"--token-auth-file={tokens}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={signing_key}",
        f"--service-account-key-file={signing_key}",
        # They wait for kube-controller-manager.
        "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition,StorageObjectInUseProtection",
        "--profiling=false",
    ]


def client_command(programs: Path, name: str, kubeconfig: Path, port: int, pki: Path) -> list[str]:
    """kube-scheduler or kube-controller-manager, which makes a certificate of its own in `pki`."""
    return [
        str(programs / name),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={pki}",
        "--profiling=false",
    ]


def kubelet_command(
    programs: Path, name: str, machine: Machine, folder: Path, kubeconfig: Path, boot_id: str, lease_s: int
) -> list[str]:
    """A hollow kubelet, which opens no port and keeps its files in `folder`."""
    labels = ",".join(f"{key}={value}" for key, value in (machine.labels or {}).items())
    return [
        str(programs / "hollow-kubelet"),
        f"-name={name}",
        f"-kubeconfig={kubeconfig}",
        f"-folder={folder}",
        f"-boot-id={boot_id}",
        f"-cores={machine.cpus}",
        f"-memory-mib={machine.memory_mib}",
        f"-max-pods={machine.pods}",
        f"-lease-seconds={lease_s}",
        f"-devices={GPU}={machine.gpus}",
        *([f"-labels={labels}"] if labels else []),
    ]


def kwok_command(kubeconfig: Path, certificate: Path, port: int, node_port: int, lease_s: int) -> list[str]:
    """KWOK for nodes with the annotation `kwok.x-k8s.io/node: fake`. The key lies beside `certificate`."""
    return [
        str(obtain_kwok()),
        f"--kubeconfig={kubeconfig}",
        f"--config={STAGES}",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        "--node-ip=127.0.0.1",
        f"--node-port={node_port}",
        f"--server-address=127.0.0.1:{port}",
        "--cidr=127.64.0.0/16",
        f"--node-lease-duration-seconds={lease_s}",
        f"--tls-cert-file={certificate}",
        f"--tls-private-key-file={certificate.with_suffix('.key')}",
    ]


class Users:
    """Bearer tokens of people and service accounts, and the files with which they connect."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """Beside these names, `ADMIN` and `KUBELET` may do everything."""
        self._folder = folder
        self._tokens = {name: secrets.token_urlsafe(24) for name in (ADMIN, KUBELET, *names)}

    @property
    def table(self) -> Path:
        """File for `--token-auth-file`."""
        return self._folder / "tokens.csv"

    def token(self, user: str) -> str:
        """Raises `KeyError` for an unknown user."""
        return self._tokens[user]

    def token_file(self, user: str) -> Path:
        """Holds the user's present token, as a pod's mounted one does."""
        return self._folder / f"{user.replace(':', '_')}.token"

    def kubeconfig(self, user: str) -> Path:
        """Names `token_file`."""
        return self._folder / f"{user.replace(':', '_')}.kubeconfig"

    def rotate(self, user: str) -> None:
        """Another token, in the files after `write`. Raises `KeyError` for an unknown user."""
        if user not in self._tokens:
            raise KeyError(user)
        self._tokens[user] = secrets.token_urlsafe(24)

    def write(self, url: str, ca: Path) -> None:
        """All files, mode 0600."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        rows = [f'{token},{user},{user},"{_groups(user)}"\n' for user, token in self._tokens.items()]
        _write_private(self.table, "".join(rows))
        for user, token in self._tokens.items():
            _write_private(self.token_file(user), token)
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {"name": "penstock", "cluster": {"server": url, "certificate-authority": str(ca)}}
                ],
                "users": [{"name": user, "user": {"tokenFile": str(self.token_file(user))}}],
                "contexts": [{"name": "penstock", "context": {"cluster": "penstock", "user": user}}],
                "current-context": "penstock",
            }
            _write_private(self.kubeconfig(user), json.dumps(config))


def _groups(user: str) -> str:
    """Those of the API server's own rules, with commas between them."""
    if user in (ADMIN, KUBELET):
        return "system:masters"
    if user.startswith(SERVICE_ACCOUNT):
        namespace = user.removeprefix(SERVICE_ACCOUNT).partition(":")[0]
        return f"system:serviceaccounts,system:serviceaccounts:{namespace}"
    return ""


def _write_private(path: Path, text: str) -> None:
    """Whole or not at all, as kubelets write tokens: a reader may come at any moment."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.touch(mode=0o600)
    unfinished.write_text(text)
    unfinished.rename(path)
