"""Services of a simulated cell: what they hear and when, what their proposals do, and that bad ones cost
nobody anything."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.model.decisions.ledger_events import ProposalAnswered, TermStarted
from penstock.model.decisions.orders import StopTask
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated
from penstock.model.inputs.external_events import TaskStarted, TelemetrySampled
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.proposals import (
    CoresProposed,
    MigrationProposed,
    PlanProposed,
    Proposal,
    ProposedJob,
    ProposedUnit,
    ReadVersion,
    ThrottleProposed,
)
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.cores import Cpu, amdahl
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.services.port import Attached, Input, Services
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import BUSY, CLUSTER, Listener, ends, job, simulation
from tests.support.cli.command_line import penstock


def facts(value: Input) -> list[tuple[str, Mapping[str, Any]]]:
    """Type and content of each fact of a record."""
    if isinstance(value, TelemetrySampled):
        return []
    return [(fact["type"], fact["data"]) for fact in json.loads(value)["facts"]]


class Proposer:
    """A service of one function: fact in, proposals out."""

    writes = Topic.PROPOSALS

    def __init__(self, propose: Callable[[str, Mapping[str, Any]], Sequence[Any]]) -> None:
        self._propose = propose

    def answer(self, inputs: Sequence[Input]) -> Sequence[Event]:
        return [
            event for value in inputs for kind, data in facts(value) for event in self._propose(kind, data)
        ]


def cores(task_id: str, count: int, number: str = "p") -> CoresProposed:
    return CoresProposed(
        proposal_id=f"{number}-{task_id}", proposer="guard", task_id=task_id, cores=count, reason="x"
    )


# ------------------------------------------------------------------------------------------- the port


def test_a_service_reads_what_came_while_it_planned_in_one_go() -> None:
    """It hears a second late and plans for ten: what is written meanwhile is one batch, read when it has
    published."""
    now_s = 0.0
    listener = Listener([cores("a.1.w0", 1)])
    services = Services([Attached(listener, delay_s=1, planning_s=10)], lambda: now_s)
    assert services.next_s() is None
    services.deliver(b"1")
    assert services.next_s() == 1
    assert services.due() == ()
    now_s = 1.0
    assert services.due() == ()  # it has read, and plans
    assert services.next_s() == 11
    now_s = 3.0
    services.deliver(b"2")
    assert services.due() == ()
    now_s = 5.0
    services.deliver(b"3")
    assert services.due() == ()
    now_s = 11.0
    assert services.due() == [cores("a.1.w0", 1)]
    assert services.due() == ()
    assert listener.batches == [[b"1"], [b"2", b"3"]]
    assert services.next_s() == 21


def test_who_has_nothing_to_say_is_not_busy() -> None:
    """Reading a record that concerns nobody takes no planning time."""
    now_s = 0.0
    listener = Listener()
    services = Services([Attached(listener, planning_s=10)], lambda: now_s)
    services.deliver(b"1")
    assert services.due() == ()
    services.deliver(b"2")
    assert services.due() == ()
    assert services.next_s() is None
    assert len(listener.batches) == 2


def test_planning_time_may_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A genetic algorithm's next version is slower: with its real time the simulated cell waits longer for
    its plan."""
    real_s = 7.0
    monkeypatch.setattr("penstock.simulator.services.port.perf_counter", lambda: real_s)

    class Slow(Listener):
        def answer(self, inputs: Sequence[Input]) -> Sequence[Any]:
            nonlocal real_s
            real_s += 0.25
            return super().answer(inputs)

    services = Services([Attached(Slow([cores("a.1.w0", 1)]), planning_s=None)], lambda: 5.0)
    services.deliver(b"1")
    assert services.due() == ()
    assert services.next_s() == 5.25


# ------------------------------------------------------------------------------------------ proposals


def test_a_proposal_moves_cores_after_its_planning_time() -> None:
    """A guard hears that a training starts beside a preprocessing job, thinks for 5 s, and halves that job's
    cores."""
    answers: list[str] = []

    def propose(kind: str, data: Mapping[str, Any]) -> Sequence[Event]:
        if kind == wire_type(ProposalAnswered):
            answers.append(data["verdict"])
        if kind == wire_type(TaskStarted) and data["task_id"].startswith("training"):
            return [cores("cpu.1.w0", 4)]
        return []

    jobs = [TraceJob("cpu", 0, 100, 0, cores=8), TraceJob("training", 20, 30, 1, model="m", cores=1)]
    found = Simulation(
        nodes_of("1x4x16"),
        PlacerSettings(profile="fifo"),
        SteadyWork(Cpu({("m", 1): [(1.0, [(250.0, 1.0)])]})),
        jobs,
        Options(check_every_step=True, services=(Attached(Proposer(propose), planning_s=5),)),
    )
    assert ends(found) == {"training": 50, "cpu": pytest.approx(25 + 75 / amdahl(4, 8, 0.95))}
    assert answers == ["accepted"]


NEED = ResourceVector(gpus=1, cores=1, host_memory_mib=1, gpu_utilisation_percent=1.0)
TIMELESS = Estimate(
    worker=NEED, parameter_server=ResourceVector(), run_ms=1, tier="default", confidence=0.1, source="made up"
)


def nonsense(kind: str, data: Mapping[str, Any]) -> Sequence[Any]:
    """For each task that starts: what no placer should obey, and things that are no proposals."""
    if kind != wire_type(TaskStarted):
        return []
    task_id, node_id = data["task_id"], data["node_id"]
    job_id = task_id.rsplit(".", 2)[0]
    job = ProposedJob(job_id=job_id, nodes=("nowhere",))
    unit = ProposedUnit(jobs=(job,), explanation="why not")
    group = ProposedUnit(jobs=(job, job), kind="group", explanation="why not")
    stale = (ReadVersion(kind="node", id=node_id, version=0), ReadVersion(kind="job", id="nobody", version=3))
    about: dict[str, Any] = {"proposer": "nuisance", "reason": "why not"}
    proposals: list[Proposal] = [
        CoresProposed(proposal_id=f"c-{task_id}", task_id="nobody.1.w0", cores=1, **about),
        CoresProposed(proposal_id=f"d-{task_id}", task_id=task_id, cores=1_000, **about),
        ThrottleProposed(proposal_id=f"t-{task_id}", task_id=task_id, memory_bandwidth_percent=5, **about),
        MigrationProposed(proposal_id=f"m-{task_id}", job_id=job_id, nodes=("nowhere",), **about),
        PlanProposed(proposal_id=f"p-{task_id}", proposer="nuisance", units=(unit,), read=stale),
        PlanProposed(proposal_id=f"g-{task_id}", proposer="nuisance", units=(group, unit)),
    ]
    dropped = [
        None,
        "stop everything",
        TermStarted(term=9, placer_id="nuisance", settings=PlacerSettings()),
        StopTask(token=9, node_id=node_id, task_id=task_id, grace_ms=0, reason="because"),
        JobEstimated(job_id="j39", estimate=TIMELESS),
        CoresProposed(proposal_id="z", task_id=task_id, cores=-1, **about),
        ThrottleProposed(proposal_id="", task_id=task_id, memory_bandwidth_percent=900, **about),
    ]
    return [*proposals, *proposals, *dropped]


@pytest.mark.parametrize("profile", ["fifo", "liquid", "srtf", "tiresias"])
@pytest.mark.parametrize("planning_s", [0.0, 7.0, 100.0])
def test_who_proposes_late_twice_or_nonsense_costs_nobody_anything(profile: str, planning_s: float) -> None:
    """A new proposer goes wild: answers about jobs that have ended, each twice, and things that are no
    proposals. All jobs end when they would."""
    values: list[bytes] = []
    nuisance = Attached(Proposer(nonsense), planning_s=planning_s)
    alone = ends(simulation(BUSY, profile, CLUSTER))
    beside = simulation(BUSY, profile, CLUSTER, Options(services=(nuisance,)), values.append)
    assert ends(beside) == alone
    answers = [data for value in values for kind, data in facts(value) if kind == wire_type(ProposalAnswered)]
    assert len(answers) > 100
    assert {data["verdict"] for data in answers} == {"refused"}
    services = beside._services
    assert services is not None
    assert sum(one.dropped for one in services._running) >= 7


def test_a_service_that_only_listens_changes_no_byte() -> None:
    """Whoever watches a cell, as a dashboard does, is not noticed. It hears every record, in the ledger's
    order."""
    listener = Listener()
    values: list[bytes] = []
    watched = simulation(BUSY, "srtf", CLUSTER, Options(services=(Attached(listener),)), values.append)
    ends(watched)
    alone = simulation(BUSY, "srtf", CLUSTER)
    ends(alone)
    assert watched.cell.head == alone.cell.head
    assert [value for batch in listener.batches for value in batch] == values


# ------------------------------------------------------------------------------------------ estimator


def learned(
    jobs: Sequence[TraceJob], profile: str, cluster: str = "1x1", **options: Any
) -> tuple[Simulation, list[bytes]]:
    values: list[bytes] = []
    found = simulation(jobs, profile, cluster, Options(durations="learned", **options), values.append)
    return found, values


def test_a_job_waits_for_its_estimate() -> None:
    """The estimator takes 3 s: nobody places a job before, and the second one, which comes meanwhile, waits
    for the first one's answer, too."""
    found, _ = learned([job("a", 0, 100), job("b", 1, 50)], "fifo", "1x4", estimator_s=3.0)
    assert ends(found) == {"a": 103, "b": 3 + 3 + 50}


def steps(job_id: str, submit_s: float, duration_s: float, iterations: int) -> TraceJob:
    return TraceJob(
        job_id, submit_s, duration_s, 1, model=f"net-{job_id[0]}", owner="ada", iterations=iterations
    )


def test_remaining_times_are_learned_from_the_steps_of_this_very_run() -> None:
    """The first training of its kind: nothing is known at its start; its reports say it, and each answer
    holds what the trace says is left."""
    found, values = learned([steps("a", 0, 1_000, 500)], "srtf")
    ends(found)
    told = [data for value in values for kind, data in facts(value) if kind == wire_type(EtaEstimated)]
    assert told
    for one in told:
        left_ms = 1_000_000 - one["at_ms"]
        assert one["left_ms"]["middle"] == pytest.approx(left_ms, rel=0.05)
    first = [
        data["estimate"] for value in values for kind, data in facts(value) if kind == wire_type(JobEstimated)
    ]
    assert first[0].get("run_ms") is None


def test_a_longer_run_of_a_known_kind_is_foreseen_by_its_steps() -> None:
    """Last week 100 iterations took 200 s; now somebody asks for 400 of the same: 800 s, before it has
    begun."""
    found, values = learned([steps("a-1", 0, 200, 100), steps("a-2", 300, 800, 400)], "srtf")
    ends(found)
    second = [
        data["estimate"]["run_ms"]
        for value in values
        for kind, data in facts(value)
        if kind == wire_type(JobEstimated) and data["job_id"] == "a-2"
    ]
    assert second == [pytest.approx(800_000, rel=0.01)]


def test_what_running_jobs_report_decides_who_is_stopped() -> None:
    """Two trainings of kinds that never ran hold the two GPUs: one is nearly done, one has just begun. A
    short job of a known kind comes.

    Only by their reported steps does `srtf` know that it is the other one that has to give way.
    """
    jobs = [
        TraceJob("k-1", 0, 60, 1, model="net-k", owner="ada"),
        steps("a", 100, 1_000, 1_000),
        steps("b", 1_000, 5_000, 5_000),
        TraceJob("k-2", 1_080, 60, 1, model="net-k", owner="ada"),
    ]
    found, _ = learned(jobs, "srtf", "1x2")
    after = ends(found)
    assert after["a"] == 1_100
    assert after["k-2"] == 1_140
    assert after["b"] == pytest.approx(6_000 + 20)  # it gave way until a had ended


def test_the_command_line_gives_the_estimator_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--estimator-time 3s`: a job that comes alone starts 3 s later, and the output says why."""
    (tmp_path / "t.csv").write_text("job_id,submit_s,duration_s,gpus\na,0,100,1\n")
    command = ("simulate", str(tmp_path / "t.csv"), "--profile", "srtf", "-o", "json")
    assert penstock(*command, "--estimator-time", "3s") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan_s"] == 103
    assert "the estimator answers after 3 s" in found["assumptions"]["latency"]
    assert penstock(*command, "--estimator-time", "measured") == 0
    assert "as fast as it did here" in json.loads(capsys.readouterr().out)["assumptions"]["latency"]
    for bad in ("soon", "2d"):
        assert penstock(*command, "--estimator-time", bad) == 2
        assert "--estimator-time: " in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["fifo", "srtf", "tiresias", "penstock"])
def test_a_job_moves_to_the_node_that_a_service_names(profile: str) -> None:
    """A migrator thinks for 10 s and empties a node. The job saves for 5 s and launches for 20; who comes
    meanwhile gets what it leaves."""
    answers: list[str] = []
    places: dict[str, str] = {}

    def propose(kind: str, data: Mapping[str, Any]) -> Sequence[Event]:
        if kind == wire_type(ProposalAnswered) and data["proposer"] == "migrator":
            answers.append(data["verdict"])
        if kind != wire_type(TaskStarted):
            return []
        places[data["task_id"]] = data["node_id"]
        if data["task_id"] != "first.1.w0":
            return []
        [there] = {"n00000", "n00001"} - {data["node_id"]}
        about: dict[str, Any] = {"proposal_id": "m", "proposer": "migrator", "reason": "to empty it"}
        return [MigrationProposed(**about, job_id="first", nodes=(there,))]

    cost = RestartCost(save_s=5, launch_s=20, interval_s=30)
    found = Simulation(
        nodes_of("2x4"),
        PlacerSettings(profile=profile),
        RestartingWork(Constant(), lambda job: cost),
        [job("first", 0, 100, 4), job("next", 12, 20, 4)],
        Options(check_every_step=True, services=(Attached(Proposer(propose), planning_s=10),)),
    )
    assert ends(found) == {"first": 15 + 20 + 90, "next": 15 + 20}
    assert answers == ["accepted"]
    assert places["first.1.w0"] == places["next.1.w0"] != places["first.2.w0"]
