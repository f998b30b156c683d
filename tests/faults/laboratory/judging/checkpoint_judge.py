"""What must hold of checkpoints, as programs and machines really had them: rule `checkpoint`."""

from typing import TYPE_CHECKING

from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import age
from tests.faults.laboratory.machines.machine import Machine, TaskProcess
from tests.faults.rules.findings import Fact, Violation, kind_of

if TYPE_CHECKING:
    from tests.faults.laboratory.judging.judge import Judge


class CheckpointJudge:
    """Of one run."""

    def __init__(self, judge: "Judge") -> None:
        self.resumed = self.fetched = self.failed = 0
        self._judge = judge
        self._gangs: dict[tuple[int, str], str] = {}
        """(token, job) → where the first of the gang went on."""
        self._began: dict[str, int] = {}
        """Job → ledger time at which its attempt began to run."""
        self._saved: dict[str, int] = {}
        """Job → ledger time of its attempt's latest checkpoint."""
        self._kept: dict[str, int] = {}
        """Job → ms of work that checkpoints of earlier attempts have, at most."""

    def starts(self, machine: Machine, process: TaskProcess) -> None:
        """A program of a job that saves begins: at what this job has saved, with its gang, and not before
        what the ledger knows to be here."""
        order, name = process.order, process.resumed
        if order.checkpoint is None:
            return
        at = f"{machine.node_id} starts {order.task_id}@{order.token} at {name or '0'}"
        later = (
            age(name) >= (order.attempt,) and not self._judge.has_lost
        )  # attempts of a lost history count, too
        if name and (name not in self._judge.programs[order.job_id].saves or later):
            raise Violation("checkpoint", f"{at}, which no earlier attempt of it saved")
        key = order.token, order.job_id
        if self._gangs.setdefault(key, name) != name:
            raise Violation("checkpoint", f"{at}, and another of its gang at {self._gangs[key] or '0'}")
        self.resumed += bool(name)
        rules = self._judge.rules.checkpoints
        placed = rules.placed.get(key)
        latest = None if placed is None else rules.fetched_by.get(key, placed.latest)
        if latest is None or placed is None or {latest.node_id} != {machine.node_id, *placed.nodes}:
            return
        succeeded = machine.checkpoints.discarded.get(order.job_id)
        if succeeded is not None and not self._judge.owns(succeeded):
            return  # on a machine that was given up falsely: nobody can know that this job is done
        if self._judge.owns(process.key) and not machine.checkpoints.lost and age(name) < age(latest.name):
            raise Violation("checkpoint", f"{at}; {latest.name} is here and in the ledger")

    def fact(self, kind: str, fact: Fact, now_ms: int) -> None:
        """Work that is kept is work that was saved, and counted once."""
        job_id = self._book(kind, fact, now_ms)
        job = self._judge.replica.state.jobs.get(job_id)
        most_ms = self._kept.get(job_id, 0)
        if job is not None and job.saving.kept_ms > most_ms:
            raise Violation(
                "checkpoint", f"{job_id} counts {job.saving.kept_ms} ms as kept; {most_ms} were saved"
            )

    def restored(self, record: Fact) -> None:
        """One record of a ledger that was restored from an older copy: what it says of work counts, and
        nothing that is lost."""
        if record["seq"] == 1:
            self._began, self._saved, self._kept = {}, {}, {}
        for entry in record["facts"]:
            self._book(kind_of(entry["type"]), entry["data"], record["now_ms"])

    def _book(self, kind: str, fact: Fact, now_ms: int) -> str:
        """The job that the fact is about; empty: none is."""
        job_id: str = fact.get("job_id") or str(fact.get("task_id", "")).rsplit(".", 2)[0]
        match kind:
            case "penstock.placement.decided":
                self._began.pop(job_id, None)
                self._saved.pop(job_id, None)
            case "penstock.task.started":
                self._began.setdefault(job_id, now_ms)
            case "penstock.task.checkpointed":
                self._saved[job_id] = now_ms
            case "penstock.task.checkpoint_fetched":
                self.failed += bool(fact.get("problem"))
                self.fetched += not fact.get("problem")
                self._kept[job_id] = 0 if fact.get("problem") else self._kept.get(job_id, 0)
            case "penstock.job.requeued" if job_id in self._began and job_id in self._saved:
                worked_ms = self._saved[job_id] - self._began[job_id]
                self._kept[job_id] = self._kept.get(job_id, 0) + max(0, worked_ms)
            case "penstock.job.requeued":
                pass
            case _:
                return ""
        return job_id
