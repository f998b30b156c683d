"""infra/deploy/README.md, block by block: on machines made of namespaces (`make deploy-check`), and, in the
CI run, its units and commands."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from infra.devservers.build_cache import INFRA, REPOSITORY
from infra.devservers.kafka import obtain_jars
from penstock.cli.app import tree
from penstock.runtime.database.postgres_binaries import find_binaries
from tests.support.installation.machines import Machine, machines
from tests.support.waiting import wait_until

DEPLOY = INFRA / "deploy"
PAGE = (DEPLOY / "README.md").read_text()
NAMES = ("store", "control", "gpu-1", "gpu-2", "gpu-3")
NODES = NAMES[2:]
SERVICES = ("placer", "estimator", "batcher", "migrator", "contention-guard", "projector", "gateway")
PROGRAMS = Path("/opt/penstock/bin")
OF_A_RELEASE = ("libs", "services", "pyproject.toml", "requirements.lock")
FORMER, LATTER = "0.0.1", "999.0.0"

T = TypeVar("T")


class Block(NamedTuple):
    """Shell text of the page for some machines, under a heading such as `4. The services`."""

    heading: str
    where: tuple[str, ...]
    only: str
    """What a machine must have for it, in words; empty: nothing."""
    text: str


def blocks() -> list[Block]:
    found, heading = [], ""
    for part in re.finditer(
        r"^## ([^\n]+)$|^```sh\n# ([^\n(]+?)(?: \(([^\n]+)\))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    ):
        heading = part[1] or heading
        if part[2]:
            found.append(Block(heading, tuple(part[2].split(", ")), part[3] or "", part[4]))
    return found


def test_every_block_names_its_machine_and_is_a_shells() -> None:
    """A reader must know where to type it, and it must be possible to type it."""
    assert len(blocks()) == PAGE.count("```sh"), "one without a machine in its first line"
    for block in blocks():
        assert set(block.where) <= {"desk", *NAMES}, block.where
        checked = subprocess.run(
            ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_what_the_page_runs_exists() -> None:
    """A renamed command, option, file or setting is found here, not by a reader."""
    text = "".join(block.text for block in blocks())
    for path in set(re.findall(r"infra/[\w./@-]+", text)):
        assert (REPOSITORY / path).exists(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"^make (\S+)", text, re.MULTILINE)):
        assert f"\n{target}: " in makefile, target
    for module in set(re.findall(r"-m (penstock[\w.]+)", text)):
        assert (REPOSITORY / "libs" / Path(*module.split("."))).with_suffix(".py").exists(), module
    for line in re.findall(r"bin/penstock (.+)", text.replace("\\\n", "")):
        words = [word for word in shlex.split(line, comments=True) if not word.startswith("-")]
        command, *rest = words
        group = tree().entries[command]
        assert not group.entries or rest[0] in group.entries, line
    code = "".join(
        path.read_text() for folder in ("libs", "services") for path in (REPOSITORY / folder).rglob("*.py")
    )
    settings = set(re.findall(r'"(PENSTOCK_\w+)=', text)) - {"PENSTOCK_NODE_OPTIONS"}  # of the unit
    assert settings > {"PENSTOCK_LOG_FILE", "PENSTOCK_TOKENS"}
    assert not [name for name in settings if name not in code]


def test_the_units_are_what_systemd_takes(tmp_path: Path) -> None:
    """A misspelt line of a unit is ignored by systemd at its start, with a warning that is easily missed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the units are not verified: no systemd-analyze here (Debian: apt-get install systemd)")
    own = Path(sys.executable).parent
    for unit in DEPLOY.glob("*.service"):
        if unit.name == "kafka.service":
            continue  # its program is not in Python's environment
        text = unit.read_text().replace("%i", "placer") if "@" in unit.name else unit.read_text()
        for program in re.findall(rf"{PROGRAMS}/(\S+)", text):
            assert (own / program).exists(), program
        there = tmp_path / unit.name.replace("@", "-placer")
        text = re.sub(
            "^User=penstock.*", "User=root", text.replace(str(PROGRAMS), str(own)), flags=re.MULTILINE
        )
        there.write_text(text)
        argv = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(there)]
        checked = subprocess.run(argv, capture_output=True, text=True, check=False)
        ours = [line for line in checked.stderr.splitlines() if there.name in line]
        assert (checked.returncode, ours) == (0, []), checked.stderr


@pytest.mark.parametrize(("unit", "exposure"), [("penstock@.service", 2.0), ("kafka.service", 3.2)])
def test_the_units_leave_little_to_a_thief(tmp_path: Path, unit: str, exposure: float) -> None:
    """A service that was taken over has its own files and connections. `exposure`: by systemd, 0 to 10."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the units are not analysed: no systemd-analyze here (Debian: apt-get install systemd)")
    text = (DEPLOY / unit).read_text()
    assert "LimitCORE=0\n" in text, "an image of the memory holds passwords"
    there = tmp_path / unit.replace("@", "@placer")
    there.write_text(text)
    argv = ["systemd-analyze", "security", "--offline=true", f"--threshold={exposure * 10:.0f}", str(there)]
    checked = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    """With what the page takes for granted: Kafka's programs, a Postgres, and Python's environment in the
    checkout."""
    folder = tmp_path_factory.mktemp("machines")
    with machines(NAMES, folder, REPOSITORY) as found:
        prepare_desk(found, folder)
        prepare_store(found["store"])
        yield found


def prepare_desk(found: dict[str, Machine], folder: Path) -> None:
    """`scp` reaches the machines by their namespaces; `.venv` is the environment of this test. The code is
    that of an older commit."""
    inits = "".join(f"  root@{name}) init={found[name].init};;\n" for name in NAMES)
    script = f"""#!/bin/bash
set -euo pipefail
[[ $1 = -qr ]] && host="${{3%%:*}}" folder="${{3#*:}}"
case $host in
{inits}esac
unpack="umask 077; mkdir '$folder' && tar -C '$folder' --no-same-owner -xpf -"
tar -C "$2" -cf - . | nsenter -t $init --all -- sh -c "$unpack"
"""
    desk = found["desk"]
    desk.run(f"cat > /usr/local/bin/scp <<'END'\n{script}END\nchmod +x /usr/local/bin/scp")
    desk.run(f"test -e .venv || ln -s {sys.prefix} .venv; touch .venv/.ready; rm -rf deploy")
    commit = git("log", "-1", "--format=%H~", "--", "schemas")
    git("archive", "-o", str(folder / "former.tar"), commit, *OF_A_RELEASE)
    desk.run(f"rm -rf {' '.join(OF_A_RELEASE)}; tar -xf /old{folder}/former.tar; {version_is(FORMER)}")


def git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def version_is(version: str) -> str:
    return f"sed -i 's/^__version__ = .*/__version__ = \"{version}\"/' libs/penstock/__init__.py"


def take_the_new_version(desk: Machine) -> None:
    """What `git pull` does. `/old`: the file system of this machine."""
    names = " ".join(OF_A_RELEASE)
    desk.run(f"rm -rf {names}; (cd /old{REPOSITORY} && tar -cf - {names}) | tar -xf -; {version_is(LATTER)}")


def prepare_store(store: Machine) -> None:
    """As Kafka's archive and a distribution's packages leave them."""
    jars = obtain_jars()
    store.run(f"mkdir -p /opt/kafka/bin; cp -r {jars} /opt/kafka/libs")
    for program, main in (
        ("kafka-storage.sh", "kafka.tools.StorageTool"),
        ("kafka-server-start.sh", "kafka.Kafka"),
    ):
        java = (
            f"exec {shutil.which('java')} -Xmx256m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp "
            f'"/opt/kafka/libs/*" {main} "$@"'
        )
        path = f"/opt/kafka/bin/{program}"
        store.run(
            f"printf '#!/bin/sh\\n%s\\n' {shlex.quote(java)} > {path}; chmod +x {path}; chmod -R go+rX "
            "/opt/kafka"
        )
    programs, data = find_binaries().folder, "/var/lib/postgresql/penstock"
    unit = (
        f"[Service]\nUser=postgres\nExecStart={programs}/postgres -D {data} -k "
        "/run/postgresql\nRuntimeDirectory=postgresql\n"
    )
    store.run(
        f"id -u postgres || useradd --system postgres; command -v psql || ln -s {programs}/psql "
        "/usr/local/bin/psql\n"
        f"install -d -o postgres -m 700 /var/lib/postgresql {data}\n"
        f"runuser -u postgres -- {programs}/initdb -D {data} --auth-local=peer --auth-host=scram-sha-256 "
        ">/dev/null\n"
        f"printf '{unit}' > /etc/systemd/system/postgresql.service; systemctl daemon-reload; systemctl start "
        "postgresql\n"
        "for _ in $(seq 100); do runuser -u postgres -- psql -qc 'SELECT 1' >/dev/null 2>&1 && exit; sleep "
        "0.1; done; exit 1"
    )


def follow(
    cluster: dict[str, Machine],
    *headings: str,
    only: str = "",
    after: Callable[[Block], None] = lambda _: None,
) -> dict[str, str]:
    """Runs the blocks under these headings, machines of one block side by side; the outputs by machine.

    `only`: blocks with this text. `after`: is called after each block.
    """
    outputs = dict.fromkeys(cluster, "")
    for block in blocks():
        if only not in block.text:
            continue
        if block.heading[0] not in headings or (
            block.only == "with GPUs" and shutil.which("nvidia-smi") is None
        ):
            continue
        text = block.text.replace(
            '"PENSTOCK_NODE_OPTIONS="', '"PENSTOCK_NODE_OPTIONS=--virtual-gpus 2 --cores 2"'
        )
        if sys.prefix != str(REPOSITORY / ".venv"):
            text = (
                f"export PYTHONPATH={REPOSITORY}/libs:{REPOSITORY}/services:{REPOSITORY}\n{text}"
                if block.where == ("desk",)
                else text
            )
        with ThreadPoolExecutor() as pool:
            done = list(pool.map(lambda name, text=text: cluster[name].run(text), block.where))
        print(f"{block.heading} on {', '.join(block.where)}")
        for name, output in zip(block.where, done, strict=True):
            outputs[name] += output
        after(block)
    return outputs


def version_of(machine: Machine, unit: str) -> str:
    """Of the code that the unit's process runs, by the folder of its Python."""
    return machine.run(
        f"pid=$(systemctl show -p MainPID --value {unit}); python=$(tr '\\0' '\\n' < /proc/$pid/cmdline | "
        "head -1)\n"
        "$python -c \"from importlib.metadata import version; print(version('penstock'))\""
    ).strip()


def doctor_is_content(cluster: dict[str, Machine]) -> None:
    outputs = follow(cluster, "6", only="penstock doctor")
    for name in ("control", *NODES):
        assert "✗" not in outputs[name], outputs[name]
        assert outputs[name].count("✓") > 10, outputs[name]


def what_a_thief_gets(control: Machine) -> str:
    """What each service's user can read of the others': files, memory, processes as its unit shows them."""
    return control.run(
        f"""
for thief in {" ".join(SERVICES)}; do
  own=$(systemctl show -p MainPID --value penstock@$thief)
  test "$(stat -c %U /proc/$own)" = penstock-$thief || echo "$thief runs as $(stat -c %U /proc/$own)"
  grep -q '^Max core file size *0 *0 ' /proc/$own/limits || echo "$thief may leave an image of its memory"
  for victim in {" ".join(SERVICES)}; do
    test $thief = $victim && continue
    pid=$(systemctl show -p MainPID --value penstock@$victim)
    for file in /etc/penstock/$victim/* /proc/$pid/environ /proc/$pid/mem /var/lib/penstock/$victim/.; do
      runuser -u penstock-$thief -- test ! -r $file || echo "$thief reads $file"
    done
    nsenter -t $own -m runuser -u penstock-$thief -- test ! -e /proc/$pid ||
      echo "$thief sees the process of $victim"
  done
  runuser -u penstock-$thief -- test -r /etc/penstock/$thief/log-url || echo "$thief does not read its own"
done
"""
    )


def look_into_postgres(store: Machine) -> str:
    """Connections over the network that are not encrypted, and superusers who can log in there."""
    return store.run(
        """
cd /
runuser -u postgres -- psql -At penstock <<'END'
SELECT usename || ' is not encrypted' FROM pg_stat_activity JOIN pg_stat_ssl USING (pid)
    WHERE client_addr IS NOT NULL AND NOT ssl;
SELECT rolname || ' is a superuser' FROM pg_roles WHERE rolsuper AND rolcanlogin AND rolname <> 'postgres';
SELECT 'no connection' WHERE NOT EXISTS (SELECT FROM pg_stat_ssl WHERE ssl);
END
"""
    )


def penstock(desk: Machine, *words: str) -> str:
    settings = (
        "export PENSTOCK_SERVER=https://control:8742 PENSTOCK_CA=deploy/ca.pem "
        "PENSTOCK_TOKEN_FILE=deploy/my.token"
    )
    path = f"PYTHONPATH={REPOSITORY}/libs:{REPOSITORY}/services"
    return desk.run(f"{settings}; {path} .venv/bin/penstock {shlex.join(words)}")


def job(desk: Machine, job_id: str) -> dict[str, Any]:
    return dict(json.loads(penstock(desk, "describe", "job", job_id, "-o", "json")))


def until(holds: Callable[[], T | None]) -> T:
    """What it returns, once that is something and the gateway answers."""
    problem = ""

    def found() -> T | None:
        nonlocal problem
        try:
            return holds()
        except AssertionError as error:
            problem = str(error)
            return None

    value = wait_until(found, lambda: f"what holds in the end; {problem}")
    assert value is not None
    return value


def until_status(desk: Machine, job_id: str, status: str) -> dict[str, Any]:
    def holds() -> dict[str, Any] | None:
        found = job(desk, job_id)
        return found if found["status"] == status else None

    return until(holds)


def nodes_of(desk: Machine) -> dict[str, tuple[str, str]]:
    rows = json.loads(penstock(desk, "get", "nodes", "-o", "json"))["nodes"]
    return {row["node_id"]: (row["status"], row["address"]) for row in rows}


def places(found: dict[str, Any]) -> list[str]:
    return sorted({task["node_id"] for task in found["tasks"]})


@pytest.mark.slow
def test_the_page_is_followed_word_by_word(cluster: dict[str, Machine]) -> None:
    """Six machines that have nothing of Penstock; at the end jobs run, the doctor is content, and an upgrade
    stops no job."""
    desk = cluster["desk"]
    follow(cluster, *"12345")
    ready = {name: ("ready", cluster[name].address) for name in NODES}
    until(lambda: nodes_of(desk) == ready)
    outputs = follow(cluster, "6")
    assert len(places(until_status(desk, "first", "succeeded"))) > 1
    ranks = set(re.findall(r"(\d) of 3 meets at 10\.", outputs["desk"]))
    assert ranks == {"0", "1", "2"}, outputs["desk"]
    assert (what_a_thief_gets(cluster["control"]), look_into_postgres(cluster["store"])) == ("", "")
    identities = {cluster[name].run("sed 's/:[^:]*@.*//' /etc/penstock/log-url").strip() for name in NODES}
    assert identities == {f"kafka://node-{name}" for name in NODES}
    meet_over_machines(desk)
    script = "trap 'exit 9' TERM; until test -e /var/tmp/go; do sleep 0.5; done"
    submitted = penstock(desk, "submit", "--detach", "-o", "json", "--", "sh", "-c", script)
    long = json.loads(submitted)["job_id"]
    before = until_status(desk, long, "running")
    take_the_new_version(desk)

    def after(block: Block) -> None:
        """Services of the new version and reporters of the former one work together."""
        if block.where == ("control",):
            assert version_of(cluster["control"], "penstock@placer") == LATTER
            assert version_of(cluster["gpu-1"], "penstock-node-reporter") == FORMER
            submitted = until(lambda: penstock(desk, "submit", "--detach", "-o", "json", "--", "true"))
            until_status(desk, json.loads(submitted)["job_id"], "succeeded")

    follow(cluster, "8", after=after)
    until(lambda: nodes_of(desk) == ready)
    assert {version_of(cluster[name], "penstock-node-reporter") for name in NODES} == {LATTER}
    doctor_is_content(cluster)
    assert (what_a_thief_gets(cluster["control"]), look_into_postgres(cluster["store"])) == ("", "")
    [host] = places(until_status(desk, long, "running"))
    cluster[host].run("touch /var/tmp/go")
    after = until_status(desk, long, "succeeded")
    assert (after["attempt"], places(after)) == (before["attempt"], [host])
    assert {task["pid"] for task in after["tasks"]} == {task["pid"] for task in before["tasks"]}


def meet_over_machines(desk: Machine) -> None:
    """Three workers of two GPUs each, one on each node, open a connection to rank 0."""
    script = (
        "import os, socket, time\n"
        "place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    server = socket.create_server(place)\n"
        "    [server.accept()[0].sendall(b'x') for _ in range(2)]\n"
        "else:\n"
        "    while True:\n"
        "        try:\n"
        "            assert socket.create_connection(place).recv(1) == b'x'\n"
        "            break\n"
        "        except OSError:\n"
        "            time.sleep(0.1)\n"
    )
    words = ("--name", "meeting", "--workers", "3", "--gpus", "2", "--cores", "1")
    penstock(desk, "submit", *words, "--", "/usr/bin/python3", "-c", script)
    assert places(until_status(desk, "meeting", "succeeded")) == sorted(NODES)
