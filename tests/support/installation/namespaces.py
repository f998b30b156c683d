"""Machines of a small network on this one: network namespaces on a bridge, each with an address of its
own."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

NETWORKS = 256  # of 16 addresses each, for as many at once on one machine
FIRST_HOST = 1  # of the network: the machine that runs the tests


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Machine:
    """A namespace. `enter` goes before a command that runs there; the first machine is the one that runs the
    tests."""

    name: str
    address: str

    @property
    def enter(self) -> Sequence[str]:
        return ("ip", "netns", "exec", self.name)


@contextmanager
def own_number() -> Iterator[int]:
    """0 to `NETWORKS` - 1: of a network that no other process on this machine has; free again when this one
    ends, however."""
    for number in range(NETWORKS):
        with Path(f"/tmp/penstock-test-network-{number}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            for index in range(FIRST_HOST + 16):  # of a process that was killed
                subprocess.run(["ip", "netns", "del", f"penstock-{number}-{index}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"pen-br{number}"], capture_output=True)
            yield number
            return
    pytest.fail(f"{NETWORKS} test networks are in use on this machine")


@contextmanager
def network(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """This machine's address in a new network, and `count` machines there; skips the test where that is not
    allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network of namespaces needs root and `ip`")
    with ExitStack() as stack:
        number = stack.enter_context(own_number())
        addresses = [f"10.214.{number}.{host}" for host in range(FIRST_HOST, FIRST_HOST + count + 1)]
        bridge = f"pen-br{number}"

        def undo(*words: str) -> None:
            stack.callback(subprocess.run, ["ip", *words], capture_output=True)

        try:
            ip("link", "add", bridge, "type", "bridge")
            undo("link", "del", bridge)
            ip("addr", "add", f"{addresses[0]}/28", "dev", bridge)
            ip("link", "set", bridge, "up")
            machines = []
            for index, address in enumerate(addresses[1:]):
                machine = Machine(f"penstock-{number}-{index}", address)
                ours, theirs = f"pn{index}-{number}", "eth0"
                ip("netns", "add", machine.name)
                undo("netns", "del", machine.name)
                ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", machine.name)
                undo("link", "del", ours)
                ip("link", "set", ours, "master", bridge, "up")
                ip("-n", machine.name, "addr", "add", f"{address}/28", "dev", theirs)
                ip("-n", machine.name, "link", "set", theirs, "up")
                ip("-n", machine.name, "link", "set", "lo", "up")
                machines.append(machine)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives no network of namespaces: {error.stderr.decode().strip()}")
        yield addresses[0], machines
