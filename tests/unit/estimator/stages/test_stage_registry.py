"""Stages as the service keeps them: per owner, the median over owners, told when they moved."""

from collections.abc import Sequence

import msgspec
import pytest

from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.inputs.external_events import StageSample, StagesMeasured
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import StageTimes, Usage
from penstock.model.schema.validation import checked
from penstock_services.estimator.core.learning.limits import STAGE_KEYS, STAGE_KEYS_OF_ONE, STAGE_OWNERS
from penstock_services.estimator.core.records.runs import JobInfo, job_info
from penstock_services.estimator.core.stages.profile import MIN_ITERATIONS, StageKey, StageProfile
from penstock_services.estimator.core.stages.registry import Owned, StageRegistry, combined, moved
from tests.unit.estimator.service.test_estimator import Cell

KEY = StageKey("resnet18", 64, 4)


def who(owner: str = "ada", model: str | None = "resnet18", batch: int | None = 64) -> JobInfo:
    return job_info(JobSpec(owner=owner, command=("python", "train.py"), model=model, batch_size=batch))


def samples(stages_ms: Sequence[float], iterations: int = 20) -> StagesMeasured:
    """One stage after the other, as many iterations in one piece."""
    names = ("storage", "cpu", "gpu", "network")
    predicted = tuple(
        checked(StageSample, {"lasted_ms": lasted * iterations, name: 100.0})
        for name, lasted in zip(names, stages_ms, strict=True)
        if lasted
    )
    return StagesMeasured(
        node_id="node-1",
        task_id="t",
        token=1,
        at_ms=1,
        iterations=iterations,
        samples=predicted or (StageSample(lasted_ms=1),),
    )


def learn(log: StageRegistry, owner: str = "ada", *stages_ms: float, times: int = 1) -> None:
    for _ in range(times):
        log.measured(who(owner), 4, 1_000, samples(stages_ms), f"from-{owner}")


def known(log: StageRegistry, key: StageKey = KEY) -> StageProfile:
    found = log.get(key)
    assert found is not None
    return found


def key_of(event: StagesProfiled) -> StageKey:
    return StageKey(event.model, event.batch_size, event.gpus)


def published(log: StageRegistry) -> list[StageKey]:
    return [key_of(event) for event, _ in log.news()]


def test_a_profile_is_measured_once_and_reported_once() -> None:
    """Muri's stages of a small vision model on four GPUs; the second job of the same kind measures nothing
    new."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    [(event, cause)] = log.news()
    assert (key_of(event), cause) == (KEY, "from-ada")
    assert (event.model, event.batch_size, event.gpus, event.iterations) == ("resnet18", 64, 4, 20)
    assert (event.storage_ms, event.cpu_ms, event.gpu_ms, event.network_ms, event.iteration_ms) == (
        20,
        10,
        60,
        10,
        100,
    )
    learn(log, "ada", 20.5, 10, 60, 10.2)
    assert published(log) == []


def test_it_is_reported_again_when_a_stage_has_moved_by_a_tenth() -> None:
    """New code halves the loading: the mean over iterations follows, and the cell is told on its way."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    assert published(log) == [KEY]
    learn(log, "ada", 10, 10, 60, 10)
    assert published(log) == [KEY]
    assert known(log).storage_ms == 15
    assert not moved(known(log), known(log)._replace(storage_ms=16.4))
    assert moved(known(log), known(log)._replace(storage_ms=16.6))
    assert moved(known(log), known(log)._replace(idle_ms=0.2)), "it waits where it did not"
    assert not moved(known(log), known(log)._replace(idle_ms=0.09)), "noise of a stage that is none"


def test_too_few_iterations_are_stored_but_not_reported() -> None:
    """The script was stopped after six of them; the next one completes the profile."""
    log = StageRegistry()
    for expected in ([], [KEY]):
        log.measured(who(), 4, 1_000, samples((0, 0, 50, 0), MIN_ITERATIONS // 2 + 1))
        assert published(log) == expected


def test_one_owner_among_three_moves_it_only_between_the_others() -> None:
    """Mallory tells of iterations that load for an hour, and of others that never load, a thousand times."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    learn(log, "bob", 24, 11, 64, 12)
    for lie in ((100_000, 0, 1, 0), (0, 0, 0.02, 0)):
        learn(log, "mallory", *lie, times=1_000)
        found = known(log)
        assert 20 <= found.storage_ms <= 24
        assert 10 <= found.cpu_ms <= 11
        assert 60 <= found.gpu_ms <= 64
        assert 10 <= found.network_ms <= 12
        assert sum(found[:4]) + found.idle_ms == found.iteration_ms


def test_of_two_owners_the_first_counts() -> None:
    """Neither can outvote the other: what the cell has planned with stays until a third has measured."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    before = known(log)
    learn(log, "mallory", 5_000, 0, 1, 0)
    assert known(log) == before
    learn(log, "bob", 22, 10, 60, 10)
    assert known(log).storage_ms == 22


@pytest.mark.parametrize(
    ("job", "gpus", "share", "told_ms", "reason"),
    [
        (who(model=None), 4, 1_000, (1, 1, 1, 1), "the job names no model or no batch size"),
        (who(batch=None), 4, 1_000, (1, 1, 1, 1), "the job names no model or no batch size"),
        (who(), 0, 1_000, (1, 1, 1, 1), "the job has no GPU"),
        (who(), 1, 500, (1, 1, 1, 1), "the job shares its GPU"),
        (who(), 4, 1_000, (0, 0, 0, 0), "nothing was used"),
        (who(), 4, 1_000, (0, 0, 4_000_000, 0), "no iteration lasts so long or so short"),
        (who(), 4, 1_000, (0, 0, 0.001, 0), "no iteration lasts so long or so short"),
    ],
)
def test_what_cannot_teach_is_rejected(
    job: JobInfo, gpus: int, share: int, told_ms: tuple[float, ...], reason: str
) -> None:
    """Jobs that name nothing, shares of a GPU, broken counters: no profile, and each is counted."""
    log = StageRegistry()
    assert log.measured(job, gpus, share, samples(told_ms)) is None
    assert log.rejected == {reason: 1}
    assert len(log) == 0


def test_absurd_usage_is_rejected() -> None:
    """A counter that wrapped around would make everything else look idle beside it."""
    log, sound = StageRegistry(), samples((1, 1, 1, 1))
    wrapped = msgspec.structs.replace(sound.samples[0], network=1.8e19)
    log.measured(who(), 4, 1_000, msgspec.structs.replace(sound, samples=(*sound.samples, wrapped)))
    assert log.rejected == {"no machine has so much": 1}


def test_what_the_ledger_says_was_published_is_not_reported_again() -> None:
    """After a restart the estimator folds measurements and what it had told of them; the last of it was never
    sent."""
    first, ledger = StageRegistry(), []
    for owner, storage_ms in (("ada", 20.0), ("bob", 30.0)):
        first.measured(who(owner, batch=int(storage_ms)), 4, 1_000, samples((storage_ms, 1, 1, 1)))
        ledger += [event for event, _ in first.news()]
    again = StageRegistry()
    for owner, storage_ms in (("ada", 20.0), ("bob", 30.0)):
        again.measured(who(owner, batch=int(storage_ms)), 4, 1_000, samples((storage_ms, 1, 1, 1)))
    assert again.published(ledger[0]) is not None
    assert [key.batch for key in published(again)] == [30]
    assert again.published(msgspec.structs.replace(ledger[0], model="unknown")) is None


def test_rows_that_were_stored_bring_back_the_same_state() -> None:
    """What Postgres holds of three owners and of what was told, read in its order."""
    log, rows = StageRegistry(), []
    for owner, storage_ms in (("ada", 20), ("bob", 22), ("eve", 90)):
        rows.append(log.measured(who(owner), 4, 1_000, samples((storage_ms, 10, 60, 10))))
    [(event, _)] = log.news()
    rows.append(log.published(event))
    again = StageRegistry()
    for row in rows:
        assert row is not None
        again.put(row)
    assert known(again) == known(log)
    assert published(again) == []
    again.put(Owned(KEY._replace(gpus=8), "", known(log)))
    assert log.get(KEY._replace(gpus=8)) is None


def test_the_fold_knows_whose_samples_they_are() -> None:
    """A gang of two workers with two GPUs each and a server of parameters; samples come from a worker, from
    the server, from a task that nobody knows, and again after the job has ended: only the first teach, as of
    four GPUs."""
    cell = Cell()
    cell.submit("job-1")
    cell.place("job-1", gpus=2, workers=2, servers=1)
    by_task = {
        task: msgspec.structs.replace(samples((20, 10, 60, 10)), task_id=task)
        for task in ("job-1/1/1", "job-1/1/2", "x")
    }
    for fact in by_task.values():
        cell.record(fact)
    [(event, _)] = cell.ledger.stages.news()
    assert (key_of(event), event.iterations) == (StageKey("resnet18", 64, 4), 20)
    for rank in range(3):
        cell.exit("job-1", Usage(), rank=rank, code=1)
    cell.record(JobEnded(job_id="job-1", outcome="failed"))
    cell.record(by_task["job-1/1/1"])
    assert known(cell.ledger.stages).iterations == 20
    cell.ledger.learning = False
    cell.submit("job-2")
    cell.place("job-2", gpus=4)
    cell.record(msgspec.structs.replace(samples((90, 10, 60, 10)), task_id="job-2/1/0"))
    assert known(cell.ledger.stages).iterations == 20, (
        "folded again after a restart: its rows came from Postgres"
    )


def test_memory_is_bounded_and_a_sweep_pushes_out_its_own() -> None:
    """Mallory names her models by the date; later more people do than there is room for."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    for number in range(2 * STAGE_KEYS_OF_ONE):
        log.measured(who("mallory", f"m{number}"), 4, 1_000, samples((1, 1, 1, 1)))
    assert known(log).storage_ms == 20
    assert len(log) == 1 + STAGE_KEYS_OF_ONE
    for number in range(STAGE_KEYS):
        log.measured(who(f"o{number % 8}", f"n{number}"), 4, 1_000, samples((1, 1, 1, 1)))
    assert len(log) == STAGE_KEYS
    assert log.get(KEY) is None
    for number in range(STAGE_OWNERS + 3):
        log.measured(who(f"p{number}", "crowd"), 4, 1_000, samples((1, 1, 1, 1)))
    assert log.rejected == {"enough owners have measured it": 3}
    assert len(published(log)) == STAGE_KEYS
    assert combined([]) is None


def test_a_job_is_estimated_with_the_stages_of_its_kind() -> None:
    """Measured on four GPUs; the same network on eight has half as many to go by, on one nothing, and with
    another batch nothing."""
    log = StageRegistry()
    learn(log, "ada", 20, 10, 60, 10)
    spec = JobSpec(owner="bob", command=("python", "train.py"), model="resnet18", batch_size=64)
    assert log.times(spec, 4) is None, "the cell has not been sent it"
    assert published(log) == [KEY]
    expected = StageTimes(storage_ms=20, cpu_ms=10, gpu_ms=60, network_ms=10, iteration_ms=100)
    assert log.times(spec, 4) == expected
    assert log.times(msgspec.structs.replace(spec, workers=4), 1) == expected
    assert log.times(spec, 8) == expected
    assert log.times(spec, 1) is None
    assert log.times(spec, 0) is None
    assert log.times(msgspec.structs.replace(spec, batch_size=128), 4) is None
    assert log.times(msgspec.structs.replace(spec, model=None), 4) is None
