"""Members of a group as real processes, which take turns at stages."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.waiting import wait_until

MEMBER = """
import os, sys, time
from penstock.sdk import stages
from penstock.sdk.sharing import turns
from penstock.sdk.stages import iteration, stage
name, rounds, plan = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
turns.MAX_WAIT_S = float(os.environ.get("BOUND", "3600"))
trace = os.open("trace", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
says = lambda *words: os.write(trace, (" ".join(map(str, words)) + "\\n").encode())
iteration()
says("ready", name)
while not os.path.exists("go"):
    time.sleep(0.001)
for _ in range(rounds):
    iteration()
    for one in plan:
        resource, ms = one.split(":")
        with stage(resource):
            says("+", resource, name, time.monotonic())
            time.sleep(float(ms) / 1_000)
            says("-", resource, name, time.monotonic())
says("done", name, *stages.waits())
"""
"""A member does so many rounds of its plan, `resource:milliseconds,…`. It waits an hour for a turn, unless it
has another bound."""
ENDLESS = "gpu:1e9"
ROUNDS = 60


class Group:
    """Members as processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.members: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, plan: str, rounds: int = ROUNDS, script: str = MEMBER, **env: str) -> None:
        command = [sys.executable, "-c", script, name, str(rounds), plan]
        self.members[name] = subprocess.Popen(command, cwd=self.folder, env={**os.environ, **env})

    def until(self, what: Callable[[], object], named: str) -> None:
        """Waits for what members do, none of which may end with an error."""
        wait_until(lambda: what() or any(member.poll() for member in self.members.values()), named)
        assert not any(member.poll() for member in self.members.values())

    def lines(self, kind: str) -> list[list[str]]:
        path = self.folder / "trace"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line[1:] for line in words if line[0] == kind]

    def go(self) -> None:
        self.until(lambda: len(self.lines("ready")) == len(self.members), "the start of all")
        (self.folder / "go").touch()

    def end(self) -> dict[str, tuple[float, int]]:
        """Name → seconds waited, turns missed."""
        for member in self.members.values():
            assert member.wait() == 0
        return {name: (float(waited_s), int(missed)) for name, waited_s, missed in self.lines("done")}

    def turns(self) -> dict[str, list[tuple[float, float, str]]]:
        """Resource → (entered, left, by whom) in the order of entering."""
        found: dict[str, list[tuple[float, float, str]]] = {}
        begun: dict[tuple[str, str], float] = {}
        for line in (self.folder / "trace").read_text().splitlines():
            kind, *rest = line.split()
            if kind == "+":
                begun[rest[0], rest[1]] = float(rest[2])
            elif kind == "-":
                found.setdefault(rest[0], []).append((begun[rest[0], rest[1]], float(rest[2]), rest[1]))
        return {name: sorted(rows) for name, rows in found.items()}
