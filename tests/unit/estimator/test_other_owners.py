"""Mallory's past, whatever is in it, moves what others are told only within the stated bounds; tier by tier.

The learned model's bound is in `test_learn_model` (one owner cannot move what two others measured).
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, StageSample, StagesMeasured
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.topics import Topic
from penstock.model.schema.validation import checked
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.learning.limits import ABOVE_OTHERS
from penstock_services.estimator.core.learning.owner_table import NO_OWNER
from penstock_services.estimator.core.records.history import History, Run, bounded
from penstock_services.estimator.core.records.runs import (
    MAX_HOST_MEMORY_MIB,
    MAX_RUN_MS,
    NO_CARD,
    Allocation,
    job_info,
)
from penstock_services.estimator.core.resource_model.training import RESOURCES
from penstock_services.estimator.core.resources.bounds import Bounds
from penstock_services.estimator.core.resources.cores import CoresTier
from penstock_services.estimator.core.resources.estimate import MEMORY_PERCENT, HistoryTier, Tier, estimate
from penstock_services.estimator.core.resources.nearest import NearestTier
from penstock_services.estimator.core.stages.profile import StageKey
from penstock_services.estimator.core.stages.registry import StageRegistry
from penstock_services.estimator.shell.service import Estimator
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog

MODELS = ("resnet50", "bert")
NODE_MIB, NODE_CORES, CARD_MIB = 131_072, 32, 16_384

amounts = st.one_of(
    st.sampled_from([0.0, 1e-9, 1.0, 1_023.0, 1e30, math.nan, math.inf]),
    st.floats(min_value=0, max_value=1e18),
).map(bounded)  # as the fold takes them
lies = st.fixed_dictionaries(
    {
        "model": st.sampled_from([*MODELS, None]),
        "batch_size": st.sampled_from([None, 1, 32, 64, 128, 1 << 30]),
        "category": st.sampled_from(["cv", "nlp", None]),
        "workers": st.sampled_from([1, 256]),
        "run": st.fixed_dictionaries(
            {
                "run_ms": amounts.map(lambda value: min(value, float(MAX_RUN_MS))),
                "busy_cores": amounts.map(lambda value: min(value, 1_024.0)),
                "host_memory_mib": amounts.map(lambda value: min(value, float(MAX_HOST_MEMORY_MIB))),
                "gpu_memory_mib": amounts,
                "gpu_utilisation_percent": st.floats(min_value=0, max_value=100),
            }
        ),
        "killed_with": st.sampled_from([0, 1, 2_048, 1 << 30]),
        "times": st.sampled_from([1, 3, 50]),
    }
)
pasts = st.lists(lies, max_size=8)


def spec(owner: str, command: str = "train.py", **more: Any) -> JobSpec:
    fields: dict[str, Any] = {"model": "resnet50", "batch_size": 64, "category": "cv"} | more
    return JobSpec(owner=owner, command=("python", command), **fields)


class Fold:
    """What the cell's tiers know, on two kinds of nodes."""

    def __init__(self) -> None:
        self.known = State(Topic.JOBS, 0)
        self.known.nodes.put(msgspec.structs.replace(node_spec("small", 4, cores=16), host_memory_mib=32_768))
        self.known.nodes.put(node_spec("large", 8))
        self.seq = 0

    def ran(self, job: JobSpec, **run: float) -> None:
        self.seq += 1
        measured, who = Run(ended_ms=self.seq, seq=self.seq, gpus=1, **run), job_info(job)
        self.known.history.add(who.key, measured, who.owner)
        self.known.nearest.add(who, measured)
        self.known.past_cores.add(who, Allocation(1, 1_000, 4, NO_CARD), measured)

    def honest(self, owner: str, *batches: int) -> None:
        """Sound runs: some 3 GB, 2 cores, a minute."""
        for number, batch in enumerate(batches):
            self.ran(
                spec(owner, f"{owner}.py", batch_size=batch),
                run_ms=60_000 + 100 * number,
                busy_cores=2.0,
                host_memory_mib=3_000 + number,
                gpu_memory_mib=8_000 + number,
                gpu_utilisation_percent=70 + number,
            )

    def mallory(self, past: Sequence[dict[str, Any]]) -> None:
        """All that one owner can do to the fold, sound as far as `doubt` can tell."""
        for one in past:
            what = {name: one[name] for name in ("model", "batch_size", "category", "workers")}
            for number in range(one["times"]):
                job = spec("mallory", f"{number}.py", **what)
                self.ran(job, **one["run"])
                self.known.kills.host.add(job_info(job), one["killed_with"])

    def predicted(self, job: JobSpec) -> Estimate:
        tiers: tuple[Tier, ...] = (
            HistoryTier(self.known.history),
            NearestTier(self.known.nearest),
            CoresTier(self.known.past_cores, self.known.nodes),
        )
        return estimate(job, tiers, None, Bounds(self.known.kills, self.known.nodes))


def both(past: Sequence[dict[str, Any]], *owners: str) -> tuple[Fold, Fold]:
    """The cell without Mallory's past and with it, mixed among the others' runs."""
    without, having = Fold(), Fold()
    for cell in (without, having):
        for number, owner in enumerate(owners):
            cell.honest(owner, 64, 64)
            if cell is having and number == 0:
                cell.mallory(past)
    if not owners:
        having.mallory(past)
    return without, having


@settings(max_examples=40, deadline=None)
@given(pasts)
def test_who_has_a_history_is_reported_the_same(past: list[dict[str, Any]]) -> None:
    """Bob runs his nightly training again: his own runs answer, in every field."""
    without, having = both(past, "bob", "ada")
    job = spec("bob", "bob.py")
    assert having.predicted(job) == without.predicted(job)
    assert having.predicted(job).tier == "history"


@settings(max_examples=40, deadline=None)
@given(pasts)
def test_where_two_others_ran_the_network_it_stays_between_them(past: list[dict[str, Any]]) -> None:
    """Bob's new command for a network that Ada and Eve ran: time, cores and utilisation stay within what
    those measured; memory, which is a bound, within twice of it."""
    _, having = both(past, "ada", "eve")
    found = having.predicted(spec("bob"))
    worker = found.worker
    assert found.tier == "nearest"
    assert found.run_ms is not None
    assert 60_000 <= found.run_ms <= 60_100
    assert worker.cores == 3
    assert 70 <= worker.gpu_utilisation_percent <= 71
    margin = MEMORY_PERCENT / 100
    assert math.ceil(3_000 * margin) <= worker.host_memory_mib <= math.ceil(3_001 * ABOVE_OTHERS * margin)
    assert (
        math.ceil(8_000 * margin)
        <= worker.gpu_memory_mib
        <= min(CARD_MIB, math.ceil(8_001 * ABOVE_OTHERS * margin))
    )


@settings(max_examples=40, deadline=None)
@given(pasts)
def test_against_one_other_he_at_most_doubles(past: list[dict[str, Any]]) -> None:
    """Only Ada ran the network before: nothing says who of the two is right, so what is larger counts twice
    at most, and memory up to the default in any case."""
    _, having = both(past, "ada")
    found = having.predicted(spec("bob"))
    assert found.run_ms is not None
    assert found.run_ms <= ABOVE_OTHERS * 60_100
    assert found.worker.cores <= math.ceil(2.0 * ABOVE_OTHERS * 1.25)
    assert math.ceil(2_048 * 1.1) <= found.worker.host_memory_mib <= math.ceil(3_001 * ABOVE_OTHERS * 1.1)


@settings(max_examples=40, deadline=None)
@given(pasts, st.sampled_from([None, 1, 64]))
def test_where_he_alone_is_known_the_job_can_still_be_placed(
    past: list[dict[str, Any]], batch: int | None
) -> None:
    """Nobody but Mallory ran the network: his word is the only one, but never more than the largest node
    has."""
    _, having = both(past)
    worker = having.predicted(spec("bob", batch_size=batch)).worker
    assert (worker.gpus, worker.gpu_share_milli) == (1, 1_000)
    assert 1 <= worker.cores <= NODE_CORES
    assert 0 <= worker.host_memory_mib <= NODE_MIB
    assert 0 <= worker.gpu_memory_mib <= CARD_MIB


@settings(max_examples=40, deadline=None)
@given(pasts)
def test_his_cores_and_kills_are_his_own(past: list[dict[str, Any]]) -> None:
    """Bob's first job of a network that nobody ran begins with three cores and the default memory, as
    ever."""
    without, having = both(past, "ada")
    job = spec("bob", model="nobody-ran-this")
    assert having.predicted(job) == without.predicted(job)
    assert (having.predicted(job).worker.cores, having.predicted(job).worker.host_memory_mib) == (3, 2_048)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.tuples(*[st.floats(min_value=0, max_value=1e6)] * 4),
            st.integers(min_value=1, max_value=1_000_000),
            st.integers(min_value=0, max_value=3),
        ),
        max_size=12,
    )
)
def test_stages_stay_between_two_others(predicted: list[tuple[tuple[float, ...], int, int]]) -> None:
    """Ada and Eve measured a network; Mallory tells of stages of any length, before, between and after
    them."""
    log = StageRegistry()

    def report(owner: str, stages_ms: Sequence[float], iterations: int) -> None:
        pieces = [
            checked(StageSample, {"lasted_ms": lasted, name: 1.0})
            for name, lasted in zip(("storage", "cpu", "gpu", "network"), stages_ms, strict=True)
            if lasted > 0
        ]
        if pieces:
            fact = StagesMeasured(
                node_id="n", task_id="t", token=1, at_ms=0, iterations=iterations, samples=tuple(pieces)
            )
            log.measured(job_info(spec(owner)), 4, 1_000, fact)

    for when, owner, stages_ms in (
        (0, "ada", (400, 200, 1_200, 200)),
        (1, "eve", (440, 180, 1_300, 210)),
        (2, "", ()),
    ):
        for lie, iterations, place in predicted:
            if place == when or (when == 2 and place == 3):
                report("mallory", lie, iterations)
        if owner:
            report(owner, stages_ms, 20)
    found = log.get(StageKey("resnet50", 64, 4))
    assert found is not None
    if len(log._profiles.of_key(StageKey("resnet50", 64, 4)).keys() - {NO_OWNER}) == 2:
        assert found[:4] == (20, 10, 60, 10), "the first of two"
        return
    for value, low, high in zip(found[:4], (20, 9, 60, 10), (22, 10, 65, 10.5), strict=True):
        assert low <= value <= high
    assert found.idle_ms == 0


def test_a_sweep_takes_a_quarter_of_the_history_and_no_more() -> None:
    """Mallory submits a new command each minute for a month: who ran before her is forgotten no earlier for
    it than by a quarter."""
    history = History(keys=40, keys_of_one=10)
    for number in range(30):
        history.add(f"ada-{number}".encode(), Run(1, 1), f"o{number % 5}")
    for number in range(5_000):
        history.add(f"mallory-{number}".encode(), Run(1, 1), "mallory")
    assert len(history) == 40
    assert all(history.get(f"ada-{number}".encode()) for number in range(30))
    assert history.get(b"mallory-4999") is not None
    assert history.get(b"mallory-4989") is None


@pytest.mark.parametrize(
    ("past", "job", "tier"),
    [
        ([], spec("bob"), "default"),
        (["resnet50"], spec("bob"), "nearest"),
        (["resnet50"], spec("bob", model="unknown-net"), "default"),
        (["resnet50"], spec("bob", model=None, batch_size=None), "default"),
        (["resnet50"], spec("ada", "ada.py"), "history"),
    ],
)
def test_what_is_not_known_falls_back_a_tier(past: list[str], job: JobSpec, tier: str) -> None:
    """No history at all, a cell that runs one network only, a network that nobody ran, a job that names
    none."""
    estimator = Estimator(Settings(log_url="x"), MemoryLog(MemoryBroker()), Tracing())
    for model in past:
        measured = Run(ended_ms=1, seq=1, run_ms=1, busy_cores=1, host_memory_mib=1, gpu_memory_mib=1, gpus=1)
        ran = job_info(spec("ada", "ada.py", model=model))
        estimator.state.history.add(ran.key, measured, "ada")
        estimator.state.nearest.add(ran, measured)
    message = estimator._message("job-1", JobSubmitted(job_id="job-1", spec=job).spec, "cause", None)
    answer = from_wire(message.headers, message.value, Topic.ESTIMATES).data
    assert isinstance(answer, JobEstimated)
    assert answer.estimate.tier == tier


def test_a_cell_without_sound_runs_trains_nothing() -> None:
    """All of its history was rejected, or there is none: no model, no error."""
    assert RESOURCES.train([], None) is None


def test_thousands_of_runs_are_folded_in_bounded_memory() -> None:
    """A month of one owner, at random; what the fold keeps of it does not grow with their number."""
    rng, cell = random.Random(1), Fold()
    for number in range(3_000):
        cell.ran(
            spec("mallory", f"{number}.py", model=rng.choice(MODELS), batch_size=rng.randint(1, 512)),
            run_ms=rng.lognormvariate(10, 5),
            busy_cores=rng.uniform(0, 900),
            host_memory_mib=rng.lognormvariate(9, 9),
        )
    assert len(cell.known.history) == 2_500
    assert sum(len(cell.known.nearest._networks.get(model, "mallory") or ()) for model in MODELS) == 8
    assert len(cell.known.past_cores.of("mallory")) == 64
