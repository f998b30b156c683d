"""The judge of adjustments: which cores and how much memory bandwidth programs really have, against what the
ledger decided.

Rule `adjust`: a program is only ever given what was decided for it, and nothing older than what it has; a
program starts on cores that nobody else is on, and is moved to none but those that their users had given up
before; a node reports as done only what is done; and when it is calm everybody soon has what the ledger says.
Beside its own cores a program whose job named no number may have cores that nobody was given. Left out are
programs that are being stopped or are not of this history, and those whose cores the kernel has refused to
change.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.faults.laboratory.machines.machine import Machine, TaskProcess
from tests.faults.laboratory.proposers.adjuster import NAME as GUARD
from tests.faults.laboratory.proposers.adjuster import REASON
from tests.faults.rules.findings import Fact, Violation

if TYPE_CHECKING:
    from tests.faults.laboratory.judging.judge import Judge

OBEYED_WITHIN_S = 10.0  # of calm, or of the decision
RULE = "adjust"


class AdjustmentJudge:
    """Looks at programs as they start, as they are adjusted, and from time to time when it is calm."""

    def __init__(self, judge: "Judge") -> None:
        self._judge = judge
        self._obeyed: dict[TaskProcess, int] = {}
        """Token of what it has: of its start, or of the latest change."""
        self._decided_s: dict[int, float] = {}
        """Token → when the record landed."""
        self.then: Callable[[], None] | None = None
        """Called once, when the next decision lands."""
        self.cores = self.caps = self.refused = 0
        """Changes that were really made, and those that the kernel refused."""
        self.tried = 0
        """Numbers of cores, to measure a job's speed."""
        self.slowed = 0
        """Steps down of jobs without GPUs, for what the real contention-guard has measured."""

    # ---------------------------------------------------------------------------------- the ledger

    def decided(self, fact: Fact) -> None:
        """Before the rules of the ledger have booked it."""
        if fact.get("by") == GUARD:
            self.tried += fact.get("cause") == "probe"
            self.slowed += fact.get("cause") == "contention" and fact["reason"] != REASON
            self._spares_trainings(fact)
        epoch, token = fact.get("epoch"), self._judge.book.token
        self._decided_s[token] = self._judge.world.now_s
        if epoch is not None:  # everything is ordered anew, under tokens of that epoch
            self._decided_s[self._judge.rules.token_in(epoch)] = self._judge.world.now_s
        then, self.then = self.then, None
        if then is not None:
            then()

    def _spares_trainings(self, fact: Fact) -> None:
        """No service takes memory bandwidth from a job that has GPUs: of one that names no number, its places
        show it."""
        percent = fact.get("memory_bandwidth_percent")
        places = self._judge.book.jobs[fact["job_id"]].places
        if percent not in (None, 100) and any(place["gpus"] for place in places.values()):
            raise Violation(RULE, f"{fact['task_id']} trains, and is capped: {fact}")

    # ---------------------------------------------------------------------------------- programs

    def starts(self, machine: Machine, process: TaskProcess) -> None:
        """On the cores of its order."""
        self._obeyed[process] = token = self._allowed(machine, process, 0)
        for other in self._beside(machine, process):
            at = f"{machine.node_id} starts {process.key} on {process.cores} by {token}"
            raise Violation(RULE, f"{at}; {other.key} still has {other.cores}")

    def pinned(self, machine: Machine, process: TaskProcess) -> None:
        """Other cores for what runs; what others have given up since by a later decision may still have to be
        taken from them."""
        self.cores += 1
        token = self._obeyed[process] = self._allowed(machine, process, self._obeyed.get(process, 0))
        for other in self._beside(machine, process):
            newest = max(self._history(other))
            if newest <= max(token, self._obeyed.get(other, 0)):
                at = f"{machine.node_id} moves {process.key} to {process.cores} by {token}"
                raise Violation(RULE, f"{at}; {other.key} has {other.cores} by {self._obeyed.get(other)}")

    def capped(self, machine: Machine, process: TaskProcess) -> None:
        self.caps += 1
        allowed = list(self._judge.rules.caps.get(process.key, {}).values())
        if self._known(process) and process.percent not in allowed:
            raise Violation(RULE, f"{machine.node_id} caps {process.key} at {process.percent}: of {allowed}")

    def reported(self, machine: Machine, fact: Fact) -> None:
        """As done: then it has this, or what was decided later."""
        process = machine.processes.get((fact["task_id"], fact["token"]))
        if process is None or not fact["enforced"] or fact["what"] != "cores" or not self._known(process):
            return
        least = max(self._obeyed.get(process, 0), fact["order_token"])
        given = (cores for token, cores in self._history(process).items() if token >= least)
        if not process.loose and not any(self._has(process, cores) for cores in given):
            raise Violation(
                RULE, f"{fact} is reported; it has {process.cores} by {self._obeyed.get(process)}"
            )
        self._obeyed[process] = least

    def _allowed(self, machine: Machine, process: TaskProcess, least: int) -> int:
        """The oldest decision, from `least` on, that gave it these cores."""
        if not self._known(process):
            return max(least, process.key[1])
        for token, cores in sorted(self._history(process).items()):
            if token >= least and self._has(process, cores):
                return token
        at = f"{machine.node_id} gives {process.key} {process.cores}"
        raise Violation(RULE, f"{at}; it had them by {least}, and was given {self._history(process)}")

    def _has(self, process: TaskProcess, cores: Sequence[int]) -> bool:
        """Whether it has these, and no others unless its job named no number: idle ones are lent."""
        if tuple(cores) == process.cores:
            return True
        job = self._judge.book.job_of(process.key[0])
        lends = job is not None and job.spec.get("resources", {}).get("cores") is None
        return lends and process.cores[: len(cores)] == tuple(cores)

    def _own(self, process: TaskProcess) -> set[int]:
        """Its cores without those that are lent to it until somebody needs them."""
        fitting = [set(cores) for cores in self._history(process).values() if self._has(process, cores)]
        return max(fitting, key=len, default=set(process.cores))

    def _history(self, process: TaskProcess) -> dict[int, list[int]]:
        """Token → cores: at its placement, and at each change."""
        placed, changes = (
            self._judge.placed.get((process.key[1], process.key[0])),
            self._judge.rules.cores,
        )
        first = {} if placed is None else {process.key[1]: placed.place["cores"]}
        return first | changes.get(process.key, {})

    def _beside(self, machine: Machine, process: TaskProcess) -> list[TaskProcess]:
        """Who uses a core that is its own, as their own."""
        if not self._counts(process):
            return []
        return [
            other
            for other in machine.processes.values()
            if other is not process
            and self._counts(other)
            and self._own(other) & self._own(process)
            and not self._judge.companions(process, other)
        ]

    def _known(self, process: TaskProcess) -> bool:
        return self._judge.owns(process.key)

    def _counts(self, process: TaskProcess) -> bool:
        stopping = process.signalled or process.terminated or not process.shim_alive
        return not stopping and not process.loose and self._known(process)

    # ---------------------------------------------------------------------------------- when it is calm

    def look(self, calm_s: float) -> None:
        """Since this moment nothing fails any more."""
        for machine in self._judge.machines.values():
            for process in () if machine.silent else machine.processes.values():
                self._look_at(machine, process, calm_s)
                self._gives_back(machine, process, calm_s)

    def _gives_back(self, machine: Machine, process: TaskProcess, calm_s: float) -> None:
        """Cores that are lent to it are not for long another's own."""
        lent = set(process.cores) - self._own(process)
        for other in machine.processes.values() if lent and self._counts(process) else ():
            since_s = max(calm_s, *(self._decided_s.get(found.key[1], 0.0) for found in (process, other)))
            taken = lent & self._own(other)
            if other is process or not taken or self._judge.world.now_s < since_s + OBEYED_WITHIN_S:
                continue
            if self._counts(other) and not self._judge.companions(process, other):
                raise Violation(
                    RULE, f"{machine.node_id}: {process.key} keeps {taken}, which {other.key} has"
                )

    def _look_at(self, machine: Machine, process: TaskProcess, calm_s: float) -> None:
        judge, (task_id, token) = self._judge, process.key
        job = judge.book.job_of(task_id)
        if job is None or job.token != token or task_id not in job.living or job.stop_reason is not None:
            return
        if process.signalled or process.terminated or not process.shim_alive:
            return
        changes = judge.rules.cores.get(process.key, {})
        caps = judge.rules.caps.get(process.key, {})
        for what, newest in (("cores", max(changes, default=0)), ("memory_bandwidth", max(caps, default=0))):
            since_s = max(calm_s, self._decided_s.get(newest, 0.0))
            if not newest or judge.world.now_s < since_s + OBEYED_WITHIN_S:
                continue
            at = f"{machine.node_id}: {process.key} was given {changes} and {caps} for long"
            has = (
                process.cores == tuple(changes[newest])
                if what == "cores"
                else process.percent == caps[newest]
            )
            if not has and not process.loose:
                raise Violation(RULE, f"{at}, and has {process.cores}, {process.percent}")
            if (task_id, newest, what) not in judge.rules.answered_adjustments:
                raise Violation(RULE, f"{at}, and its node has not answered {newest}")
