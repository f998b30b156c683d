"""Machines for one test: each with its own systemd, network address, host name, processes, and a file system
over this one's."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.installation.namespaces import network
from tests.support.story import told
from tests.support.waiting import wait_until

SYSTEMD = Path("/usr/lib/systemd/systemd")
GROUP = "penstock-machine"
HOME = pwd.getpwuid(0).pw_dir  # of root, in a machine as beside it
OWN_FILE_SYSTEM = """
set -eu
mount --make-rprivate /
mkdir -p "$FOLDER/groups" "$FOLDER/up" "$FOLDER/scratch" "$FOLDER/tree"
mount -t overlay overlay -o "lowerdir=/,upperdir=$FOLDER/up,workdir=$FOLDER/scratch" "$FOLDER/tree"
cd "$FOLDER/tree"
hostname "$NAME"
echo "$NAME" > etc/hostname
rm -f etc/hosts
cat "$FOLDER/hosts" > etc/hosts
"""
DESK = (
    OWN_FILE_SYSTEM
    + """
mount --rbind /proc proc; mount --rbind /sys sys; mount --rbind /dev dev
mkdir -p old; pivot_root . old
exec sleep infinity
"""
)
"""It has this machine's network, for packages."""
GROUP_OF_ITS_OWN = """
set -eu
mount --make-rprivate /
mkdir -p "$FOLDER/groups"
mount -t cgroup2 cgroup2 "$FOLDER/groups"
mkdir -p "$FOLDER/groups/$GROUP"
echo $$ > "$FOLDER/groups/$GROUP/cgroup.procs"
umount "$FOLDER/groups"
exec unshare --mount --uts --pid --ipc --cgroup --fork bash "$FOLDER/boot.sh"
"""
BOOT = (
    OWN_FILE_SYSTEM
    + """
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=1777 tmpfs dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/pts; ln -s pts/ptmx dev/ptmx; mkdir -m 1777 dev/shm; ln -s /proc/self/fd dev/fd
touch "$FOLDER/console" dev/console
mount --bind "$FOLDER/console" dev/console
mount -t tmpfs tmpfs usr/lib/systemd/system; mount -t tmpfs tmpfs usr/lib/systemd/system-generators
rm -rf etc/systemd/system; mkdir -p etc/systemd/system/service.d
for name in sysinit basic network-online multi-user shutdown; do
  printf '[Unit]\\nDescription=%s\\nDefaultDependencies=no\\n' $name > usr/lib/systemd/system/$name.target
done
echo Wants=machine.target >> usr/lib/systemd/system/multi-user.target
printf '[Service]\\nStandardOutput=append:/var/log/%%N.log\\nStandardError=inherit\\n' \\
  > etc/systemd/system/service.d/log.conf
cp "$FOLDER"/units/* etc/systemd/system/ 2>/dev/null || true
head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n' > etc/machine-id
mkdir -p old; pivot_root . old; umount -l old
export container=penstock
exec /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=console
"""
)


@dataclass
class Machine:
    """Runs a shell's text as its root. `init`: the process whose namespaces it has."""

    name: str
    address: str
    folder: Path
    holder: "subprocess.Popen[bytes]"
    directory: str = HOME

    @property
    def init(self) -> int:
        """Of `unshare --fork` the child, else the process itself."""
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        return int(children[0]) if children else self.holder.pid

    def run(self, text: str, env: Mapping[str, str] | None = None) -> str:
        """Its output. Fails with the output and the services' logs."""
        where = ["--mount", "--uts"] if self.directory != HOME else ["--all"]
        argv = [
            "nsenter",
            "-t",
            str(self.init),
            *where,
            "env",
            "-i",
            *(f"{k}={v}" for k, v in {**BARE, **(env or {})}.items()),
        ]
        argv += ["bash", "-euo", "pipefail", "-c", f"cd {self.directory}\n{text}"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, (
            f"{self.name}: status {done.returncode}\n{text}\n{done.stdout}\n{self.logs()}"
        )
        return done.stdout

    def logs(self) -> str:
        """The ends of its services' logs."""
        found = (
            sorted((self.folder / "up/var/log").glob("*.log"))
            if (self.folder / "up/var/log").exists()
            else []
        )
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2_000:]}" for path in found)


BARE = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
    **{name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_CERT"))},
}


@contextmanager
def machines(names: Sequence[str], folder: Path, directory: Path) -> Iterator[dict[str, Machine]]:
    """These machines and `desk`, whose shell begins in `directory`; skips the test where that is not
    allowed."""
    if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("nsenter") is None:
        pytest.skip("machines need root, systemd and nsenter (Debian: apt-get install systemd util-linux)")
    with ExitStack() as stack:
        here, spaces = stack.enter_context(network(len(names)))
        addresses = {"desk": here, **{name: space.address for name, space in zip(names, spaces, strict=True)}}
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in addresses.items()
        )
        found = {}
        for name, address in addresses.items():
            own = folder / name
            (own / "units").mkdir(parents=True)
            (own / "hosts").write_text(hosts)
            (own / "boot.sh").write_text(DESK if name == "desk" else BOOT)
            group = f"{GROUP}-{os.getpid()}-{name}"
            env = {**os.environ, "FOLDER": str(own), "NAME": name, "GROUP": group}
            if name == "desk":
                argv = ["unshare", "--mount", "--uts", "bash", str(own / "boot.sh")]
            else:
                (own / "group.sh").write_text(GROUP_OF_ITS_OWN)
                space = spaces[names.index(name)]
                argv = [*space.enter, "unshare", "--mount", "bash", str(own / "group.sh")]
            with (own / "boot.log").open("wb") as log:
                holder = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
            stack.callback(forget, own, group)
            stack.callback(end, holder)
            found[name] = Machine(name, address, own, holder, str(directory) if name == "desk" else HOME)
        for machine in found.values():
            until_up(machine)
        yield found


def until_up(machine: Machine) -> None:
    """Until its init answers. Skips the test where this machine gives none."""
    probe = "test -d /old" if machine.name == "desk" else "systemctl is-active -q multi-user.target"

    def up() -> bool:
        if machine.holder.poll() is not None:
            pytest.skip(f"no machine {machine.name} here: {(machine.folder / 'boot.log').read_text()}")
        with suppress(AssertionError, OSError):
            machine.run(probe)
            return True
        return False

    console = machine.folder / "console"
    with told(f"console of {machine.name}", console):
        wait_until(up, f"the boot of {machine.name}")


def end(holder: "subprocess.Popen[bytes]") -> None:
    """With all its processes: those of its process namespace end with the first."""
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    with suppress(OSError):
        for child in children.read_text().split():
            os.kill(int(child), 9)
    holder.kill()
    holder.wait()


def forget(folder: Path, group: str) -> None:
    """Its control groups, which are empty now, and its file system of some hundred MiB."""
    script = (
        'mount -t cgroup2 cgroup2 "$1/groups"; cd "$1/groups"; '
        'for _ in $(seq 50); do find "$2" -depth -type d -exec rmdir {} + && exit; sleep 0.1; done'
    )  # until the kernel has buried the last process
    argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(folder), group]
    subprocess.run(argv, capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
