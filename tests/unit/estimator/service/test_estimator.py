"""What the estimator says about a job, from what it has seen."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest

from penstock.ledger.fold import evolve_jobs
from penstock.ledger.record.record import GENESIS, Draft, Head, write
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import (
    JobEnded,
    JobRequeued,
    PlacementDecided,
    TaskLost,
    TermStarted,
)
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement, Usage
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.fold import state as follow
from penstock_services.estimator.core.fold.from_snapshot import begin_at
from penstock_services.estimator.core.fold.live import LiveJob
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.learning.limits import HISTORY_KEYS
from penstock_services.estimator.core.records.history import RUNS_PER_KEY, History, Run, Runs, key_of
from penstock_services.estimator.core.records.runs import Allocation, Card, JobInfo
from penstock_services.estimator.core.resources import estimate as rules
from penstock_services.estimator.core.resources.estimate import Guess, HistoryTier, confidence, estimate
from tests.support.cluster.driver import node_spec

SPEC = JobSpec(owner="ada", command=("python", "train.py"), model="resnet18", batch_size=64)
ENDED_MS = 1_700_000_000_000  # 2023-11-14T22:13:20Z


def unlike(node_id: str = "node-1") -> NodeSpec:
    """A node whose cards have no name in common, and all the memory that a job may ask for."""
    spec = node_spec(node_id, 8, memory_mib=1 << 30)
    gpus = tuple(msgspec.structs.replace(gpu, model=f"model-{gpu.index}") for gpu in spec.gpus)
    return msgspec.structs.replace(spec, gpus=gpus)


class Cell:
    """A ledger in the making and the estimator's fold of it."""

    def __init__(self) -> None:
        self.ledger = State(Topic.JOBS, 0)
        self.head: Head = GENESIS
        self.values: list[bytes] = []
        self.now_ms = ENDED_MS
        self.tiers = (HistoryTier(self.ledger.history),)
        began = TermStarted(term=1, placer_id="placer-1", settings=PlacerSettings())
        self.record(began, NodeJoined(node=unlike()), term=1)

    def restart(self) -> int:
        """The estimator begins at a snapshot of all that was recorded. The offset after it."""
        replica = Replica()
        for offset, value in enumerate(self.values):
            replica.take(value, offset)
        self.ledger = State(Topic.JOBS, 0)
        begin_at(self.ledger, replica)
        return replica.offset

    def record(self, *facts: Event, term: int | None = None, cause: dict[str, object] | None = None) -> bytes:
        self.now_ms += 1_000
        draft = Draft(
            term or self.head.term, self.now_ms, cause or {"timer_id": "t"}, "committed", None, facts
        )
        self.head, value = write(self.head, draft)
        self.values.append(value)
        self.ledger.fold(value)
        return value

    def submit(self, job_id: str, spec: JobSpec = SPEC, offset: int = 0) -> None:
        cause: dict[str, object] = {
            "topic": Topic.JOBS,
            "partition": 0,
            "offset": offset,
            "event_id": f"submit-{job_id}",
        }
        self.record(JobSubmitted(job_id=job_id, spec=spec), cause=cause)

    def place(self, job_id: str, gpus: int = 1, workers: int = 1, attempt: int = 1, servers: int = 0) -> None:
        """Estimated by nothing but the job's own request, unless it has its estimate."""
        job = self.ledger.cell.jobs[job_id]
        if job.awaited_estimate is not None:
            self.record(JobEstimated(job_id=job_id, estimate=estimate(job.spec, ()), attempt=attempt - 1))

        def task(rank: int, role: Any) -> TaskPlacement:
            own = tuple(range(gpus)) if role == "worker" else ()
            return TaskPlacement(
                task_id=f"{job_id}/{attempt}/{rank}", role=role, rank=rank, node_id="node-1", gpus=own
            )

        tasks = tuple(task(rank, "worker" if rank < workers else "ps") for rank in range(workers + servers))
        self.record(PlacementDecided(job_id=job_id, attempt=attempt, tasks=tasks))

    def node_of(self, task_id: str) -> str:
        """Where the task was placed; of one that nobody knows node-1."""
        jobs = [job for job in self.ledger.cell.jobs.values() if task_id in job.tasks]
        return jobs[0].tasks[task_id].place.node_id if jobs else "node-1"

    def over(self, job_id: str, reason: str = "node_lost") -> Sequence[Event]:
        """What ends the job's present attempt, if it has one."""
        job = self.ledger.cell.jobs[job_id]
        if not job.tasks:
            return ()
        lost = [
            TaskLost(task_id=task_id, node_id=task.place.node_id, reason=reason)
            for task_id, task in job.tasks.items()
            if task.exit.at_ms is None
        ]
        return (*lost, JobRequeued(job_id=job_id, attempt=job.attempt, reason=reason))

    def exit(
        self, job_id: str, usage: Usage, run_ms: int = 60_000, rank: int = 0, code: int = 0, attempt: int = 1
    ) -> None:
        task_id = f"{job_id}/{attempt}/{rank}"
        exited = TaskExited(
            node_id=self.node_of(task_id),
            task_id=task_id,
            token=1,
            cause="exited",
            exit_code=code,
            started_ms=5_000,
            exited_ms=5_000 + run_ms,
            usage=usage,
        )
        self.record(exited)

    def run(
        self, job_id: str, usage: Usage, run_ms: int = 60_000, spec: JobSpec = SPEC, gpus: int = 1
    ) -> None:
        """One whole successful job."""
        self.submit(job_id, spec)
        self.place(job_id, gpus)
        self.exit(job_id, usage, run_ms)
        self.record(JobEnded(job_id=job_id, outcome="succeeded"))


def ids(found: Iterable[LiveJob]) -> list[str]:
    return [live.job.job_id for live in found]


def usage(host_memory_mib: int = 1_000, cpu_ms: int = 120_000, **more: Any) -> Usage:
    return Usage(cpu_ms=cpu_ms, host_memory_mib=host_memory_mib, **more)


def test_nothing_is_known_yet() -> None:
    """The first job of a new user: a whole GPU, modest host needs, and the estimator says that it guesses."""
    found = estimate(SPEC, Cell().tiers)
    assert found.worker == ResourceVector(gpus=1, cores=1, host_memory_mib=2_048, gpu_utilisation_percent=100)
    assert (found.tier, found.confidence, found.run_ms) == ("default", 0.1, None)
    assert found.source.startswith("default: nothing is known yet")
    assert found.parameter_server == ResourceVector()


def test_parameter_servers_get_no_gpu() -> None:
    """Liquid's PS jobs: servers hold parameters in host memory."""
    found = estimate(msgspec.structs.replace(SPEC, parameter_servers=2), ())
    assert (found.parameter_server.gpus, found.parameter_server.cores) == (0, 1)
    assert found.parameter_server.host_memory_mib == 1_024


def test_what_the_user_asks_for_wins_over_history() -> None:
    """An engineer knows better than five runs: the new data set is larger."""
    cell = Cell()
    for number in range(5):
        cell.run(f"job-{number}", usage(gpu_memory_mib=3_000))
    asked = ResourceRequest(gpus=2, cores=8, host_memory_mib=9_000, gpu_memory_mib=10_000, bandwidth_mbps=500)
    found = estimate(msgspec.structs.replace(SPEC, resources=asked), cell.tiers)
    given = msgspec.structs.asdict(asked)
    assert {name: getattr(found.worker, name) for name in given} == given | {"gpu_share_milli": WHOLE_GPU}
    assert (found.tier, found.confidence, found.source) == ("user", 1.0, "the user asked for all of it")
    assert found.run_ms == 60_000


def test_a_job_without_gpus_needs_no_word_about_gpu_memory() -> None:
    """Preprocessing on CPUs only: nothing about GPUs is left open."""
    asked = ResourceRequest(gpus=0, cores=2, host_memory_mib=512)
    found = estimate(msgspec.structs.replace(SPEC, resources=asked), ())
    assert found.tier == "user"
    assert (found.worker.gpus, found.worker.gpu_memory_mib, found.worker.gpu_utilisation_percent) == (
        0,
        0,
        0.0,
    )


def test_user_and_history_mix_field_by_field() -> None:
    """The user fixes the GPUs only; memory and cores come from what earlier runs used."""
    cell = Cell()
    for number in range(3):
        cell.run(f"job-{number}", usage())
    found = estimate(msgspec.structs.replace(SPEC, resources=ResourceRequest(gpus=4)), cell.tiers)
    assert (found.worker.gpus, found.worker.host_memory_mib) == (4, 1_100)  # 1,000 MiB + 10 %
    assert found.tier == "history"
    assert found.confidence < 1
    assert found.source.startswith("gpus: asked for by the user; else median of 3 runs")


def test_medians_of_runs_and_the_largest_memory() -> None:
    """Five runs of one command, one of them on a slow machine: time by the median, memory by the maximum."""
    cell = Cell()
    for number, (memory_mib, run_ms) in enumerate(
        [(900, 58), (1_000, 60), (1_100, 61), (950, 59), (2_000, 300)]
    ):
        cell.run(
            f"job-{number}",
            usage(
                memory_mib,
                cpu_ms=2 * run_ms * 1_000,
                gpu_memory_mib=3_000 + number,
                gpu_utilisation_percent=40 + number,
            ),
            run_ms * 1_000,
            gpus=2,
        )
    found = estimate(SPEC, cell.tiers)
    assert found.worker == ResourceVector(
        gpus=2, cores=3, host_memory_mib=2_200, gpu_memory_mib=3_305, gpu_utilisation_percent=42
    )  # 2 busy cores × 1.25 = 2.5
    assert (found.run_ms, found.tier) == (60_000, "history")
    assert found.source == (
        "median of 5 runs with the same owner, command, model and batch size, newest ended "
        "2023-11-14T22:13:45Z (ledger seq 25); memory: the largest of them + 10 %"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"owner": "bob"},
        {"command": ("python", "other.py")},
        {"model": None},
        {"batch_size": 65},
        {"batch_size": None},
    ],
)
def test_other_keys_share_nothing(other: dict[str, Any]) -> None:
    """Same script, other batch size: its memory is another one."""
    cell = Cell()
    cell.run("job-1", usage(9_000))
    assert estimate(msgspec.structs.replace(SPEC, **other), cell.tiers).tier == "default"
    assert estimate(msgspec.structs.replace(SPEC, name="again", env={"A": "1"}), cell.tiers).tier == "history"


def test_confidence_grows_with_runs_and_falls_with_spread() -> None:
    """People read it as: how much should I trust this line?"""
    assert [confidence(n, 0.0) for n in (1, 2, 5, 32)] == [0.333, 0.5, 0.714, 0.941]
    assert confidence(5, 1.0) == 0.357
    steady, wild = Cell(), Cell()
    for number in range(5):
        steady.run(f"job-{number}", usage(), 60_000)
        wild.run(f"job-{number}", usage(), 60_000 * (1 + 3 * number))
    sure, unsure = (estimate(SPEC, cell.tiers).confidence for cell in (steady, wild))
    assert rules.DEFAULT_CONFIDENCE < unsure < sure < 1


def test_a_gang_is_one_run() -> None:
    """Two workers and a parameter server: the largest need of a worker counts, the server is no worker."""
    cell = Cell()
    cell.submit("job-1")
    cell.place("job-1", workers=2, servers=1)
    cell.exit("job-1", usage(500, gpu_utilisation_percent=40.0), rank=0, run_ms=50_000)
    cell.exit("job-1", usage(700, gpu_utilisation_percent=60.0), rank=1, run_ms=70_000)
    cell.exit("job-1", usage(9_000), rank=2)
    cell.record(JobEnded(job_id="job-1", outcome="succeeded"))
    found = estimate(SPEC, cell.tiers)
    assert (found.worker.host_memory_mib, found.worker.gpu_utilisation_percent) == (770, 50.0)
    assert found.run_ms == 70_000
    assert "1 run " in found.source


def test_only_attempts_that_succeeded_teach() -> None:
    """A crash says nothing about a run, nor does the worker that had finished before another one crashed, nor
    an attempt that was lost with its node, nor a worker that was cut short in a job that succeeded."""
    cell = Cell()
    cell.submit("job-1")
    cell.place("job-1")
    cell.exit("job-1", usage(10), run_ms=1_000, code=1)
    cell.record(JobEnded(job_id="job-1", outcome="failed"))
    cell.submit("job-1b")
    cell.place("job-1b", workers=2)
    cell.exit("job-1b", usage(20), rank=0)
    cell.exit("job-1b", usage(30), rank=1, code=1)
    cell.record(JobEnded(job_id="job-1b", outcome="failed"))
    assert estimate(SPEC, cell.tiers).tier == "default"
    cell.submit("job-2")
    cell.place("job-2", workers=2)
    cell.exit("job-2", usage(5_000), rank=0)
    cell.record(TaskLost(task_id="job-2/1/1", node_id="node-1", reason="it was fenced"))
    cell.record(JobRequeued(job_id="job-2", attempt=1, reason="node_lost"))
    cell.place("job-2", workers=2, attempt=2)
    cell.exit("job-2", usage(800), attempt=2)
    cell.exit("job-2", usage(7_000), rank=1, attempt=2, code=143)
    cell.record(JobEnded(job_id="job-2", outcome="succeeded"))
    found = estimate(SPEC, cell.tiers)
    assert found.worker.host_memory_mib == 880
    assert "1 run " in found.source
    assert not cell.ledger.live


def test_what_was_not_measured_stays_open() -> None:
    """A machine without NVML measures no GPU: those fields come from the default, the others from the run."""
    cell = Cell()
    cell.run("job-1", Usage(host_memory_mib=300))
    found = estimate(SPEC, cell.tiers)
    assert (found.worker.host_memory_mib, found.worker.cores) == (330, rules.DEFAULT_CORES)
    assert (found.worker.gpu_memory_mib, found.worker.gpu_utilisation_percent) == (0, 100.0)
    assert found.tier == "history"


@pytest.mark.parametrize(
    "absurd",
    [Usage(host_memory_mib=10**18, gpu_memory_mib=10**18, cpu_ms=10**18), Usage(cpu_ms=0, host_memory_mib=0)],
)
@pytest.mark.parametrize("run_ms", [0, 1, 1 << 52])
def test_an_absurd_measurement_never_leaves_the_ranges(absurd: Usage, run_ms: int) -> None:
    """A broken sensor reports an exabyte: the estimate is clamped to what a node can be, and is still
    valid."""
    cell = Cell()
    cell.run("job-1", absurd, run_ms)
    worker = estimate(SPEC, cell.tiers).worker
    assert 1 <= worker.cores <= 1_024
    assert 0 <= worker.host_memory_mib <= 1 << 30


@pytest.mark.parametrize(
    ("measured", "run_ms", "why"),
    [
        (usage(), -4_000, "run_ms: the node's clock stepped back"),
        (usage(), 400 * 86_400_000, "run_ms: 34560000000 is more than a year"),
        (usage(gpu_memory_mib=17_300), 60_000, "gpu_memory_mib: 17300 on a card of 16384"),
        (usage(1 << 40), 60_000, "host_memory_mib: 1099511627776 is more than any machine has"),
    ],
)
def test_what_cannot_be_true_is_rejected_with_its_reason(measured: Usage, run_ms: int, why: str) -> None:
    """NTP set a clock back, a driver reports garbage: the run is kept for people, and teaches nobody."""
    cell = Cell()
    cell.ledger = State(Topic.JOBS, 0)
    stored = cell.ledger.finished
    cell.ledger.fold(cell.values[0])
    cell.record(NodeJoined(node=node_spec("node-1", 1)))
    cell.run("job-1", measured, run_ms=run_ms)
    assert estimate(SPEC, (HistoryTier(cell.ledger.history),)).tier == "default"
    assert [run.rejected[: len(why)] for run in stored] == [why]


def test_a_finished_run_says_what_the_job_was_got_and_was_published() -> None:
    """What a model learns from: a gang of two on T4 cards, whose user had asked for the memory himself."""
    cell = Cell()
    cell.ledger = State(Topic.JOBS, 0)
    stored = cell.ledger.finished
    cell.ledger.fold(cell.values[0])
    cell.record(NodeJoined(node=node_spec("node-1", 4, model="T4", memory_mib=15_360)))
    spec = msgspec.structs.replace(SPEC, workers=2, resources=ResourceRequest(gpu_memory_mib=9_000))
    cell.submit("job-1", spec)
    cell.record(JobEstimated(job_id="job-1", estimate=estimate(spec, ())))
    cell.place("job-1", gpus=2, workers=2)
    cell.exit("job-1", usage(gpu_memory_mib=8_000, gpu_utilisation_percent=60, gpu_utilisation_std=7), rank=0)
    cell.exit("job-1", usage(gpu_memory_mib=8_100, gpu_utilisation_percent=70, gpu_utilisation_std=9), rank=1)
    cell.record(JobEnded(job_id="job-1", outcome="succeeded"))
    [run] = stored
    assert run.info == JobInfo(key_of(spec), "ada", "resnet18", 64, 2, 0, ("gpu_memory_mib",))
    assert run.allocation == Allocation(2, 1_000, 0, Card("T4", 15_360))
    assert run.estimate is not None
    assert (run.estimate.tier, run.estimate.gpu_memory_mib) == ("default", 9_000)
    assert (run.measured.gpu_memory_mib, run.measured.gpu_utilisation_percent) == (8_100, 65)
    assert (run.measured.gpu_utilisation_std, run.rejected) == (9, "")


def test_a_snapshot_of_the_cell_spares_the_ledger_before_it() -> None:
    """A restart beside a ledger of a year: what is live comes from the snapshot, and what ends later is
    learned."""
    cell = Cell()
    cell.record(NodeJoined(node=node_spec("node-1", 4)))
    for job_id, workers in (("waits", 1), ("runs", 1), ("gang", 2)):
        cell.submit(job_id, msgspec.structs.replace(SPEC, workers=workers), offset=5)
        if job_id != "waits":
            cell.record(JobEstimated(job_id=job_id, estimate=estimate(SPEC, ())))
            cell.place(job_id, workers=workers, servers=0)
    cell.exit("gang", usage(), rank=0)
    cell.restart()
    stored = cell.ledger.finished
    assert cell.ledger.jobs_offset == 6
    assert ids(cell.ledger.unestimated()) == ["waits"]
    for job_id, rank in (("runs", 0), ("gang", 1)):
        cell.exit(job_id, usage(777), rank=rank)
        cell.record(JobEnded(job_id=job_id, outcome="succeeded"))
    assert [(run.job_id, run.measured.host_memory_mib) for run in stored] == [("runs", 777)]
    assert list(cell.ledger.live) == ["waits"]


def test_the_last_32_runs_count_and_10_000_keys_are_stored() -> None:
    """A nightly job changes over a year; a sweep submits a new command each time, for ever."""
    runs = Runs()
    for number in range(100):
        runs.add(Run(ended_ms=number, seq=number, run_ms=number))
    assert len(runs) == RUNS_PER_KEY
    assert runs.column("run_ms") == [float(number) for number in range(68, 100)]
    history = History()
    nightly = key_of(SPEC)
    for number in range(HISTORY_KEYS + 100):
        history.add(f"key-{number}".encode(), Run(1, 1))
        history.add(nightly, Run(1, 1))
    assert len(history) == HISTORY_KEYS
    assert history.get(nightly) is not None
    assert history.get(b"key-0") is None


def test_a_zombie_teaches_nothing() -> None:
    """A stopped placer wakes up and appends under its old term: the record is void for the estimator too."""
    cell = Cell()
    stale = cell.head
    cell.submit("job-1")
    _, zombie = write(
        stale, Draft(1, 5, {"timer_id": "t"}, "committed", None, [JobSubmitted(job_id="job-9", spec=SPEC)])
    )
    cell.ledger.fold(zombie)
    cell.ledger.fold(b"no record")
    assert cell.ledger.void == 2
    assert list(cell.ledger.live) == ["job-1"]
    cell.record(JobEnded(job_id="job-1", outcome="cancelled"))
    assert not cell.ledger.live


def test_after_a_restart_the_ledger_says_what_is_open_and_where_to_read_on() -> None:
    """Killed between submissions: job-1 has its estimate, job-2 has not, job-3's came before its
    submission."""
    cell = Cell()
    answer = estimate(SPEC, ())
    cell.submit("job-1", offset=4)
    cell.record(JobEstimated(job_id="job-1", estimate=answer))
    cell.submit("job-2", offset=5)
    cell.record(JobEstimated(job_id="job-3", estimate=answer))
    cell.submit("job-3", offset=7)
    other: dict[str, object] = {"topic": Topic.JOBS, "partition": 3, "offset": 99, "event_id": "elsewhere"}
    cell.record(cause=other)
    [live] = cell.ledger.unestimated()
    assert (live.job.job_id, live.event_id) == ("job-2", "submit-job-2")
    assert cell.ledger.jobs_offset == 8
    assert estimate(live.job.spec, cell.tiers) == answer


def test_an_estimate_that_the_placer_had_to_forget_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The placer was away over a weekend: it reads estimates faster than the jobs in front of them, and keeps
    only so many. A job whose estimate was let go would wait for it for ever."""
    for reader in (follow, evolve_jobs):
        monkeypatch.setattr(reader, "MAX_EARLY_ESTIMATES", 2)
    cell = Cell()
    for number in range(4):
        cell.record(JobEstimated(job_id=f"j{number}", estimate=estimate(SPEC, cell.tiers)))
    for number in range(5):
        cell.submit(f"j{number}", offset=number)
    assert ids(cell.ledger.forgotten()) == ["j0", "j1"]
    assert cell.ledger.forgotten() == []
    assert ids(cell.ledger.unestimated()) == ["j0", "j1", "j4"]


def test_a_learned_tier_goes_before_and_leaves_the_rest_open() -> None:
    """A trained model predicts memory only: it is named as the source, history and default fill the rest."""

    class Model:
        def guess(self, spec: JobSpec, key: bytes) -> Guess:
            return Guess("model", 0.8, "forest v3", gpu_memory_mib=4_096, model_version="forest-3")

    cell = Cell()
    cell.run("job-1", usage())
    found = estimate(SPEC, (Model(), *cell.tiers))
    assert (found.tier, found.confidence, found.model_version) == ("model", 0.8, "forest-3")
    assert (found.worker.gpu_memory_mib, found.worker.host_memory_mib, found.worker.gpus) == (4_096, 1_100, 1)
    assert found.run_ms == 60_000
