"""A cell in which jobs are disturbed, as the estimator reads its ledger."""

from penstock.model.decisions.adjustments import AdjustmentCause, CoresDecided
from penstock.model.decisions.ledger_events import JobEnded, JobRequeued, PlacementDecided, StopDecided
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    TaskCheckpointed,
    TaskExited,
    TaskStarted,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import TaskPlacement, Usage
from penstock.model.schema.event import Event
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.resources.estimate import estimate
from tests.unit.estimator.reports import JOB, Reports

USED = Usage(cpu_ms=240_000, host_memory_mib=4_000, gpu_memory_mib=9_000, gpu_utilisation_percent=80)


class Disturbed(Reports):
    """Jobs on node-1, which are stopped, moved, throttled and put beside others."""

    def start(
        self,
        job_id: str,
        spec: JobSpec = JOB,
        *,
        attempt: int = 1,
        node: str = "node-1",
        workers: int = 1,
        gpus: tuple[int, ...] = (0,),
        cores: int = 4,
        milli: int = 1_000,
    ) -> None:
        """Worker n has GPUs `gpus` + n."""
        if attempt == 1:
            self.submit(job_id, spec)
            self.record(JobEstimated(job_id=job_id, estimate=estimate(spec, ())))
        tasks = tuple(
            TaskPlacement(
                task_id=f"{job_id}/{attempt}/{rank}",
                role="worker",
                rank=rank,
                node_id=node,
                gpus=tuple(gpu + rank for gpu in gpus),
                gpu_share_milli=milli,
                cores=tuple(range(rank * cores, (rank + 1) * cores)),
            )
            for rank in range(workers)
        )
        self.record(PlacementDecided(job_id=job_id, attempt=attempt, tasks=tasks))
        for task in tasks:
            self.record(
                TaskStarted(node_id=node, task_id=task.task_id, token=1, pid=1, started_ms=self.node_ms)
            )

    def after(self, ms: int, *facts: Event) -> None:
        """A record comes a second after the one before."""
        self.now_ms += ms - 1_000
        self.record(*facts)

    def stopped(self, job_id: str, attempt: int = 1, used: Usage = USED, reason: str = "preempted") -> None:
        """Its tasks save, exit with 75, and the job queues again."""
        if reason != "node_lost":
            self.record(StopDecided(job_id=job_id, attempt=attempt, reason=reason, grace_ms=10_000))
        exits = [
            TaskExited(
                node_id=task.place.node_id,
                task_id=task_id,
                token=1,
                cause="exited",
                exit_code=75,
                started_ms=0,
                exited_ms=1,
                usage=used,
            )
            for task_id, task in self.ledger.cell.jobs[job_id].tasks.items()
        ]
        self.record(*exits)
        self.record(JobRequeued(job_id=job_id, attempt=attempt, reason=reason))

    def saved(
        self, job_id: str, attempt: int = 1, *, shared: bool = False, path: str = "/c/1"
    ) -> TaskCheckpointed:
        return TaskCheckpointed(
            node_id="node-1",
            task_id=f"{job_id}/{attempt}/0",
            token=1,
            at_ms=self.node_ms,
            path=path,
            iteration=5,
            shared=shared,
        )

    def cores(self, job_id: str, count: int, cause: AdjustmentCause = "") -> CoresDecided:
        return CoresDecided(
            job_id=job_id,
            attempt=1,
            task_id=f"{job_id}/1/0",
            node_id="node-1",
            by="ada",
            reason="contention",
            cores=tuple(range(count)),
            cause=cause,
        )

    def finish(
        self, job_id: str, run_ms: int, attempt: int = 1, workers: int = 1, used: Usage = USED
    ) -> FinishedRun:
        for rank in range(workers):
            self.exit(job_id, used, run_ms, rank=rank, attempt=attempt)
        self.record(JobEnded(job_id=job_id, outcome="succeeded"))
        return self.stored[-1]
