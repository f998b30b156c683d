"""Shares of GPUs from estimates (Liquid §6.2), pairs that are kept apart, and what `why` says of both."""

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import Reason
from penstock.cluster.view import assign
from penstock.ledger.check.check import check
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import WHOLE_GPU, Estimate, PairSpeed, ResourceVector
from penstock.model.schema.validation import checked
from penstock.scheduling.profiles import profile_for
from penstock.why.explain import explain
from tests.support.cluster import builders as b

MEMORY_MIB = 6_000
NOTHING_ASKED = ResourceRequest()


def cell(share_gpus: str = "fits", gpus: int = 1, profile: str = "liquid") -> CellState:
    settings = checked(PlacerSettings, {"profile": profile, "share_gpus": share_gpus})
    return b.cell(nodes=1, gpus=gpus, settings=settings)


def estimated(
    state: CellState,
    job_id: str,
    percent: float = 50.0,
    memory_mib: int = MEMORY_MIB,
    pairs: tuple[PairSpeed, ...] = (),
    asked: ResourceRequest = NOTHING_ASKED,
    model: str = "net",
    **more: object,
) -> JobState:
    spec = JobSpec(command=("train",), model=model, batch_size=16, resources=asked)
    b.apply(state, external_events.JobSubmitted(job_id=job_id, spec=spec))
    worker = ResourceVector(
        gpus=1,
        gpu_utilisation_percent=percent,
        gpu_memory_mib=memory_mib,
        gpu_share_milli=asked.gpu_share_milli or WHOLE_GPU,
    )
    found = Estimate(worker=worker, confidence=0.9, tier="history", source="runs", pairs=pairs, **more)
    b.apply(state, JobEstimated(job_id=job_id, estimate=found))
    return state.jobs[job_id]


def plan(state: CellState, job: JobState) -> Plan | None:
    return profile_for(state.settings).place.place(state, job, LazyRng(0))


def started(state: CellState, job: JobState) -> None:
    found = plan(state, job)
    assert found is not None, f"{job.job_id} fits"
    b.apply(state, assign(state, job, found))
    assert check(state) == []


def speed(model: str, own: float, other: float, gpu_model: str = "V100") -> PairSpeed:
    return PairSpeed(model=model, batch_size=16, gpu_model=gpu_model, own=own, other=other, runs=3)


def test_two_jobs_meet_whose_utilisations_and_memories_fit_and_a_third_waits() -> None:
    state = cell()
    started(state, estimated(state, "a"))
    started(state, estimated(state, "b", 45.5))
    assert {task.place.gpus for job in state.jobs.values() for task in job.tasks.values()} == {(0,)}
    third = estimated(state, "c", 10.0)
    assert plan(state, third) is None, "100 % of the time is promised, or nearly so"
    text = explain(state, "b").text
    assert "It shares GPU 0 of n0 with a: 96 % of its time and 12000 of 16384 MiB are promised." in text
    assert "Beside a: the slowdown of this pair was not measured." in text


def test_memory_that_does_not_fit_keeps_them_apart() -> None:
    state = cell()
    started(state, estimated(state, "a", 10.0, 9_000))
    assert plan(state, estimated(state, "b", 10.0, 9_000)) is None


@pytest.mark.parametrize("percent", [0.0, 100.0])
def test_a_job_without_a_believable_prediction_has_its_gpu_alone(percent: float) -> None:
    state = cell()
    job = estimated(state, "a", percent)
    assert job.demand.worker.gpu_share_milli == WHOLE_GPU
    started(state, job)
    waiting = estimated(state, "b", 5.0)
    assert plan(state, waiting) is None


def test_unknown_memory_first_of_kind_and_the_users_word_mean_a_whole_gpu() -> None:
    state = cell(gpus=4)
    assert estimated(state, "a", memory_mib=0).demand.worker.gpu_share_milli == WHOLE_GPU
    assert estimated(state, "b", first_of_kind=("network",)).demand.worker.gpu_share_milli == WHOLE_GPU
    whole = ResourceRequest(gpu_share_milli=WHOLE_GPU)
    assert estimated(state, "c", asked=whole).demand.worker.gpu_share_milli == WHOLE_GPU
    part = ResourceRequest(gpus=1, gpu_share_milli=300)
    assert estimated(state, "d", asked=part).demand.worker.gpu_share_milli == 300
    assert estimated(cell("never"), "e").demand.worker.gpu_share_milli == WHOLE_GPU


def test_a_pair_that_slows_each_other_too_much_is_refused_with_its_figures() -> None:
    """0.4 + 0.5: both would end later than one after the other. Liquid's rule alone would let them meet."""
    slow = (speed("net", 0.4, 0.5),)
    exact = cell("fits")
    started(exact, estimated(exact, "a"))
    assert plan(exact, estimated(exact, "b", pairs=slow)) is not None
    state = cell("learned")
    started(state, estimated(state, "a"))
    assert plan(state, estimated(state, "b", pairs=slow)) is None
    answer = explain(state, "b")
    assert answer.reason is Reason.GPU_NEIGHBOURS
    assert answer.detail == (
        "GPU 0 of n0: beside a it had 0.40 of its speed alone and the other 0.50, in 3 runs of such pairs"
    )


def test_what_the_running_job_knows_of_the_pair_counts_too() -> None:
    state = cell("learned")
    started(state, estimated(state, "a", pairs=(speed("other", 0.9, 0.2),)))
    assert plan(state, estimated(state, "b", model="other")) is None, "it would have a fifth of its speed"


def test_a_good_pair_an_unknown_one_and_one_of_another_gpu_model_meet() -> None:
    for pairs in ((speed("net", 0.8, 0.7),), (), (speed("net", 0.1, 0.1, "K80"),)):
        state = cell("learned")
        started(state, estimated(state, "a"))
        started(state, estimated(state, "b", pairs=pairs))
        assert state.jobs["b"].sharing.jobs == ("a",)


def test_a_refused_job_goes_to_a_free_gpu_and_three_never_meet() -> None:
    state = cell("learned", gpus=2)
    started(state, estimated(state, "a", 20.0, 2_000))
    started(state, estimated(state, "b", 20.0, 2_000, (speed("net", 0.4, 0.4),), model="slow"))
    assert state.jobs["b"].tasks["b.1.w0"].place.gpus == (1,)
    started(state, estimated(state, "c", 20.0, 2_000))
    assert state.jobs["c"].sharing.jobs == ("a",)
    started(state, estimated(state, "d", 20.0, 2_000, model="third"))
    assert state.jobs["d"].sharing.jobs == ("b",)
    assert plan(state, estimated(state, "e", 20.0, 2_000)) is None
    assert "only pairs are measured" in explain(state, "e").detail


@pytest.mark.parametrize("profile", ["penstock", "fifo", "random", "fgd", "hived", "packing"])
def test_under_any_profile_the_answer_can_be_carried_out(profile: str) -> None:
    state = cell("learned", gpus=2, profile=profile)
    for job_id in "abcd":
        started(state, estimated(state, job_id))
    assert [len(state.jobs[job_id].sharing.jobs) for job_id in "abcd"] == [1, 1, 1, 1]


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0, 3.0])
def test_impossible_speeds_are_refused_at_the_door(bad: float) -> None:
    fields = {"model": "net", "gpu_model": "V100", "own": bad, "other": 0.5, "runs": 1}
    with pytest.raises(ValidationError, match="own"):
        checked(PairSpeed, fields)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("gpu_utilisation_percent", 101.0), ("gpu_utilisation_percent", float("nan")), ("gpu_memory_mib", -1)],
)
def test_impossible_needs_are_refused_at_the_door(name: str, bad: float) -> None:
    with pytest.raises(ValidationError, match=name):
        checked(ResourceVector, {"gpus": 1, name: bad})


@pytest.mark.parametrize("gone", [0, 1])
def test_a_gpu_that_is_taken_out_renames_no_other(gone: int) -> None:
    """Two cards, the second one shared. One is taken out: indexes of the inventory move, slots of jobs do
    not."""
    state = cell("learned", gpus=2)
    started(state, estimated(state, "alone", 100.0))
    started(state, estimated(state, "a"))
    [task] = state.jobs["a"].tasks.values()
    assert task.place.gpus == (1,)
    node = state.nodes["n0"].spec
    left = tuple(
        replace(gpu, index=0, model="K80" if gone else gpu.model) for gpu in node.gpus if gpu.index != gone
    )
    b.apply(state, external_events.NodeChanged(node=replace(node, gpus=left)))
    slow = (speed("net", 0.4, 0.5, "V100"),)
    assert plan(state, estimated(state, "slow", pairs=slow)) is None, "as measured on the card it would share"
    fits = plan(state, estimated(state, "b"))
    assert (fits is None) == bool(gone), "the shared card itself may be gone"
    text = explain(state, "a").text
    assert "It has a GPU to share" in text
    assert check(state) == []
