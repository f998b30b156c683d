"""Real servers for the tests: one Postgres per test session and, where asked for, one Kafka per module.

`dsn` is a fresh database for each test; `kafka` (see tests/integration/conftest.py for variants with
identities) is the running broker. Both are started on first use and leave nothing behind.
"""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import asyncio
import contextlib
import itertools
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from infra.devservers.kafka import KafkaBroker, kafka_broker
from infra.devservers.parts import prepare_for
from penstock.cli.submission.ci import CI_VARIABLES
from penstock.runtime.keys.node_keys import OPERATOR_KEY
from penstock.runtime.database.postgres import resolve_dsn
from tests.support.node_reporter.forgeries import GATEWAYS
from tests.support.processes import orphans_with

os.environ.pop(
    "COLUMNS", None
)  # a parallel run sets it to 80; what a command prints into a pipe must not be cut

for name in ("CI", *(name for _, *groups in CI_VARIABLES for names in groups for name in names)):
    os.environ.pop(name, None)  # the CI that runs the tests is not the pipeline that they are about

pytest.register_assert_rewrite("tests.support.log.log_conformance")
pytest_plugins = ["tests.support.story", "tests.support.whole_run"]

# An example is never judged by its time: by default it fails beyond 200 ms, which the load of a machine
# decides.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

pytest_collection_finish = prepare_for  # minutes of building belong to no test

WORKER = "TEST_WORKER"
"""Environment variable: the test process from which another one stems. Not one of Penstock's, which tests
take away."""
ORPHANS_END_S = 10.0
"""So long a process may be idle after its parent's end, which it has to read; who waits for a processor or a
disk is not idle."""

Result = TypeVar("Result")
_names = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests end what they start, also tasks of node-reporters, which outlive those by design."""
    os.environ[WORKER] = str(os.getpid())
    yield
    marks = (f"{WORKER}={os.getpid()}\0".encode(), f"{tmp_path_factory.getbasetemp()}/".encode())
    left = orphans_with(*marks, within_s=ORPHANS_END_S)  # clock: of the idle, as above
    assert not left, "processes outlive the tests that have started them:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def operator_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The key that gateways and placers of all tests share, in their environment."""
    path = tmp_path_factory.mktemp("keys") / "operator.key"
    path.write_bytes(GATEWAYS)
    path.chmod(0o600)
    os.environ[OPERATOR_KEY] = str(path)
    yield path
    del os.environ[OPERATOR_KEY]


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """What a test sets in the environment ends with it: else the tests behind it depend on their order.

    Variables that a library adds when it is imported stay (scikit-learn's).
    """
    before = _environment()
    yield
    after = _environment()
    ours = {name for name in after.keys() - before.keys() if name.startswith("PENSTOCK_")}
    changed = ours | {name for name, value in before.items() if after.get(name) != value}
    os.environ.update(before)
    for name in ours:
        del os.environ[name]
    assert not changed, f"the test leaves a changed environment: {', '.join(sorted(changed))}"


def _environment() -> dict[str, str]:
    """Without what pytest itself sets for each test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


class BackgroundLoop:
    """An event loop in a thread that lives as long as the test session (servers end with their thread)."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test servers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def reachable_folder() -> Iterator[Path]:
    """A short path that the server's own user can reach, also when we are root (pytest closes its
    folders)."""
    with tempfile.TemporaryDirectory(prefix="pstest-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that a task's own user can enter."""
    with reachable_folder() as found:
        yield found


@pytest.fixture
def postgres_folder() -> Iterator[Path]:
    """A folder for a test that starts a Postgres of its own."""
    with reachable_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def postgres_dsn() -> Iterator[str]:
    """The administrator's DSN of one Postgres for the whole session."""
    loop = BackgroundLoop()
    with reachable_folder() as folder:
        dsn, server = loop.run(resolve_dsn(folder / "pg"))
        if server is not None:
            loop.run(_never_sync(dsn))
        yield dsn
        if server is not None:
            loop.run(server.stop())
    loop.close()


@pytest_asyncio.fixture
async def dsn(postgres_dsn: str) -> AsyncIterator[str]:
    """A database of its own for this test, removed afterwards."""
    name = f"test_{os.getpid()}_{next(_names)}"
    await _execute(postgres_dsn, f"CREATE DATABASE {name}")
    yield with_database(postgres_dsn, name)
    await _execute(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)")


def with_database(dsn: str, database: str) -> str:
    """The same server and user, another database."""
    head, _, rest = dsn.partition("://")
    address, _, tail = rest.partition("/")
    _, mark, parameters = tail.partition("?")
    return f"{head}://{address}/{database}{mark}{parameters}"


async def _never_sync(dsn: str) -> None:
    """No test cuts this server's power, and each `DROP DATABASE` would wait for the disk."""
    for statement in ("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"):
        await _execute(dsn, statement)


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaBroker]:
    """One plain broker for a module, without topics; tests take names of their own (`topic_name`).

    Not for the session: a broker without work still takes 4 % of a core.
    """
    with kafka_broker() as broker:
        yield broker


@pytest.fixture(scope="module")
def kafka_bootstrap(kafka: KafkaBroker) -> str:
    return kafka.bootstrap


@pytest.fixture
def topic_name() -> Callable[[str], str]:
    """Makes a topic name that no other test uses: `topic_name("ledger")`."""
    return lambda stem: f"penstock.{stem}.t{os.getpid()}n{next(_names)}"
