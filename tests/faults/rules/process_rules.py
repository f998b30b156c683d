"""Mutual exclusion of processes, for the fault laboratory and for real processes: GPUs, attempts, fencing
tokens.

Rules: `gpu` (a GPU is not overcommitted), `attempt` (one attempt of a job at a time, no task twice), `token`
(fencing tokens on a GPU that one task has to itself never go back).
"""

from collections.abc import Iterable
from typing import NamedTuple

from tests.faults.rules.findings import Violation

WHOLE_GPU = 1_000
"""Thousandths."""


class Running(NamedTuple):
    """One process of a task."""

    node_id: str
    job_id: str
    task_id: str
    token: int
    gpus: tuple[str, ...]
    """Names that no other GPU of the cell has."""
    share_milli: int = WHOLE_GPU
    """Of each of its GPUs."""

    def __str__(self) -> str:
        return f"{self.task_id}@{self.token} on {self.node_id}"


class ProcessRules:
    """All processes of one cell, in the order of their starts."""

    def __init__(self) -> None:
        self.started: dict[tuple[str, int], None] = {}
        """(task id, token)."""
        self._gpu_tokens: dict[str, int] = {}

    def starts_once(self, new: Running) -> None:
        key = (new.task_id, new.token)
        if key in self.started:
            raise Violation("attempt", f"{new} starts a second time")
        self.started[key] = None

    def no_other_attempt(self, new: Running, living: Iterable[Running]) -> None:
        for other in living:
            if other.job_id == new.job_id and other.token != new.token:
                raise Violation("attempt", f"{new} starts while {other} lives")

    def gpus_are_free(self, new: Running, living: Iterable[Running], *, grouped: bool = False) -> None:
        """`living`: without members of its group. `grouped`: it has some, who may have started before it
        under later tokens."""
        users = list(living)
        for gpu in new.gpus:
            beside = [other for other in users if gpu in other.gpus]
            last = self._gpu_tokens.get(gpu, 0)
            self._gpu_tokens[gpu] = max(last, new.token)
            if sum(other.share_milli for other in beside) + new.share_milli > WHOLE_GPU:
                raise Violation("gpu", f"{new} starts on {gpu} beside {', '.join(map(str, beside))}")
            if new.share_milli == WHOLE_GPU and new.token < last and not grouped:
                raise Violation("token", f"{new} starts on {gpu} after token {last}")
