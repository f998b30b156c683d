"""A real Kafka broker on loopback: one Java process, KRaft, with or without identities.

    with kafka_broker(folder) as broker:
        broker.create_topics()
        ... broker.bootstrap ...

All calls block the calling thread (a start takes seconds); from a coroutine use `asyncio.to_thread`.
Nothing here was tested against power loss.
"""

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
import shutil
import socket
import struct
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from infra.devservers.build_cache import INFRA, Part, build_environment, copy_files, obtain, require
from infra.devservers.certificates import make_certificates
from infra.devservers.processes import (
    Child,
    LaunchError,
    as_command,
    free_port,
    on_free_ports,
    run_to_end,
    until_signalled,
)
from penstock.errors import LogError
from penstock.log.kafka.kafka import KafkaLog, Sasl
from penstock.log.kafka_setup import grant_all
from penstock.log.topic_settings import topic_partitions
from penstock.tls import client_context

Security = Literal["plain", "scram", "tls"]
"""Without identities; with names and passwords; the same over encrypted connections."""
Result = TypeVar("Result")

POM = INFRA / "kafka" / "pom.xml"
ACLS = INFRA / "kafka" / "acls.yaml"
JAVA_REMEDY = "Install a Java 17 runtime (Debian: apt-get install openjdk-17-jdk-headless)"
MAVEN_REMEDY = "Install Maven (Debian: apt-get install maven)"
JVM_OPTIONS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",  # one small heap: the parallel collectors only add threads
    "-XX:TieredStopAtLevel=1",  # start in 2 s and not 5
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
)
BUILD_TIMEOUT_S = 900.0
ARCHIVE_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 10.0  # a broker that has begun to listen answers once it is ready; then it is asked again
_API_VERSIONS_KEY = 18
ADMIN = "admin"
ARCHIVE = "classes.jsa"
CHECKPOINT = "bootstrap.checkpoint"
"""An empty disk's first metadata: the same for every broker without identities."""


def pinned_version() -> str:
    """Kafka's version as `infra/kafka/pom.xml` pins it."""
    found = ElementTree.parse(POM).find("{*}properties/{*}kafka.version")
    if found is None or not found.text:
        raise LaunchError(f"{POM} names no kafka.version")
    return found.text


def acl_table() -> dict[str, dict[str, list[str]]]:
    """Identity → "write" | "read" → topic names, as in `infra/kafka/acls.yaml`."""
    table: dict[str, dict[str, list[str]]] = yaml.safe_load(ACLS.read_text())
    return table


def _build(folder: Path) -> None:
    copy_files([POM], folder)
    argv = ["mvn", "-q", "-B", "-ntp", "-f", str(folder / POM.name), "dependency:copy-dependencies"]
    argv += ["-DincludeScope=runtime", f"-DoutputDirectory={folder / 'jars'}"]
    run_to_end(
        "maven", argv, log_path=folder / "build.log", timeout_s=BUILD_TIMEOUT_S, env=build_environment()
    )


def obtain_jars() -> Path:
    """Folder of the broker's jars, fetched once. Raises `LaunchError` with the remedy."""
    found = obtain(
        Part(
            name="kafka",
            version=pinned_version(),
            pins=(POM,),
            needs=(("java", JAVA_REMEDY), ("mvn", MAVEN_REMEDY)),
            expected="about 10 seconds",
            override="PENSTOCK_KAFKA_JARS",
            build=_build,
        )
    )
    return found / "jars" if (found / "jars").is_dir() else found


def class_archive(java: str, jars: Path) -> Path:
    """The JVM's archive of the broker's classes (class data sharing), made once by running a broker: it
    halves the start's time. Beside it lies that broker's `CHECKPOINT`.

    A JVM whose archive is missing or does not fit loads its classes from the jars. Raises `LaunchError`.
    """
    release = Path(java).resolve().parents[1] / "release"
    facts = [str(jars), *JVM_OPTIONS, release.read_text() if release.is_file() else java, CHECKPOINT]

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as place:
            writing = (*JVM_OPTIONS, f"-XX:ArchiveClassesAtExit={folder / ARCHIVE}")
            broker = KafkaBroker(Path(place), jvm_options=writing)
            try:
                broker.start()
                shutil.copy(broker.data / CHECKPOINT, folder)
                broker.create_topics()
            finally:
                broker.stop(ARCHIVE_TIMEOUT_S)

    part = Part(
        name="kafka-classes",
        version=f"{pinned_version()}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}",
        pins=(POM,),
        needs=(),
        expected="about 10 seconds",
        override="PENSTOCK_KAFKA_CLASSES",
        build=build,
    )
    found = obtain(part)
    return found / ARCHIVE if found.is_dir() else found


def obtain_parts() -> Path:
    """All that a broker needs, fetched or made once. Returns the folder of its jars. Raises `LaunchError`
    with the remedy."""
    jars = obtain_jars()
    class_archive(require("java", JAVA_REMEDY), jars)
    return jars


class KafkaBroker:
    """One broker in `folder`, on the same ports for all its lives, so that clients can reconnect."""

    def __init__(
        self,
        folder: Path,
        *,
        security: Security = "plain",
        granted: bool = True,
        node_id: int = 1,
        jvm_options: Sequence[str] | None = None,
    ) -> None:
        """`granted`: with identities, each has its rights from the start; else each has none yet."""
        self.folder = folder
        self.node_id = node_id
        self.security = security
        self._granted = granted
        self.passwords: dict[str, str] = {}
        """Identity → password; empty without identities."""
        if security != "plain":
            self.passwords = {name: secrets.token_urlsafe(18) for name in (ADMIN, *acl_table())}
        self._controller_password = secrets.token_urlsafe(18)
        self._java = require("java", JAVA_REMEDY)
        jars = obtain_jars()
        self._classpath = f"{jars}/*"
        archive = None if jvm_options else class_archive(self._java, jars)
        self._jvm_options = jvm_options or (*JVM_OPTIONS, f"-XX:SharedArchiveFile={archive}")
        self._checkpoint = archive.with_name(CHECKPOINT) if archive and security == "plain" else None
        self._child: Child | None = None
        self.port = self.controller_port = 0

    @property
    def bootstrap(self) -> str:
        """`127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Raises `LaunchError` when the broker was never started."""
        if self._child is None:
            raise LaunchError("the broker was not started")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def url(self, identity: str | None = None) -> str:
        """For `PENSTOCK_LOG`: `kafka://[identity:password@]127.0.0.1:PORT`. Passwords are URL-safe."""
        names = "" if identity is None else f"{identity}:{self.passwords[identity]}@"
        return f"kafka://{names}{self.bootstrap}" + (f"?ca={self.ca}" if self.ca else "")

    @property
    def ca(self) -> str | None:
        """PEM file of the authority that signed this broker's certificate; None without encryption."""
        return str(self.folder / "ca.pem") if self.security == "tls" else None

    def client_settings(self, identity: str | None = None) -> dict[str, Any]:
        """Keyword arguments with which an aiokafka client connects as this identity."""
        settings: dict[str, Any] = {"bootstrap_servers": self.bootstrap}
        if identity is not None:
            settings |= {
                "security_protocol": "SASL_SSL" if self.ca else "SASL_PLAINTEXT",
                "ssl_context": client_context(self.ca, "ca") if self.ca else None,
                "sasl_mechanism": "SCRAM-SHA-256",
                "sasl_plain_username": identity,
                "sasl_plain_password": self.passwords[identity],
            }
        return settings

    def start(self) -> None:
        """Starts (the first time: formats) and waits for ready. Raises `LaunchError` with the log's tail."""
        if self.running:
            return
        if self.port:
            self.launch()
            self.wait_ready()
            return
        on_free_ports(self._start_anew)
        if self.security != "plain" and self._granted:
            _in_own_loop(self._grant())

    def _start_anew(self) -> None:
        """On new ports, with an empty disk."""
        self.choose_ports()
        self.prepare([self], new_cluster_id())
        self.launch()
        self.wait_ready()

    def stop(self, grace_s: float = 10.0) -> None:
        """Orderly end (SIGTERM, then SIGKILL); the records stay. Idempotent."""
        if self._child is not None:
            self._child.stop(grace_s)

    def kill9(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._child is not None:
            self._child.kill9()

    def restart(self) -> None:
        """Ends the process if it still runs and starts it again with the same ports and records."""
        self.stop()
        self.start()

    def create_topics(self, topics: Mapping[str, int] | None = None) -> None:
        """Topic name → partitions; Penstock's own by default. Existing ones are left as they are."""
        _in_own_loop(self._create_topics(topic_partitions() if topics is None else topics))

    def choose_ports(self) -> None:
        """Before `prepare`: chooses ports that are free at this moment, for clients and for the other
        controllers."""
        self.port, self.controller_port = free_port(), free_port()

    def prepare(self, voters: "Sequence[KafkaBroker]", cluster_id: str) -> None:
        """Writes the settings and an empty disk for one cluster of these brokers; their ports must be
        chosen."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        words = {
            "@NODE_ID@": str(self.node_id),
            "@PORT@": str(self.port),
            "@CONTROLLER_PORT@": str(self.controller_port),
            "@VOTERS@": ",".join(f"{each.node_id}@127.0.0.1:{each.controller_port}" for each in voters),
            "@FOLDER@": str(self.folder),
            "@CLIENT_PROTOCOL@": "SASL_SSL" if self.ca else "SASL_PLAINTEXT",
            "@ADMIN_PASSWORD@": self.passwords.get(ADMIN, ""),
            "@CONTROLLER_PASSWORD@": self._controller_password,
        }
        files = ["broker", "plain"] if self.security == "plain" else ["broker", "scram"]
        if self.ca:
            files.append("tls")
            make_certificates(self.folder)
        text = "".join((INFRA / "kafka" / f"{name}.properties").read_text() for name in files)
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        self._properties.touch(mode=0o600)  # before the passwords are in it
        self._properties.write_text(text)
        self._format(cluster_id)

    @property
    def data(self) -> Path:
        """The folder of its disk."""
        return self.folder / "data"

    @property
    def _properties(self) -> Path:
        return self.folder / "server.properties"

    def _format(self, cluster_id: str) -> None:
        """By Kafka's tool, or as that has done it once: its JVM takes a processor for nearly a second."""
        if self._checkpoint is not None and self._checkpoint.is_file():
            names = {"cluster.id": cluster_id, "node.id": self.node_id, "directory.id": new_cluster_id()}
            lines = [f"{name}={value}\n" for name, value in ({"version": 1} | names).items()]
            self.data.mkdir()
            (self.data / "meta.properties").write_text("".join(lines))
            shutil.copy(self._checkpoint, self.data)
            return
        argv = [self._java, *self._jvm_options, "-cp", self._classpath, "kafka.tools.StorageTool", "format"]
        # "=": an id may begin with a dash and would be read as another option
        argv += [f"--cluster-id={cluster_id}", "--config", str(self._properties)]
        for identity, password in self.passwords.items():
            argv += ["--add-scram", f"SCRAM-SHA-256=[name={identity},password={password}]"]
        run_to_end("kafka format", argv, log_path=self.folder / "format.log")

    def launch(self) -> None:
        """After `prepare`: starts the process, which is not ready yet."""
        argv = [self._java, *self._jvm_options, "-cp", self._classpath, "kafka.Kafka", str(self._properties)]
        self._child = Child(f"kafka {self.node_id}", argv, log_path=self.folder / "kafka.log")

    def wait_ready(self, others: "Sequence[KafkaBroker]" = ()) -> None:
        """After `launch`. Raises `LaunchError`, and ends the process, when it or one of the others exits
        first."""
        assert self._child is not None
        needs = [broker._child for broker in others if broker._child is not None]
        try:
            self._child.wait_ready(lambda: answers_api_versions(self.port, self.ca), needs=needs)
        except BaseException:
            self._child.kill9()
            raise

    async def _create_topics(self, topics: Mapping[str, int]) -> None:
        async with self._administrator() as log:
            await log.create(topics)

    async def _grant(self) -> None:
        async with self._administrator() as log:
            await grant_all(log, acl_table())

    @contextlib.asynccontextmanager
    async def _administrator(self) -> AsyncIterator[KafkaLog]:
        """Raises `LaunchError` where Kafka refuses a request."""
        sasl = Sasl(ADMIN, self.passwords[ADMIN]) if self.passwords else None
        log = KafkaLog(self.bootstrap, ADMIN, sasl=sasl, ca=self.ca)
        try:
            yield await log.start()
        except LogError as error:
            raise LaunchError(str(error)) from error
        finally:
            await log.close()


class KafkaCluster:
    """Brokers that hold copies of each other's records, each of them a controller as well; without
    identities."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.brokers = [
            KafkaBroker(folder / f"broker-{number}", node_id=number) for number in range(1, count + 1)
        ]

    def url(self) -> str:
        """For `PENSTOCK_LOG`: names every broker, since any of them may be down."""
        return f"kafka://{','.join(broker.bootstrap for broker in self.brokers)}"

    def broker(self, node_id: int) -> KafkaBroker:
        """The broker with this Kafka node id."""
        return next(broker for broker in self.brokers if broker.node_id == node_id)

    def start(self) -> None:
        """The first start, all brokers at once. Raises `LaunchError` with the log's tail."""
        on_free_ports(self._start_anew)

    def _start_anew(self) -> None:
        """On new ports, with empty disks; ends those that an attempt before has started."""
        self.kill9()
        cluster_id = new_cluster_id()
        for broker in self.brokers:
            broker.choose_ports()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda broker: broker.prepare(self.brokers, cluster_id), self.brokers))
        self.start_stopped()

    def start_stopped(self) -> None:
        """Starts the brokers that do not run, with the same ports and records."""
        stopped = [broker for broker in self.brokers if not broker.running]
        for broker in stopped:
            broker.launch()
        for broker in stopped:
            broker.wait_ready(stopped)

    def kill9(self) -> None:
        """SIGKILL to all brokers."""
        for broker in self.brokers:
            broker.kill9()


@contextlib.contextmanager
def kafka_cluster(count: int = 3) -> Iterator[KafkaCluster]:
    """A started cluster; afterwards no process and no file is left. Raises `LaunchError`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kafka-")))
        cluster = KafkaCluster(folder, count)
        stack.callback(cluster.kill9)
        cluster.start()
        yield cluster


def new_cluster_id() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")


def answers_api_versions(port: int, ca: str | None = None) -> bool:
    """Whether a broker on 127.0.0.1:`port` answers Kafka's first request; it does so before any login."""
    client_id = b"penstock-probe"
    body = struct.pack(">hhih", _API_VERSIONS_KEY, 0, 1, len(client_id)) + client_id
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PROBE_TIMEOUT_S)
            )
            if ca is not None:
                encrypted = client_context(ca, "ca").wrap_socket(connection, server_hostname="127.0.0.1")
                connection = stack.enter_context(encrypted)
            connection.sendall(struct.pack(">i", len(body)) + body)
            answer = connection.makefile("rb").read(10)  # size, correlation id, error code
    except OSError:
        return False
    return len(answer) == 10 and struct.unpack(">ih", answer[4:]) == (1, 0)


def _in_own_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Runs it in another thread, since the caller's thread may already run a loop."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()


@contextlib.contextmanager
def kafka_broker(
    folder: Path | None = None, *, security: Security = "plain", granted: bool = True
) -> Iterator[KafkaBroker]:
    """A started broker; afterwards no process and, unless `folder` was given, no file is left.

    The caller creates its topics (`create_topics`). Raises `LaunchError`.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-kafka-")))
        broker = KafkaBroker(folder, security=security, granted=granted)
        stack.callback(broker.kill9)  # its records are needed no more
        broker.start()
        yield broker


def main() -> int:
    """`make kafka`."""
    ArgumentParser(description="A real Kafka broker on loopback, until Ctrl-C.").parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

    def serve() -> None:
        with kafka_broker() as broker:
            broker.create_topics()
            until_signalled(
                f"Kafka {pinned_version()} is ready on {broker.bootstrap} (process {broker.pid}); Ctrl-C "
                "ends it.\n"
                f"Penstock's topics are there. In another shell:\n\n  export PENSTOCK_LOG={broker.url()}\n"
            )

    return as_command(serve)


if __name__ == "__main__":
    sys.exit(main())
