"""Moldable jobs: each attempt has as many workers of the job's range as there is room for, and everybody asks
the attempt."""

import json
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import Refusal
from penstock.ledger.check.check import check
from penstock.ledger.derived.stages import profile_of
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.views import job_row
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.estimates import JobEstimated, StagesProfiled
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import ShapeOption
from penstock.model.proposals import MigrationProposed, PlanProposed, ProposedJob, ProposedUnit
from penstock.model.wire.codec import decode_as, encode
from penstock.proposals.validate import validate
from penstock.proposals.validate_plans import validate_plan
from penstock.scheduling.order.deadlines import option_of
from penstock.scheduling.remaining_time import ends_s, remaining_s
from penstock_papers.baselines.baselines import FirstFit
from penstock_services.gateway.core.forecasts.eta import ends_ms
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.submission import spec_from_json
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec

PROFILES = ("fifo", "penstock", "srtf", "tiresias", "kubeflow", "hived", "random", "liquid")


def moldable(fewest: int = 1, most: int = 4, whole: int = 66, **more: object) -> JobSpec:
    return job_spec(workers=most, min_workers=fewest, global_batch_size=whole, **more)


def cell(*gpus: int, profile: str = "fifo") -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(*(node_spec(f"n{number}", count) for number, count in enumerate(gpus)))
    return driver


def agree(driver: CellDriver, job_id: str, workers: int, whole: int = 66) -> None:
    """Orders, peers, ports, ranks and batches are those of a gang of so many workers."""
    found = driver.environments(job_id)
    assert [env["RANK"] for env in found] == [str(rank) for rank in range(workers)]
    assert {env["WORLD_SIZE"] for env in found} == {str(workers)}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found}) == 1
    batches = [int(env["PENSTOCK_BATCH_SIZE"]) for env in found]
    assert sum(batches) == whole
    assert max(batches) - min(batches) <= 1
    assert {env["PENSTOCK_GLOBAL_BATCH_SIZE"] for env in found} == {str(whole)}
    orders = [one for one in driver.orders() if isinstance(one, StartTask) and one.job_id == job_id]
    assert all(len(order.peers) == workers for order in orders)


@pytest.mark.parametrize("profile", PROFILES)
def test_two_workers_in_a_crowded_cell_and_four_after_a_node_has_joined(profile: str) -> None:
    """Alice asks for 1 to 4 workers. Two GPUs are free; then her node reboots, a colleague's node joins, and
    she gets all four."""
    driver = cell(4, profile=profile)
    driver.submit("long", job_spec(workers=2))
    driver.at(100)
    driver.start("long")
    driver.submit("alice", moldable(attempts=2, backoff_ms=0))
    driver.at(200)
    job = driver.job("alice")
    assert (job.status, job.workers, len(job.tasks)) == (JobStatus.LAUNCHING, 2, 2)
    assert driver.explanations[-1].shape.startswith("2 of 1 to 4 workers: as many as fit now")
    agree(driver, "alice", 2)
    driver.start("alice")
    driver.join(node_spec("n9", 4))
    assert job_row(job, 1)["workers"] == 2
    for task_id in list(job.tasks):
        driver.exit(task_id, 1)
    driver.at(2_000)
    assert (job.attempt, job.workers, len(job.tasks)) == (2, 4, 4)
    agree(driver, "alice", 4)
    assert load(dump(driver.state)).jobs["alice"].workers == 4


def test_fewer_than_the_fewest_wait() -> None:
    """One GPU is free and the job needs two: it waits as a gang of two does, and its colleague's small job
    passes."""
    driver = cell(4)
    driver.submit("long", job_spec(workers=3))
    driver.submit("bob", moldable(2, 4))
    job = driver.job("bob")
    assert (job.status, job.demand.workers) == (JobStatus.QUEUED, 2)
    driver.submit("small")
    assert driver.job("small").status is JobStatus.LAUNCHING
    assert job.backfill_count == 1


def test_a_cell_for_the_fewest_is_large_enough() -> None:
    """A range up to 256 in a cell of four GPUs is no reason to end the job as unschedulable."""
    driver = cell(4)
    driver.submit("wide", moldable(1, 256, 256))
    assert driver.job("wide").workers == 4
    driver.submit("wider", moldable(5, 256, 256))
    assert driver.job("wider").unschedulable


def test_who_replans_counts_a_moldable_job_with_its_fewest() -> None:
    """Under srtf two jobs come at once: the plan gives the first one GPU, and the second its three, although
    all four would fit the first."""
    driver = cell(4, profile="srtf")
    driver.submit("a", moldable(1, 4))
    driver.submit("b", job_spec(workers=3))
    driver.at(100)
    assert (driver.job("a").workers, driver.job("b").status) == (1, JobStatus.LAUNCHING)
    assert driver.explanations[0].shape == "1 of 1 to 4 workers: as many as the profile finds nodes for now"


def test_nodes_kept_for_a_large_job_are_not_taken_by_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place stage refuses a gang of seven and takes one of five: the largest that it takes is found, not
    the smallest."""
    driver = cell(8)
    place = FirstFit.place

    def bounded(self: FirstFit, state: object, job: object, rng: LazyRng) -> object:
        return None if job.workers > 5 else place(self, state, job, rng)

    monkeypatch.setattr(FirstFit, "place", bounded)
    driver.submit("m", moldable(1, 7))
    assert driver.job("m").workers == 5


def test_a_proposal_may_choose_any_number_of_the_range() -> None:
    """The batcher plans three workers of one to four: accepted, and placed with three. Five are refused
    although they would fit."""
    state = b.cell(nodes=1, gpus=8)
    b.apply(state, JobSubmitted(job_id="m", spec=moldable()))
    b.apply(state, JobEstimated(job_id="m", estimate=b.estimate()))

    def of(workers: int) -> PlanProposed:
        unit = ProposedUnit(jobs=(ProposedJob(job_id="m", nodes=("n0",) * workers),), explanation="")
        return PlanProposed(proposal_id="p", proposer="batcher", units=(unit,))

    assert validate(state, of(3)).accepted
    refused = validate(state, of(5))
    assert (refused.accepted, refused.reason) == (False, "invalid")
    validated = validate_plan(state, of(3))
    assert not isinstance(validated, Refusal)
    b.apply(state, PlacementDecided(job_id="m", attempt=1, tasks=validated.units[0].placed[0].tasks))
    assert (state.jobs["m"].workers, check(state)) == (3, [])


def test_a_move_may_give_it_another_shape() -> None:
    """A job started with one worker in a crowded cell. A node joins, and the migrator moves it there with
    three: they are reserved before the one stops."""
    driver = cell(1)
    driver.submit("m", moldable())
    driver.start("m")
    driver.join(node_spec("n9", 4))
    nodes = ("n9", "n9", "n9")
    driver.feed(
        MigrationProposed(proposal_id="p", proposer="migrator", reason="widen", job_id="m", nodes=nodes)
    )
    driver.exit("m.1.w0", None, cause="stopped", signal=15)
    job = driver.job("m")
    assert (job.attempt, job.workers, job.status) == (2, 3, JobStatus.LAUNCHING)
    agree(driver, "m", 3)


def test_stages_are_those_of_the_attempts_shape() -> None:
    """66 samples over two workers are 33 each: what was profiled with 33 on two GPUs is about this
    attempt."""
    driver = cell(2)
    driver.submit("m", moldable(model="resnet50"))
    stages = StagesProfiled(
        model="resnet50",
        batch_size=33,
        gpus=2,
        storage_ms=1,
        cpu_ms=1,
        gpu_ms=1,
        network_ms=1,
        idle_ms=1,
        iteration_ms=5,
        iterations=20,
    )
    driver.feed(stages)
    assert profile_of(driver.state, driver.job("m")) == stages


def test_the_record_of_a_fixed_job_is_what_it_was() -> None:
    """Ledgers of before must have the same bytes after an upgrade: what a fixed job does not say is not
    written."""
    event = JobSubmitted(job_id="j", spec=job_spec(workers=2))
    assert not {b"min_workers", b"global_batch_size"} & set(encode(event).split(b'"'))
    moldable_too = JobSubmitted(job_id="j", spec=moldable())
    assert decode_as(JobSubmitted, encode(moldable_too)) == moldable_too


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        (
            {"min_workers": 5, "workers": 4, "global_batch_size": 8},
            "min_workers: 5 is more than the most workers, 4",
        ),
        ({"min_workers": 1, "workers": 4}, "global_batch_size: is missing"),
        ({"min_workers": 1, "workers": 4, "global_batch_size": 3}, "give at least 4"),
        (
            {"min_workers": 1, "workers": 4, "global_batch_size": 8, "parameter_servers": 1},
            "remove them or give one",
        ),
        ({"batch_size": 2, "global_batch_size": 8}, "batch_size: contradicts global_batch_size"),
    ],
)
def test_a_spec_that_cannot_be_shared_is_refused(fields: dict[str, int], remedy: str) -> None:
    """Programs write specs without a job file: the same rules hold where the value is made."""
    with pytest.raises(ValueError, match=remedy):
        JobSpec(command=("true",), **fields)  # type: ignore[arg-type]


def option(workers: int, step_ms: float) -> ShapeOption:
    return ShapeOption(
        workers=workers,
        nodes=1,
        gpus_per_node=min(workers, 8),
        step_ms=step_ms,
        low_ms=step_ms * 0.9,
        high_ms=step_ms * 1.1,
    )


SCALES = tuple(option(workers, 100 / workers**0.9) for workers in range(1, 9))
"""Each GPU does at least 0.81 of what one alone does."""
STALLS = (option(1, 100), option(2, 60), option(3, 62), option(4, 45), option(8, 40))
"""Eight GPUs do 2.5 times the work of one, so each 0.31 of it; four do 2.2 times, so each 0.56."""


@pytest.mark.parametrize(
    ("options", "free", "workers", "why"),
    [
        (
            SCALES,
            8,
            8,
            "8 of 1 to 8 workers: 15.39 ms an iteration (13.85 to 16.93), 6.50 × as fast as with 1",
        ),
        (
            SCALES,
            5,
            5,
            "5 of 1 to 8 workers: 23.49 ms an iteration (21.14 to 25.84), 4.26 × as fast as with 1",
        ),
        (
            STALLS,
            8,
            4,
            "4 of 1 to 8 workers: 45 ms an iteration (40.5 to 49.5), 2.22 × as fast as with 1; 8 would fit",
        ),
        (
            STALLS,
            3,
            2,
            "2 of 1 to 8 workers: 60 ms an iteration (54 to 66), 1.67 × as fast as with 1; 3 would fit",
        ),
        (STALLS, 1, 1, "1 of 1 to 8 workers: 100 ms an iteration (90 to 110)"),
        (
            (option(1, 100), option(8, 130)),
            8,
            1,
            "1 of 1 to 8 workers: 100 ms an iteration (90 to 110); 8 would fit",
        ),
        (
            (),
            8,
            8,
            "8 of 1 to 8 workers: as many as fit now; its step time with 8 is unknown",
        ),
        (
            STALLS[1:],
            8,
            8,
            "8 of 1 to 8 workers: as many as fit now; its step time with 1 is unknown",
        ),
        (
            STALLS[:1],
            5,
            5,
            "5 of 1 to 8 workers: as many as fit now; its step time with 5 is unknown",
        ),
    ],
)
def test_penstock_takes_what_is_worth_its_gpus(
    options: tuple[ShapeOption, ...], free: int, workers: int, why: str
) -> None:
    """A network that scales gets all that is free; one whose workers mostly wait for each other leaves GPUs
    to others; one that is slower on two nodes' worth of workers runs on one. Who is unknown gets what is
    free, and is known next time."""
    driver = cell(8, profile="penstock")
    if free < 8:
        driver.submit("held", job_spec(workers=8 - free))
    driver.submit("m", moldable(1, 8), msgspec.structs.replace(estimate(), options=options))
    assert (driver.job("m").workers, driver.explanations[-1].shape) == (workers, why)


def test_the_time_left_is_that_of_the_attempts_shape() -> None:
    """With one worker it would take 100 s; it runs with four, whose iterations take 45 of 100 ms: the queue
    behind it is told 45 s, not 100."""
    driver = cell(4, profile="penstock")
    known = msgspec.structs.replace(estimate(), options=STALLS[:4], run_ms=100_000)
    driver.submit("m", moldable(1, 4), known)
    driver.start("m")
    job, state = driver.job("m"), driver.state
    assert (job.workers, remaining_s(state, job), ends_ms(job, state.now_ms)) == (
        4,
        45,
        state.now_ms + 45_000,
    )
    assert ends_s(job) == state.now_ms / 1_000 + 45
    assert known.run_ms_with(9, 1) == known.run_ms, "nothing is known of nine"
    unknown = msgspec.structs.replace(known, run_ms=None)
    assert unknown.run_ms_with(4, 1) is None


def test_of_as_many_workers_the_option_with_its_nodes_counts() -> None:
    """Two workers take 50 ms on one node and 90 on two. It runs on two nodes, so that is what its odds go
    by."""
    driver = CellDriver(PlacerSettings(profile="penstock"))
    driver.join(node_spec("n1", 1), node_spec("n2", 1))
    options = [
        ShapeOption(
            workers=2, nodes=nodes, gpus_per_node=2 // nodes, step_ms=ms, low_ms=ms - 1, high_ms=ms + 1
        )
        for nodes, ms in ((1, 50.0), (2, 90.0))
    ]
    one = ShapeOption(workers=1, nodes=1, gpus_per_node=1, step_ms=100.0, low_ms=99.0, high_ms=101.0)
    known = msgspec.structs.replace(estimate(), options=(one, *options), run_ms=100_000)
    driver.submit("m", moldable(1, 2), known)
    driver.start("m")
    found = option_of(driver.job("m"))
    assert found is not None
    assert (found.nodes, found.step_ms) == (2, 90.0)


def test_the_gateway_names_field_and_remedy() -> None:
    """CI sends machine units as JSON, where a range is two fields."""
    body = {"command": ["x"], "workers": 4, "min_workers": 5, "global_batch_size": 8}
    with pytest.raises(Problem) as refused:
        spec_from_json(json.dumps(body).encode())
    [error] = refused.value.body()["errors"]
    assert error == {
        "field": "min_workers",
        "message": "5 is more than the most workers, 4",
        "remedy": "give a smaller one",
    }
    accepted = spec_from_json(json.dumps(body | {"min_workers": 2}).encode())
    assert (accepted.fewest_workers, accepted.workers) == (2, 4)


def test_absurd_options_harm_nobody() -> None:
    """An estimator of another version sends options beyond the range, twice, and unsorted: the number is of
    the range all the same."""
    for options in (
        (option(1, 1e-300), option(8, 9e10)),
        (option(1, 100), option(1, 50), option(2, 1e-9)),
        (option(200, 1), option(1, 2)),
    ):
        driver = cell(4, profile="penstock")
        driver.submit("m", moldable(1, 4), msgspec.structs.replace(estimate(), options=options))
        assert 1 <= driver.job("m").workers <= 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.sampled_from(PROFILES),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20), st.integers(1, 2)), min_size=1, max_size=6),
    st.data(),
)
def test_every_attempt_has_a_shape_of_the_range(
    profile: str, nodes: list[int], jobs: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Jobs of all ranges come, fail, are stopped and start again in cells of all sizes: check(state) holds
    after every step (the driver asserts it), and the orders of each attempt are of one gang whose batches add
    up."""
    driver = cell(*nodes, profile=profile)
    wholes: dict[str, int] = defaultdict(int)
    for number, (fewest, more, _) in enumerate(jobs):
        wholes[f"j{number}"] = fewest + more + data.draw(st.integers(0, 9))
        driver.submit(
            f"j{number}", moldable(fewest, fewest + more, wholes[f"j{number}"], attempts=3, backoff_ms=0)
        )
    for turn in range(1, 6):
        driver.at(turn * 1_000)
        for job_id, job in list(driver.state.jobs.items()):
            if job.status is JobStatus.LAUNCHING:
                assert job.spec.fewest_workers <= job.workers == len(job.tasks) <= job.spec.workers
                agree(driver, job_id, job.workers, wholes[job_id])
                driver.start(job_id)
            elif job.status is JobStatus.RUNNING and data.draw(st.booleans()):
                for task_id in list(job.tasks):
                    if job_id in driver.state.jobs and task_id in job.tasks:
                        driver.exit(task_id, data.draw(st.sampled_from([0, 1])))
    assert check(driver.state) == []
