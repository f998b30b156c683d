"""Stories of broken nodes: jobs of everybody fail there at once, so the node is free and gets the next
one."""

import random
from collections.abc import Collection

import pytest
from msgspec.structs import replace

from penstock.cli.operations.doctor import suspects
from penstock.cli.queries.tables import distrusted_for, node_state, nodes_remarks
from penstock.cluster.reasons import Reason
from penstock.ledger.fold.evidence import EARLY_MS
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.views import distrust, gpu_use
from penstock.model.decisions.distrust import NodeDistrusted, NodeTrusted
from penstock.model.inputs.external_events import JobCancelRequested, NodeUncordoned
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.why.explain import explain
from penstock_services.placer.core.members.evidence import FIRST_PAUSE_MS
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

BROKEN = "n1"


def spec_of(owner: str, *, script: str = "train.py", attempts: int = 1) -> JobSpec:
    return replace(job_spec(attempts=attempts), owner=owner, command=("python", script))


@pytest.fixture
def cell() -> CellDriver:
    """Three nodes of four GPUs; policies place on the first one, as they like to pack."""
    driver = CellDriver(PlacerSettings())
    driver.join(node_spec("n1"), node_spec("n2"), node_spec("n3"))
    return driver


def node_of(cell: CellDriver, job_id: str) -> str:
    [task] = cell.job(job_id).tasks.values()
    return task.place.node_id


def run(
    cell: CellDriver, job_id: str, spec: JobSpec, broken: Collection[str] = (BROKEN,), gpus: int = 1
) -> str:
    """One job, from its submission to its end; where it ran."""
    cell.submit(job_id, spec, estimate(gpus))
    cell.start(job_id)
    where, attempt = node_of(cell, job_id), cell.job(job_id).attempt
    cell.exit(f"{job_id}.{attempt}.w0", 1 if where in broken else 0)
    return where


def doubted(cell: CellDriver, node_id: str = BROKEN) -> bool:
    return cell.state.nodes[node_id].distrusted


def broken_node(cell: CellDriver) -> list[str]:
    """Three people have lost a job each; where they ran."""
    return [run(cell, f"j{number}", spec_of(f"o{number}")) for number in range(3)]


def test_a_black_hole_eats_three_jobs_of_twelve_people(cell: CellDriver) -> None:
    """A node with a dead GPU fails each job within a second, so it is always free and takes the whole
    queue."""
    ran = [run(cell, f"j{number}", spec_of(f"o{number}")) for number in range(12)]
    assert ran[:3] == [BROKEN] * 3
    assert BROKEN not in ran[3:]
    found = distrust(cell.state.nodes[BROKEN])
    assert found is not None
    assert "3 jobs of 3 owners failed there" in found["reason"]
    row = {"node_id": BROKEN, "status": "ready", "tasks": 0, "distrust": found}
    assert "suspect" in node_state(row)
    assert nodes_remarks([row]) == [f"n1 is suspect: {distrusted_for(row)}"]
    [finding] = suspects([row, {"node_id": "n2", "status": "ready", "tasks": 0, "distrust": None}])
    assert (finding.found, "uncordon n1" in finding.remedy) == (f"n1: {distrusted_for(row)}", True)


def test_one_fact_announces_the_suspicion(cell: CellDriver) -> None:
    """Operators follow the events: one says that the node is suspect, and why."""
    for number in range(2):
        run(cell, f"j{number}", spec_of(f"o{number}"))
    cell.submit("j2", spec_of("o2"))
    cell.start("j2")
    step = cell.exit("j2.1.w0", 1)
    assert kinds(step) == ["task.exited", "node.distrusted", "timer.set", "job.ended"]


def test_one_persons_broken_sweep_makes_no_node_suspect(cell: CellDriver) -> None:
    """A hundred jobs of one sweep fail at the same line of the same script: the script is at fault."""
    for number in range(12):
        run(cell, f"j{number}", spec_of("ada"), broken=("n1", "n2", "n3"))
    assert not doubted(cell)


def test_a_job_that_fails_everywhere_takes_its_evidence_back(cell: CellDriver) -> None:
    """Three people with a bug each meet on one node; the first one tries again, and fails elsewhere, too."""
    broken_node(cell)
    assert doubted(cell)
    cell.submit("again", spec_of("o0"))
    cell.start("again")
    assert node_of(cell, "again") != BROKEN
    step = cell.exit("again.1.w0", 1)
    assert "node.trusted" in kinds(step)
    assert not doubted(cell)


def test_a_success_in_between_clears_a_node(cell: CellDriver) -> None:
    """Jobs fail on busy nodes every day; beside jobs that succeed there, that says nothing about the node."""
    for number in range(2):
        run(cell, f"j{number}", spec_of(f"o{number}"))
    run(cell, "good", spec_of("x"), broken=())
    run(cell, "j2", spec_of("o2"))
    assert not doubted(cell)


def test_failures_far_apart_are_no_evidence(cell: CellDriver) -> None:
    """Over a day, three scripts with a bug end on any node."""
    for number in range(6):
        run(cell, f"j{number}", spec_of(f"o{number}"))
        cell.at((number + 1) * 400_000)
    assert not doubted(cell)


def test_a_probe_that_succeeds_clears_the_node(cell: CellDriver) -> None:
    """The file system is mounted again: after its pause the node takes one job, and then all of them."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    assert not doubted(cell)
    cell.submit("probe", spec_of("p0"))
    cell.start("probe")
    assert node_of(cell, "probe") == BROKEN
    cell.submit("second", spec_of("p1"))
    assert node_of(cell, "second") != BROKEN, "one probe at a time"
    assert "node.trusted" in kinds(cell.exit("probe.1.w0", 0))
    cell.submit("third", spec_of("p2"))
    assert node_of(cell, "third") == BROKEN


def test_a_probe_that_fails_doubles_the_pause(cell: CellDriver) -> None:
    """Nobody has mended the node: it costs one job per pause, and pauses grow."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    run(cell, "probe", spec_of("p0"))
    assert doubted(cell)
    cell.at(2 * FIRST_PAUSE_MS)
    assert doubted(cell)
    cell.at(3 * FIRST_PAUSE_MS)
    assert not doubted(cell)


def test_a_probe_that_trains_for_days_clears_the_node_after_minutes(cell: CellDriver) -> None:
    """The probe is a long training: its node does not stay closed for all of it."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    cell.submit("probe", spec_of("p0"))
    cell.start("probe")
    steps = cell.at(FIRST_PAUSE_MS + EARLY_MS)
    assert "node.trusted" in [kind for step in steps for kind in kinds(step)]


def test_a_probe_that_is_cancelled_says_nothing(cell: CellDriver) -> None:
    """The probe's owner changes their mind: the next job is the probe."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    cell.submit("probe", spec_of("p0"))
    cell.start("probe")
    cell.feed(JobCancelRequested(job_id="probe", reason="wrong data"))
    cell.exit("probe.1.w0", None, cause="stopped", signal=15)
    assert run(cell, "next", spec_of("p1"), broken=()) == BROKEN
    found = cell.state.nodes[BROKEN].distrust
    assert found is None or found.gpu_mask


def test_an_operator_uses_the_node_again(cell: CellDriver) -> None:
    """The disk is cleaned; `penstock node uncordon` ends the suspicion at once."""
    broken_node(cell)
    assert cell.feed(NodeUncordoned(node_id=BROKEN, by="ops", reason="cleaned")).outcome == "committed"
    assert run(cell, "next", spec_of("p1")) == BROKEN
    assert not doubted(cell), "what was before does not count"
    assert cell.feed(NodeUncordoned(node_id=BROKEN, by="ops", reason="again")).reason == "not_cordoned"


def test_a_waiting_job_is_told_of_the_suspect_node(cell: CellDriver) -> None:
    """The other nodes are full: the job waits beside an idle node, and `why` says for what and how long."""
    broken_node(cell)
    for number in range(2):
        cell.submit(f"full{number}", spec_of("x"), estimate(4))
    cell.submit("waits", spec_of("y"), estimate(4))
    found = explain(cell.state, "waits")
    assert found.histogram[Reason.NODES_DISTRUSTED] == 1
    assert "suspect is n1: 3 jobs of 3 owners failed there" in found.detail
    cell.at(FIRST_PAUSE_MS)
    assert node_of(cell, "waits") == BROKEN, "the pause is over, and it is the probe"


def test_the_last_node_is_never_suspect() -> None:
    """On a laptop, or where a shared file system is full, jobs fail everywhere: no node is worse than
    another."""
    cell = CellDriver(PlacerSettings())
    cell.join(node_spec("n1"))
    broken_node(cell)
    assert not doubted(cell)


def test_only_a_broken_gpu_is_left_out(cell: CellDriver) -> None:
    """One GPU of a node is dead, and jobs on its other GPUs succeed: the GPU is suspect, the node is not."""
    cell.submit("other", spec_of("x"))
    cell.start("other")
    for number in range(3):
        cell.submit(f"j{number}", spec_of(f"o{number}"))
        cell.start(f"j{number}")
        [task] = cell.job(f"j{number}").tasks.values()
        assert (task.place.node_id, task.place.gpus) == ("n1", (1,))
        if number == 2:
            cell.exit("other.1.w0", 0)
        facts = cell.exit(f"j{number}.1.w0", 1).facts
    [found] = [fact for fact in facts if isinstance(fact, NodeDistrusted)]
    assert found.gpus == (1,)
    assert not doubted(cell)
    assert [gpu_use(cell.state, cell.state.nodes["n1"], gpu)["suspect"] for gpu in range(3)] == [
        False,
        True,
        False,
    ]
    places = []
    for number in range(3):
        cell.submit(f"k{number}", spec_of("x"))
        [task] = cell.job(f"k{number}").tasks.values()
        places.append((task.place.node_id, task.place.gpus))
    assert places == [("n1", (0,)), ("n1", (2,)), ("n1", (3,))]


def test_a_probe_avoids_the_gpus_that_failed(cell: CellDriver) -> None:
    """Jobs of one GPU always get the lowest one: if that one is dead, the probe must not die of it again."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    cell.submit("probe", spec_of("p0"))
    cell.start("probe")
    [task] = cell.job("probe").tasks.values()
    assert (task.place.node_id, task.place.gpus) == (BROKEN, (1,))
    facts = cell.exit("probe.1.w0", 0).facts
    assert [fact.node_id for fact in facts if isinstance(fact, NodeTrusted)] == [BROKEN]
    assert [fact.gpus for fact in facts if isinstance(fact, NodeDistrusted)] == [(0,)]


def test_a_job_without_gpus_proves_nothing_about_them(cell: CellDriver) -> None:
    """A preprocessing succeeds beside dead GPUs."""
    broken_node(cell)
    cell.at(FIRST_PAUSE_MS)
    assert run(cell, "cpu", spec_of("p0"), broken=(), gpus=0) == BROKEN
    assert cell.state.nodes[BROKEN].distrust is not None


def test_a_snapshot_keeps_the_suspicion(cell: CellDriver) -> None:
    """A placer that restarts from its snapshot goes on with the same evidence."""
    broken_node(cell)
    found = load(dump(cell.state))
    assert found.nodes[BROKEN].distrusted
    assert found.index == cell.state.index or found.index.distrusted == cell.state.index.distrusted
    assert found.failures == cell.state.failures


@pytest.mark.parametrize("seed", range(6))
def test_nobody_waits_for_ever_beside_broken_nodes(seed: int) -> None:
    """A bad week: nodes break and are mended, jobs of ten people fail here or everywhere; in the end each
    job has ended."""
    chance, cell = random.Random(seed), CellDriver(PlacerSettings())
    cell.join(*(node_spec(f"n{number}", 2) for number in range(3)))
    broken: set[str] = set()
    began, past_ms = cell.now_ms, 0
    for number in range(60):
        broken = {f"n{one}" for one in range(3) if chance.random() < 0.3} if number % 10 == 0 else broken
        spec = spec_of(f"o{chance.randrange(10)}", script=f"s{chance.randrange(3)}.py", attempts=2)
        cell.submit(f"j{number}", spec, estimate(chance.choice((0, 1, 1, 2)), memory_mib=64))
        for job in list(cell.state.jobs.values()):
            if chance.random() < 0.7 and job.status in (JobStatus.LAUNCHING, JobStatus.RUNNING):
                [(task_id, task)] = job.tasks.items()
                if task.started_ms is None:
                    cell.start(job.job_id)
                fails = task.place.node_id in broken or job.spec.command[-1] == "s0.py"
                cell.exit(task_id, 1 if fails else 0)
        past_ms += chance.choice((1_000, 20_000, 90_000))
        cell.at(past_ms)
    while cell.state.jobs:
        for job in list(cell.state.jobs.values()):
            for task_id in list(job.tasks):
                cell.start(job.job_id)
                cell.exit(task_id, 0)
        past_ms += 60_000
        cell.at(past_ms)
        assert cell.now_ms - began < 20 * 3_600_000, "a pause is an hour at most"
