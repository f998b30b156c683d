"""A runnable job never waits beside free resources (LAW 7): by hand, and in random cells with queues beyond
every window."""

from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.cluster.capacity import never_fits
from penstock.cluster.two_roles import arranged
from penstock.ledger.fold.evolve import begin, evolve
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided, TermStarted
from penstock.model.decisions.plans import BatchWindowOpened, PlanAdopted, PlanUnit
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeCordoned, NodeJoined
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import ResourceVector, TaskPlacement
from penstock.scheduling import profiles
from penstock.scheduling.liveness import Undelaying, stalled
from penstock_services.placer.core.common import continuation
from tests.faults.random_cells import beyond_windows
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.support.cluster.random_cell import RandomCell

BEYOND = 70
"""More jobs than any profile's backfill window of 64."""
STRICT = {"fifo-strict", "tiresias-fifo"}


@pytest.mark.parametrize("profile", profiles.names())
def test_nobody_waits_beside_free_resources(profile: str) -> None:
    """Whoever still waits after all ends, releases and timers was told that it can never run; and at no time
    before does a job wait that fits and delays nobody. Windows are small, and settings drawn."""
    turn = 3 if profile in ("srsf", "tiresias") else 2  # in its run the queue is long, and the run is short
    found = beyond_windows(turn * len(profiles.names()) + profiles.names().index(profile))
    assert found.what == "", found
    assert found.longest_queue > found.window


@pytest.mark.slow
@pytest.mark.parametrize("profile", profiles.names())
def test_nobody_waits_beside_free_resources_in_further_runs(profile: str) -> None:
    """The last one has the profile's own windows, and hundreds of jobs wait."""
    number, count = profiles.names().index(profile), len(profiles.names())
    for turn in range(5, 35):
        found = beyond_windows(turn * count + number)
        assert found.what == "", found
    found = beyond_windows(count + number, whole=True)
    assert found.what == "", found
    assert found.longest_queue > 200


def owned_by(owner: str, *, priority: int = 0, checkpoint: str = "none") -> JobSpec:
    return replace(job_spec(), owner=owner, priority=priority, checkpoint=checkpoint)


def test_a_job_that_got_its_nodes_starts_though_many_come_before_it() -> None:
    """Jobs of higher priority came while capacity was reclaimed for it: its nodes were reserved, and the pass
    never reached it."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 4, cores=8))
    cell.submit("cpu", owned_by("a", checkpoint="sdk"), estimate(0, cores=8))
    cell.start("cpu")
    cell.at(10_000)
    cell.submit("gpu", owned_by("a"), estimate(4, cores=4))
    assert list(cell.state.planned) == ["gpu"], "the job without GPUs gives its borrowed cores back"
    for number in range(BEYOND):
        cell.submit(f"small{number}", owned_by("a", priority=5), estimate(1, memory_mib=512 + number))
    cell.exit("cpu.1.w0", None, cause="stopped", signal=15)
    assert cell.job("gpu").status == "launching"
    assert not cell.state.planned


def test_a_small_job_uses_the_node_that_is_reserved_for_it_while_a_large_one_waits() -> None:
    """CODA keeps large nodes free for large jobs that wait: not those that it has reserved for the small one,
    which no large one may use either."""
    for seed in (1000, 1005):
        assert RandomCell(seed, PlacerSettings(profile="coda"), 400).run() == []


@pytest.mark.parametrize("profile", profiles.names())
def test_an_idle_cell_keeps_nothing_free_for_a_job_that_waits_for_a_cordoned_node(profile: str) -> None:
    """A node is out of use for a week. CODA keeps the other large one free for the large job meanwhile, and
    nothing runs whose end could be awaited."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("n1", 4), node_spec("n2", 2))
    cell.submit("before", None, estimate(4))
    cell.at(10_000)
    cell.start("before")
    cell.exit("before.1.w0")
    cell.feed(NodeCordoned(node_id="n2", by="ada", reason="a driver"))
    cell.submit("large", job_spec(workers=6), estimate(1))
    cell.submit("small", None, estimate(1))
    cell.at(60_000)
    assert cell.job("large").status == "queued"
    assert cell.job("small").status == "launching"
    assert stalled(cell.state) is None


@pytest.mark.parametrize("profile", sorted(set(profiles.names()) - STRICT))
def test_a_job_behind_the_window_starts_where_it_delays_nobody(profile: str) -> None:
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("a", 2, model="A"), node_spec("b", 2, model="B"))
    cell.submit("runs", job_spec(models=("A",)), estimate(2))
    cell.start("runs")
    for number in range(BEYOND):
        need = estimate(1 + number % 2, memory_mib=512 + number)
        cell.submit(f"waits{number}", job_spec(models=("A",)), need)
    cell.submit("free", job_spec(models=("B",)), estimate(1))
    while (due := cell.state.next_timer()) is not None and due[0] <= cell.now_ms + 30_000:
        cell.at(due[0] - 1_000_000)
    assert cell.job("free").status == "launching"
    assert stalled(cell.state) is None


@pytest.mark.parametrize("profile", sorted(STRICT))
def test_strict_order_keeps_it_waiting_and_is_no_stall(profile: str) -> None:
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("a", 2, model="A"), node_spec("b", 2, model="B"))
    cell.submit("runs", job_spec(models=("A",)), estimate(2))
    cell.start("runs")
    cell.submit("waits", job_spec(models=("A",)), estimate(2))
    cell.submit("free", job_spec(models=("B",)), estimate(1))
    assert cell.job("free").status == "queued"
    assert stalled(cell.state) is None


def test_a_stalled_cell_is_seen_and_its_cause_is_named() -> None:
    """Facts are folded and nobody decides: as a placer would leave a cell that passes a job over."""
    state = CellState()
    begin(state, 1, 1_000, 1)
    for fact in (
        TermStarted(term=1, placer_id="p1", settings=PlacerSettings(profile="penstock")),
        NodeJoined(node=node_spec("n1", 2)),
        JobSubmitted(job_id="waits", spec=job_spec()),
        JobEstimated(job_id="waits", estimate=estimate(1)),
    ):
        evolve(state, fact)
    found = stalled(state)
    assert found is not None
    assert (found.job_id, found.nodes) == ("waits", ("n1",))
    assert "passed it over" in found.cause
    evolve(state, PlanAdopted(units=(PlanUnit(job_id="other", nodes=("n1",)),)))
    found = stalled(state)
    assert found is not None
    assert found.cause == "its nodes are reserved for other, for which nothing is awaited"
    evolve(state, continuation(state))
    assert stalled(state) is None, "a pass is under way"


def waiting(profile: str, *jobs: str) -> CellState:
    """Jobs wait beside two free nodes, and only n1 is theirs; facts are folded and nobody decides."""
    state = CellState()
    begin(state, 1, 1_000, 1)
    evolve(state, TermStarted(term=1, placer_id="p1", settings=PlacerSettings(profile=profile)))
    evolve(state, NodeJoined(node=node_spec("n1", 2)))
    evolve(state, NodeJoined(node=node_spec("n2", 1, model="A100")))
    for number, job_id in enumerate(jobs):
        begin(state, 2 + number, 1_000, 2 + number)
        evolve(state, JobSubmitted(job_id=job_id, spec=job_spec(models=("V100",))))
        evolve(state, JobEstimated(job_id=job_id, estimate=estimate(1, memory_mib=512 + number)))
    return state


def test_a_window_whose_time_is_over_still_closes() -> None:
    """A task's report comes between the end of the window and its timer: the plan for the waiting jobs is
    about to be made."""
    state = waiting("best-fit", "waits")
    assert stalled(state) is not None
    evolve(state, BatchWindowOpened(until_ms=2_000))
    begin(state, 3, 3_000, 3)
    assert not state.in_window
    assert stalled(state) is None


def test_a_job_that_the_policy_refuses_waits_for_its_nodes() -> None:
    """Whoever takes these nodes would delay it: CODA keeps cores of the only node on which both fit."""
    state = waiting("fifo", "refused", "next", "runs")
    place = TaskPlacement(task_id="runs.1.w0", role="worker", rank=0, node_id="n2", gpus=(0,), cores=(0,))
    evolve(state, PlacementDecided(job_id="runs", attempt=1, tasks=(place,)))
    search = Undelaying()
    found = search.first(state)
    assert found is not None
    assert found[0].job_id == "refused"
    assert stalled(state) is not None
    assert search.first(state, takes=lambda job: job.job_id == "next") is None
    assert beyond_windows(2_001_303).what == ""  # a run of `coda` in which this was reported as a stall


def gang(worker_cores: int, server_cores: int) -> CellDriver:
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 1, cores=8), node_spec("n2", 4, cores=8))
    need = replace(
        estimate(1, cores=worker_cores),
        parameter_server=ResourceVector(cores=server_cores, host_memory_mib=64),
    )
    cell.submit("gang", job_spec(workers=2, ps=1), need)
    return cell


def test_a_gang_whose_servers_fit_beside_no_worker_is_told_at_once() -> None:
    """15 of 16 cores are asked for, but 6 + 6 leave two cores on each node, and the server needs three."""
    cell = gang(6, 3)
    assert cell.job("gang").unschedulable
    assert "in no arrangement together" in str(never_fits(cell.state, cell.job("gang").demand))


def test_a_gang_that_fits_in_one_arrangement_only_starts() -> None:
    """Two kinds of tasks: 4 + 4 cores on one node, 6 on the other."""
    assert gang(4, 6).job("gang").status == "launching"
    assert gang(5, 3).job("gang").status == "launching"


@pytest.mark.parametrize("profile", profiles.names())
def test_an_arrangement_that_first_fit_does_not_find_starts_an_idle_cells_gang(profile: str) -> None:
    """Its server belongs on the node with one GPU; on any other it takes cores that two workers need."""
    cell = CellDriver(PlacerSettings(profile=profile, backfill_window=1))
    cell.join(*(node_spec(f"n{number}", gpus, cores=8) for number, gpus in enumerate((8, 1, 8))))
    server = ResourceVector(cores=6, host_memory_mib=64)
    cell.submit("gang", job_spec(workers=4, ps=1), replace(estimate(1, cores=4), parameter_server=server))
    cell.at(60_000)
    assert cell.job("gang").status == "launching"


def waits_for_one_arrangement(*others: NodeSpec) -> CellDriver:
    """A gang that fits in one arrangement only, which the policy does not find, has waited for its two nodes
    for so long that they are reserved for it."""
    cell = CellDriver(PlacerSettings(profile="penstock"))
    nodes = node_spec("n1", 1, cores=8, model="n1"), node_spec("n2", 1, cores=16, model="n2"), *others
    cell.join(*nodes)
    for node in nodes:
        cores = node.cores - (node.node_id == "n2")
        need = replace(estimate(1, cores=cores), run_ms=200_000_000)
        cell.submit(f"on-{node.node_id}", job_spec(models=(node.node_id,)), need)
    cell.submit("ends", job_spec(), estimate(0, cores=1))
    for job_id in list(cell.state.jobs):
        cell.start(job_id)
    server = ResourceVector(cores=4, host_memory_mib=64)
    cell.submit("gang", job_spec(workers=3, ps=1), replace(estimate(0, cores=6), parameter_server=server))
    cell.at(190_000_000)
    cell.exit("ends.1.w0")
    assert list(cell.state.planned) == ["gang"]
    return cell


def test_a_gangs_own_reservation_does_not_keep_it_from_an_empty_cell() -> None:
    cell = waits_for_one_arrangement()
    cell.exit("on-n1.1.w0")
    cell.exit("on-n2.1.w0")
    assert cell.job("gang").status == "launching"
    assert not cell.state.planned


def test_a_gang_starts_on_the_nodes_reserved_for_it_while_others_run_elsewhere() -> None:
    """The cell is never empty: nothing else may use these nodes, and the policy finds no place on them."""
    cell = waits_for_one_arrangement(node_spec("n3", 1, cores=4, model="n3"))
    cell.exit("on-n1.1.w0")
    cell.exit("on-n2.1.w0")
    assert cell.job("on-n3").status == "running"
    assert cell.job("gang").status == "launching"


def test_arrangements_of_two_kinds_of_tasks_are_found_whenever_one_exists() -> None:
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(3_000):
        nodes = [
            tuple(sorted(rng.integers(0, 4, size=int(rng.integers(1, 5))).tolist(), reverse=True))
            for _ in range(int(rng.integers(1, 5)))
        ]
        workers, servers = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        exists = any(
            sum(here) == workers
            and sum(node[each] for node, each in zip(nodes, here, strict=True)) >= servers
            for here in product(*(range(len(node)) for node in nodes))
        )
        answer = arranged(nodes, workers, servers)
        assert (answer is not None) == exists, (nodes, workers, servers)
        if answer is not None:
            found += 1
            assert sum(answer) == workers
            assert sum(node[each] for node, each in zip(nodes, answer, strict=False)) >= servers
    assert 500 < found < 2_500


def test_a_gang_of_shares_that_counts_more_gpus_than_there_are_starts() -> None:
    """Preempting profiles count whole GPUs: four halves are four of two."""
    for profile in ("tiresias", "tiresias-fifo", "srsf"):
        cell = CellDriver(PlacerSettings(profile=profile))
        cell.join(node_spec("n1", 2))
        halves = replace(estimate(1), worker=replace(estimate(1).worker, gpu_share_milli=500))
        cell.submit("gang", job_spec(workers=4), halves)
        cell.at(1_000)
        assert cell.job("gang").status == "launching", profile
