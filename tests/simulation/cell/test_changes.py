"""Running jobs whose cores or memory bandwidth change: what was decided is set on their nodes, and their
speed changes from then on."""

import json
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.nouns.nodes import Isolation
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.cores import Cpu, amdahl
from penstock.simulator.job_models.model import Allocation, Constant, End, JobModel
from penstock.simulator.job_models.sharing import Bandwidth, Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import ends

TABLE = {("res18", 1): [(1.0, [(250.0, 0.5)]), (2.0, [(250.0, 0.8)]), (4.0, [(250.0, 1.0)])]}
ISOLATED = Isolation(exits="cgroup", files=True, cores="cpuset", bandwidth="resctrl")


def cell(jobs: Sequence[TraceJob], job_model: JobModel) -> tuple[Simulation, list[bytes]]:
    """One node of 16 cores and four GPUs whose processor can cap memory bandwidth."""
    values: list[bytes] = []
    nodes = [replace(node, isolation=ISOLATED) for node in nodes_of("1x4x16")]
    work = SteadyWork(job_model)
    options = Options(check_every_step=True)
    return Simulation(nodes, PlacerSettings(profile="fifo"), work, jobs, options, values.append), values


def cpu_job(job_id: str, submit_s: float, duration_s: float, cores: float, traffic: float = 0.0) -> TraceJob:
    return TraceJob(job_id, submit_s, duration_s, 0, cores=cores, memory_bandwidth=traffic or None)


def task_of(found: Simulation, job_id: str) -> str:
    (task_id,) = found.cell.state.jobs[job_id].tasks
    return task_id


def propose_cores(found: Simulation, job_id: str, cores: int) -> None:
    number = found.cell.head.seq
    found._deliver(
        CoresProposed(
            proposal_id=f"p{number}",
            proposer="gateway",
            task_id=task_of(found, job_id),
            cores=cores,
            reason="test",
            by="ada",
        )
    )
    found._settle()


def adjusted(values: Sequence[bytes]) -> list[Mapping[str, object]]:
    facts = [fact for value in values for fact in json.loads(value)["facts"]]
    return [fact["data"] for fact in facts if fact["type"].startswith(TaskAdjusted.TYPE)]


def test_a_job_without_gpus_slows_down_with_fewer_cores() -> None:
    """Half way through, a preprocessing job has to give three quarters of its cores away, and gets them back
    later.

    Amdahl with p = 0.95: on two cores instead of eight it runs at (0.05 + 0.95 / 8) / (0.05 + 0.95 / 2) of
    its speed.
    """
    found, values = cell(
        [cpu_job("a", 0, 100, 8), cpu_job("late", 50, 1, 1), cpu_job("later", 80, 1, 1)], Cpu(TABLE)
    )
    found.step()
    found.step()
    assert found.now_s == 50
    propose_cores(found, "a", 2)
    found.step()
    while found.now_s < 80:
        found.step()
    propose_cores(found, "a", 8)
    slow = (0.05 + 0.95 / 8) / (0.05 + 0.95 / 2)
    assert ends(found)["a"] == pytest.approx(80 + 50 - 30 * slow)
    assert [(one["what"], one["enforced"]) for one in adjusted(values)] == [("cores", "cpuset")] * 2


def test_a_training_slows_down_as_it_was_measured() -> None:
    """ResNet-18 gets one core instead of four: by Synergy's table half the throughput, from that moment
    on."""
    job = TraceJob("a", 0, 100, 1, model="res18", cores=4)
    found, _ = cell([job, cpu_job("late", 40, 1, 1)], Cpu(TABLE))
    found.step()
    found.step()
    propose_cores(found, "a", 1)
    assert ends(found)["a"] == pytest.approx(40 + 60 / 0.5)


def test_a_cap_relieves_the_neighbour_and_slows_its_bearer() -> None:
    """A job without GPUs takes the whole memory bandwidth: a training on the node suffers until the other is
    capped to 15 %.

    With the cap the training demands 60 %, both together 75 %, at which nobody suffers; the capped job goes
    at 0.15 / 0.4 of its speed.
    """
    training = TraceJob("a", 0, 100, 1, model="bert", cores=2, memory_bandwidth=0.6)
    jobs = [training, cpu_job("b", 0, 60, 4, traffic=0.4), cpu_job("late", 20, 1, 1)]
    found, values = cell(jobs, Bandwidth(Constant()))
    found.step()
    found.step()
    assert found.now_s == 20
    found._deliver(
        ThrottleProposed(
            proposal_id="p1",
            proposer="guard",
            task_id=task_of(found, "b"),
            memory_bandwidth_percent=15,
            reason="test",
        )
    )
    found._settle()
    after = ends(found)
    assert after["a"] == pytest.approx(20 + 90)  # 10 of its first 20 s were done: β is 0.5, the overload 1
    assert after["b"] == pytest.approx(20 + 40 / (0.15 / 0.4))
    assert [one["enforced"] for one in adjusted(values)] == ["resctrl"]


def test_a_job_without_gpus_takes_less_bandwidth_on_fewer_cores() -> None:
    """Where a node cannot cap, CODA halves the cores: half the traffic, and the training beside it
    recovers."""
    model = Bandwidth(Constant())
    training = TraceJob("a", 0, 100, 1, model="bert", memory_bandwidth=0.6)
    busy = cpu_job("b", 0, 60, 8, traffic=0.3)
    work = SteadyWork(model)
    for one in (training, busy):
        work.admit(one, 0)
    work.started("a", {"n": Allocation((0,), 2)}, 0)
    work.started("b", {"n": Allocation((), 8)}, 0)
    assert work.next_s() == 60
    work.changed("b", {"n": Allocation((), 4)}, 10)
    work.advance(60)
    overload = (0.9 - 0.75) / 0.25
    first_s = 10 * (1 - 0.5 * overload)
    assert work.next_s() == pytest.approx(10 + 100 - first_s)


def test_a_change_while_a_job_launches_counts_when_it_trains() -> None:
    """Its cores are cut while it imports its libraries: it trains with what it has then."""
    work = SteadyWork(Phases(Cpu(TABLE), 10, 0))
    work.admit(cpu_job("a", 0, 100, 4), 0)
    work.started("a", {"n": Allocation((), 4)}, 0)
    work.changed("a", {"n": Allocation((), 2)}, 5)
    assert work.next_s() == 10
    work.advance(10)
    assert work.next_s() == pytest.approx(10 + 100 / amdahl(2, 4, 0.95))


def test_a_change_of_a_job_that_does_not_run_changes_nothing() -> None:
    """The news comes after its stop, or after its end."""
    work = SteadyWork(Constant())
    work.admit(TraceJob("a", 0, 100, 1), 0)
    work.changed("a", {"n": Allocation((0,), 2)}, 5)
    work.changed("b", {"n": Allocation((0,), 2)}, 5)
    assert work.next_s() is None
    work.started("a", {"n": Allocation((0,), 2)}, 10)
    assert work.advance(110).ended == [End("a", 110)]


def test_more_cores_than_asked_for_gain_nothing() -> None:
    """It has as many threads as it asked for."""
    assert amdahl(16, 8, 0.95) == 1.0
    assert amdahl(1, 8, 1.0) == pytest.approx(1 / 8)
    assert amdahl(1, 8, 0.0) == 1.0
