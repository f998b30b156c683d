"""The contention-guard in the simulator: its own core, on measured speeds by cores and a modelled memory
bandwidth."""

import json
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from penstock.model.nouns.nodes import BandwidthCap, Isolation
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.cores import Cpu
from penstock.simulator.job_models.model import Constant, JobModel
from penstock.simulator.job_models.sharing import Bandwidth
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.report.measured import _restarts
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import ends

SPEEDS = {1: 0.3, 2: 0.55, 4: 0.9, 6: 1.0, 16: 1.0}
TABLE = {("res18", 1): [(float(cores), [(250.0, speed)]) for cores, speed in SPEEDS.items()]}
ISOLATED = Isolation(exits="cgroup", files=True, cores="cpuset", bandwidth="resctrl")


def cell(
    jobs: Sequence[TraceJob],
    job_model: JobModel,
    contention: Contention | None,
    *,
    caps: BandwidthCap = "resctrl",
) -> tuple[Simulation, list[bytes]]:
    """One node of 16 cores and four GPUs."""
    values: list[bytes] = []
    nodes = [replace(node, isolation=replace(ISOLATED, bandwidth=caps)) for node in nodes_of("1x4x16")]
    work = SteadyWork(job_model, watched=contention is not None)
    settings = PlacerSettings(profile="fifo", contention=contention)
    return Simulation(nodes, settings, work, jobs, Options(check_every_step=True), values.append), values


def decided(values: Sequence[bytes], kind: str) -> list[Mapping[str, object]]:
    facts = [fact for value in values for fact in json.loads(value)["facts"]]
    return [fact["data"] for fact in facts if fact["type"] == f"penstock.{kind}.decided.v1"]


def test_a_training_finds_the_cores_that_it_needs() -> None:
    """It asked for one core, and six feed its GPU. Within four probes it has nearly its best speed, and ends
    as much sooner."""
    job = TraceJob("a", 0, 1_000, 1, model="res18", cores=1)
    alone, _ = cell([job], Cpu(TABLE), None)
    assert ends(alone)["a"] == pytest.approx(1_000)
    guarded, values = cell([job], Cpu(TABLE), Contention(users_cores="at_least"))
    assert ends(guarded)["a"] < 1_000 * 0.3 / 0.95 + 60
    changes = decided(values, "cores")
    assert [one["cause"] for one in changes][:-1] == ["probe"] * (len(changes) - 1)
    assert len(changes) <= 5
    assert changes[-1]["cause"] == "settled"
    timeline = Timeline()
    for value in values:
        timeline.take(value)
    assert (timeline.core_changes, timeline.slowed) == (len(changes), 0)
    assert f"cores of running tasks changed {len(changes)} times" in _restarts(timeline)


@pytest.mark.parametrize("caps", ["resctrl", "cpu_quota", "none"])
def test_who_takes_the_bandwidth_of_a_training_is_slowed_until_it_ends(caps: BandwidthCap) -> None:
    """A preprocessing job comes to the node of a language model, takes 70 % of the bandwidth, and the
    training would lose 40 % of its speed."""
    training = TraceJob("a", 0, 200, 1, model="bert", cores=2, memory_bandwidth=0.25)
    hog = TraceJob("b", 50, 400, 0, cores=8, memory_bandwidth=0.7)
    jobs = [training, hog]
    left_alone, _ = cell(jobs, Bandwidth(Constant()), None, caps=caps)
    slow = ends(left_alone)["a"]
    found, values = cell(jobs, Bandwidth(Constant()), Contention(search="none"), caps=caps)
    end = ends(found)["a"]
    assert slow > 280
    assert end < 200 + 0.25 * (slow - 200)
    changes = decided(values, "bandwidth" if caps == "resctrl" else "cores")
    assert {one["job_id"] for one in changes} == {"b"}
    assert changes[0]["cause"] == "contention"
    assert changes[-1]["cause"] == "released"
    timeline = Timeline()
    for value in values:
        timeline.take(value)
    assert timeline.slowed == sum(one["cause"] == "contention" for one in changes)


def test_a_job_with_one_core_is_slowed_where_the_time_of_cores_can_be_capped() -> None:
    """It takes 70 % of the bandwidth from one core, of which no cores can be taken. At a tenth of that core's
    time it takes 7 %, and advances at a tenth of its speed."""
    training = TraceJob("a", 0, 200, 1, model="bert", cores=2, memory_bandwidth=0.25)
    jobs = [training, TraceJob("b", 50, 400, 0, cores=1, memory_bandwidth=0.7)]
    truth = Bandwidth(Cpu({("bert", 1): [(2.0, [(250.0, 1.0)])]}))
    alone, _ = cell(jobs, truth, None)
    slow = ends(alone)
    left, _ = cell(jobs, truth, Contention(search="none"), caps="none")
    assert ends(left) == slow
    found, values = cell(jobs, truth, Contention(search="none"), caps="cpu_quota")
    assert ends(found)["a"] < 200 + 0.25 * (slow["a"] - 200)
    capped_s = ends(found)["a"] - 50
    assert ends(found)["b"] > slow["b"] + 0.4 * capped_s
    caps = [one["memory_bandwidth_percent"] for one in decided(values, "bandwidth")]
    assert caps[0] == 50
    assert caps[-1] is None
    assert decided(values, "cores") == []


def test_several_jobs_are_slowed_together() -> None:
    """Three preprocessing jobs share the traffic of that one: all have a cap of 50 % at the same moment, and
    each is released with the others."""
    jobs = [TraceJob("a", 0, 200, 1, model="bert", cores=2, memory_bandwidth=0.25)]
    jobs += [TraceJob(f"b{n}", 50, 400, 0, cores=4, memory_bandwidth=0.25) for n in range(3)]
    found, values = cell(jobs, Bandwidth(Constant()), Contention(search="none"))
    ends(found)
    changes = [
        (one["job_id"], one["memory_bandwidth_percent"], one["cause"]) for one in decided(values, "bandwidth")
    ]
    steps = [changes[at : at + 3] for at in range(0, len(changes), 3)]
    assert steps[0][0][1:] == (50, "contention")
    assert steps[-1][0][1:] == (None, "released")
    for step in steps:
        assert step == [(f"b{n}", *step[0][1:]) for n in range(3)]


def test_without_the_eliminator_a_training_stays_slow() -> None:
    """The ablation of CODA §VI-E: the guard goes on to search for cores, and slows no job; the training is as
    slow as without a guard."""
    training = TraceJob("a", 0, 200, 1, model="bert", cores=2, memory_bandwidth=0.25)
    jobs = [training, TraceJob("b", 50, 400, 0, cores=8, memory_bandwidth=0.7)]
    unguarded, _ = cell(jobs, Bandwidth(Constant()), None)
    found, values = cell(jobs, Bandwidth(Constant()), Contention(users_cores="override", eliminate=False))
    assert ends(found) == pytest.approx(ends(unguarded))
    assert decided(values, "bandwidth") == []
    assert {one["job_id"] for one in decided(values, "cores")} == {"a"}


def test_without_a_guard_nothing_listens() -> None:
    """Telemetry costs nothing where no service needs it."""
    found, _ = cell([TraceJob("a", 0, 10, 1)], Constant(), None)
    ends(found)
    assert not found._work.paces()
