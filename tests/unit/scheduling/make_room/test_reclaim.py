"""What is reclaimed: nodes on which no reclaim makes room need no trial; the answer is that of all trials."""

from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.moves import MAX_MIGRATIONS
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import Coda, PlacerSettings, Stage
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import WHOLE_GPU, Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock.scheduling.make_room import array_reclaim
from penstock.scheduling.make_room.array_reclaim import ArrayReclaim
from penstock.scheduling.place.arrays import SMALL, array_of
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import node_spec
from tests.support.cluster.random_cell import RandomCell

SETTINGS = Coda()
WITHOUT: tuple[Stage, ...] = ("groups", "moves", "bursts")


class OnEachNode(array_reclaim._Taking):
    """Tries every node, and looks at every task there."""

    def _possible(self, nodes: int, *, may_move: bool) -> int:
        return nodes

    def _movable(self, ordinal: int) -> Iterator[JobState]:
        jobs = [self._state.jobs[job_id] for job_id in self._state.node(ordinal).tasks.values()]
        found = [
            job
            for job in jobs
            if array_of(job) == SMALL
            and job.job_id not in self._trial.ended
            and job.demand.tasks == 1
            and job.demand.worker.gpu_share_milli == WHOLE_GPU
            and job.status is JobStatus.RUNNING
            and job.saves
            and job.preemptible
            and job.held is None
            and not job.succession.followed
            and job.moves.migrations < MAX_MIGRATIONS
        ]
        yield from sorted(found, key=lambda job: (-job.demand.worker.gpus, job.order))


class Judged(RandomCell):
    """Now and then it is asked what would be reclaimed for a job like each of those that are there."""

    def __init__(self, seed: int, jobs: int, patch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[str] = Counter()
        self.stage, self.patch = ArrayReclaim(SETTINGS), patch
        super().__init__(
            seed, PlacerSettings(profile="penstock", coda=SETTINGS, without=WITHOUT), jobs, arrives=0.35
        )
        for number in range(4, 10):
            self.feed(NodeJoined(node=node_spec(f"n{number}", 8, cores=32, model="V100")))

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        if self.head.seq % 3 == 0:
            for job in self.state.jobs.values():
                self.judge(job)
        return step

    def _submit(self) -> None:
        """A small job that saves, one of four or eight GPUs, or one without GPUs."""
        job_id, gpus = f"j{self.submitted}", int(self.rng.choice((0, 1, 1, 1, 2, 3, 3, 4, 8)))
        self.submitted += 1
        spec = JobSpec(
            command=("train",),
            workers=int(self.rng.choice((1, 1, 1, 2))),
            checkpoint="sdk" if self.rng.random() < 0.8 else "none",
            preemptible=bool(self.rng.random() < 0.9),
        )
        need = ResourceVector(
            gpus=gpus, cores=int(self.rng.choice((1, 4) if gpus else (4, 12, 24))), host_memory_mib=1_024
        )
        self.feed(JobSubmitted(job_id=job_id, spec=spec))
        found = Estimate(worker=need, confidence=1.0, tier="user", source="a test", run_ms=1_000_000)
        self.feed(JobEstimated(job_id=job_id, estimate=found))

    def judge(self, job: JobState) -> None:
        found = self.stage.reclaim(self.state, job)
        with self.patch.context() as patch:
            patch.setattr(array_reclaim, "_Taking", OnEachNode)
            right = ArrayReclaim(SETTINGS).reclaim(self.state, job)
        assert found == right
        if found is not None:
            self.seen["moves"] += bool(found.moves)
            self.seen["stops"] += bool(found.stops)


def test_a_node_without_room_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small jobs that save run on nodes where large ones want to start; jobs without GPUs borrow cores."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        cell = Judged(seed, 100, monkeypatch)
        cell.run()
        seen += cell.seen
    assert min(seen["moves"], seen["stops"]) > 10
