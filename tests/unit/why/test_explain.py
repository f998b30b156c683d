"""`why`: each reason is reached by a situation of a real cluster, and *never* is answered only when it is
certain."""

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.cluster.capacity import never_fits
from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import ADVICE, Reason
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.place.liquid import Liquid
from penstock.why.explain import Explanation, UnknownJob, explain
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def why(state: CellState, job_id: str = "job-1") -> tuple[Reason | None, str | None]:
    answer = explain(state, job_id)
    if answer.reason is not None:
        assert answer.text == ADVICE[answer.reason].text
        assert answer.next_step
    return answer.reason, answer.now_or_never


def busy(state: CellState, job_id: str, node_id: str, **need: int) -> None:
    b.placed_on(state, b.queued(state, job_id, worker=b.need(**need)), node_id)


def test_every_reason_has_a_text_and_a_next_step():
    assert set(ADVICE) == set(Reason)
    assert all(advice.text and advice.next_step for advice in ADVICE.values())


def test_awaiting_estimate():
    """The estimator has not answered yet; nobody can know whether the job will fit."""
    state = b.cell()
    b.submitted(state)
    assert why(state) == (Reason.AWAITING_ESTIMATE, None)


def test_backoff():
    """A worker died; the job pauses for two seconds before its second attempt."""
    state = b.cell()
    job = b.queued(state, max_attempts=2)
    b.placed(state, job)
    task_id = next(iter(job.tasks))
    due = state.now_ms + b.STEP_MS + 2_000
    b.apply(
        state,
        external_events.TaskExited(
            node_id="n0",
            task_id=task_id,
            token=job.token,
            cause="exited",
            exit_code=1,
            started_ms=0,
            exited_ms=0,
        ),
        ledger_events.JobRequeued(job_id=job.job_id, attempt=1, reason="failed", not_before_ms=due),
        ledger_events.TimerSet(
            timer_id=timer_id(job.job_id, "backoff"),
            at_ms=due,
            about=ledger_events.TimerSubject(kind="backoff", id=job.job_id, attempt=1),
        ),
    )
    answer = explain(state, job.job_id)
    assert (answer.reason, answer.now_or_never, answer.position) == (Reason.BACKOFF, "now", None)
    assert "queues again in 2 s" in answer.detail
    assert "exit code 1" in answer.detail


def test_cell_frozen():
    """A switch died and most nodes fell silent at once (LAW 5)."""
    state = b.cell()
    b.queued(state)
    b.apply(state, ledger_events.CellFrozen(reason="3 of 4 nodes lost within 60 s"))
    assert why(state) == (Reason.CELL_FROZEN, "later")


def test_no_nodes():
    """A fresh installation: the first job comes before the first node; also after the last node has gone."""
    state = b.cell(nodes=0)
    b.queued(state)
    assert why(state) == (Reason.NO_NODES, "later")
    b.apply(state, external_events.NodeJoined(node=b.node()))
    b.apply(state, ledger_events.NodeLost(node_id="n0"))
    assert why(state) == (Reason.NO_NODES, "later")


def test_about_to_start():
    """Between the estimate's record and the placement's."""
    state = b.cell()
    b.queued(state)
    answer = explain(state, "job-1")
    assert (answer.reason, answer.now_or_never) == (Reason.ABOUT_TO_START, "now")
    assert (answer.position, answer.ahead, answer.feasible, answer.histogram) == (1, 0, 3, {})


def test_behind_in_queue():
    """Only the first two of the queue are tried; the third would fit but is not looked at."""
    state = b.cell(nodes=1, gpus=2, settings=PlacerSettings(backfill_window=2))
    busy(state, "running", "n0", gpus=1)
    for i in range(2):
        b.queued(state, f"large-{i}", worker=b.need(gpus=2))
    b.queued(state)
    answer = explain(state, "job-1")
    assert (answer.reason, answer.now_or_never) == (Reason.BEHIND_IN_QUEUE, "now")
    assert (answer.position, answer.ahead) == (3, 2)


def test_overtake_limit():
    """Small jobs have slipped past the large one twice; now they must wait for it."""
    state = b.cell(nodes=1, gpus=4, settings=PlacerSettings(max_overtakes=2))
    b.queued(state, "large", worker=b.need(gpus=4))
    for i in range(2):
        b.placed(state, b.queued(state, f"small-{i}"))
    b.queued(state)
    assert why(state) == (Reason.OVERTAKE_LIMIT, "now")
    assert why(state, "large") == (Reason.GPUS_BUSY, "later")


def test_nodes_suspect():
    """The only node is silent; silence is not death, so the job waits for it."""
    state = b.cell(nodes=1)
    b.queued(state)
    b.apply(state, external_events.NodeSuspected(node_id="n0", reason="its watch broke"))
    assert why(state) == (Reason.NODES_SUSPECT, "later")
    assert explain(state, "job-1").histogram == {"nodes_suspect": 1}


def test_gpus_busy_then_free_after_one_exit():
    """Every GPU is taken; a job that fits after one exit waits *later*, not *never*, and then fits."""
    state = b.cell(nodes=1, gpus=2)
    running = b.queued(state, "running", worker=b.need(gpus=2))
    b.placed(state, running)
    b.queued(state)
    assert why(state) == (Reason.GPUS_BUSY, "later")
    b.exited(state, running)
    assert why(state) == (Reason.ABOUT_TO_START, "now")


def test_gpus_fragmented():
    """Four GPUs are free, but two here and two there; the job wants four on one node."""
    state = b.cell(nodes=2, gpus=4)
    for i in range(2):
        busy(state, f"running-{i}", f"n{i}", gpus=2)
    b.queued(state, worker=b.need(gpus=4))
    assert why(state) == (Reason.GPUS_FRAGMENTED, "later")
    assert (
        "needs 4 GPUs on one node; suitable nodes have 4 free, at most 2 on one node"
        in explain(state, "job-1").detail
    )


@pytest.mark.parametrize(
    ("taken", "asked", "reason"),
    [
        ({"cores": 60}, {"cores": 8}, Reason.CORES),
        ({"host_memory_mib": 262_000}, {"host_memory_mib": 1_000}, Reason.HOST_MEMORY),
        ({"bandwidth_mbps": 9_500}, {"bandwidth_mbps": 600}, Reason.BANDWIDTH),
    ],
)
def test_cores_memory_and_bandwidth(taken: dict[str, int], asked: dict[str, int], reason: Reason):
    """GPUs are free, but a data-hungry neighbour has taken what else the job needs."""
    state = b.cell(nodes=1)
    busy(state, "greedy", "n0", gpus=0, **taken)
    b.queued(state, worker=b.need(gpus=1, **asked))
    assert why(state) == (reason, "later")
    assert explain(state, "job-1").histogram == {str(reason): 1}


def test_nodes_that_could_never_take_it_do_not_decide_the_reason():
    """Three boxes with many GPUs and two cores each, one right node that is full: waiting helps, cores do
    not."""
    state = b.cell_of([*(b.node(f"box-{i}", cores=2) for i in range(3)), b.node("right")])
    busy(state, "running", "right", gpus=8)
    b.queued(state, worker=b.need(cores=8))
    assert why(state) == (Reason.GPUS_BUSY, "later")
    assert explain(state, "job-1").histogram == {"cores": 3, "gpus_busy": 1}


def test_gang_incomplete():
    """Three of four workers would fit; a gang starts whole or not at all."""
    state = b.cell(nodes=2, gpus=2)
    busy(state, "running", "n0", gpus=1)
    b.queued(state, workers=4)
    assert why(state) == (Reason.GANG_INCOMPLETE, "later")
    assert explain(state, "job-1").detail == "3 of 4 tasks fit now, and all must start together"


def test_a_parameter_server_without_a_node_is_named():
    """The workers fit, but no node has the memory left that the parameter server wants."""
    state = b.cell(nodes=2, host_memory_mib=65_536)
    for i in range(2):
        busy(state, f"running-{i}", f"n{i}", gpus=0, host_memory_mib=40_000)
    b.queued(state, parameter_servers=1, parameter_server=b.need(gpus=0, host_memory_mib=60_000))
    assert why(state) == (Reason.HOST_MEMORY, "later")
    assert "one parameter server needs 60000 MiB" in explain(state, "job-1").detail


def test_the_histogram_separates_model_memory_and_size():
    """A mixed cell: one node of each kind that does not suit, one that does but is busy."""
    specs = [
        b.node("small", gpus=1),
        b.node("old", gpu_model="K80"),
        b.node("tight", gpu_memory_mib=8_192),
        b.node("right"),
    ]
    state = b.cell_of(specs)
    busy(state, "running", "right", gpus=8)
    b.queued(state, gpu_models=("V100",), worker=b.need(gpus=2, gpu_memory_mib=10_000))
    answer = explain(state, "job-1")
    assert (answer.reason, answer.now_or_never) == (Reason.GPUS_BUSY, "later")
    assert answer.histogram == {"gpus_too_few": 1, "gpu_model": 1, "gpu_memory": 1, "gpus_busy": 1}


@pytest.mark.parametrize(("gpus", "words"), [(1, "needs 1 GPU on"), (2, "needs 2 GPUs on")])
def test_one_gpu_is_one_gpu(gpus: int, words: str):
    """`needs 1 GPUs` was the first sentence that a new user read of a waiting job."""
    state = b.cell_of([b.node("n0", gpus=2)])
    busy(state, "running", "n0", gpus=2)
    b.queued(state, worker=b.need(gpus=gpus))
    assert words in explain(state, "job-1").detail


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"worker": b.need(gpus=9)}, Reason.NEVER_FITS_GPUS),
        ({"gpu_models": ("H100",)}, Reason.NEVER_FITS_GPU_MODEL),
        ({"worker": b.need(gpu_memory_mib=16_385)}, Reason.NEVER_FITS_GPU_MEMORY),
        ({"worker": b.need(cores=65)}, Reason.NEVER_FITS_CORES),
        ({"worker": b.need(host_memory_mib=262_145)}, Reason.NEVER_FITS_HOST_MEMORY),
        ({"worker": b.need(bandwidth_mbps=10_001)}, Reason.NEVER_FITS_BANDWIDTH),
        ({"workers": 25}, Reason.NEVER_FITS_GANG),
        (
            {"workers": 23, "parameter_servers": 2, "parameter_server": b.need(gpus=1)},
            Reason.NEVER_FITS_GANG,
        ),
        ({"parameter_servers": 1, "parameter_server": b.need(cores=65)}, Reason.NEVER_FITS_CORES),
    ],
)
def test_never(job: dict[str, object], reason: Reason):
    """A job asks for more than three nodes of 8 GPUs, 64 cores and 256 GiB have; one size less would do."""
    state = b.cell()
    b.queued(state, **job)  # type: ignore[arg-type]
    assert why(state) == (reason, "never")
    text = never_fits(state, state.jobs["job-1"].demand)
    assert text is not None
    assert text.startswith(f"{reason}: ")


@pytest.mark.parametrize(
    "job",
    [
        {
            "worker": b.need(
                gpus=8, cores=64, host_memory_mib=262_144, gpu_memory_mib=16_384, bandwidth_mbps=10_000
            )
        },
        {"workers": 24},
        {"workers": 22, "parameter_servers": 2, "parameter_server": b.need(gpus=1)},
        {"gpu_models": ("H100", "V100")},
    ],
)
def test_the_largest_job_that_fits_is_not_never(job: dict[str, object]):
    """Exactly what the cell has; while something runs it is *later*."""
    state = b.cell()
    for i in range(3):
        busy(state, f"running-{i}", f"n{i}", gpus=8)
    b.queued(state, **job)  # type: ignore[arg-type]
    assert explain(state, "job-1").now_or_never == "later"


def test_never_turns_into_later_when_a_larger_node_joins_and_back_when_it_is_gone():
    """The operator adds a large machine, and takes it away again; a silent one still counts."""
    state = b.cell(nodes=1, gpus=2)
    b.queued(state, worker=b.need(gpus=4))
    assert why(state)[1] == "never"
    b.apply(state, external_events.NodeJoined(node=b.node("large", gpus=4)))
    assert why(state)[1] == "now"
    b.apply(state, external_events.NodeSuspected(node_id="large", reason="silence"))
    assert why(state) == (Reason.NODES_SUSPECT, "later")
    b.apply(state, ledger_events.NodeLost(node_id="large"))
    assert why(state) == (Reason.NEVER_FITS_GPUS, "never")


def test_a_faulted_gpu_may_be_repaired():
    """One of eight GPUs fell off the bus: a job of eight waits, it is not hopeless."""
    state = b.cell(nodes=1)
    b.apply(state, external_events.GpuFaulted(node_id="n0", gpu=3, fault="fell_off_bus"))
    b.queued(state, worker=b.need(gpus=8))
    assert why(state) == (Reason.GPUS_BUSY, "later")


def test_running_and_ended_jobs_are_answered_fittingly():
    """`why` is asked about a job that does not wait at all."""
    state = b.cell()
    job = b.queued(state)
    b.placed(state, job)
    launching: Explanation = explain(state, "job-1")
    assert (launching.status, launching.reason) == ("launching", None)
    assert "n0" in launching.text
    b.exited(state, job)
    assert explain(state, "job-1").status == "succeeded"
    with pytest.raises(UnknownJob, match="job-2"):
        explain(state, "job-2")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    nodes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=3),
    workers=st.integers(1, 4),
    worker=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    servers=st.integers(0, 2),
    server=st.tuples(st.integers(0, 2), st.integers(1, 3)),
)
def test_never_is_no_false_alarm_and_exact_for_equal_tasks(
    nodes: list[tuple[int, int]],
    workers: int,
    worker: tuple[int, int],
    servers: int,
    server: tuple[int, int],
):
    """Small empty cells, every assignment of tasks to nodes tried out: never ⇒ none works; and without
    parameter servers none works ⇒ never. There Liquid finds a plan whenever one exists."""
    state = b.cell_of([b.node(f"n{i}", gpus=g, cores=c) for i, (g, c) in enumerate(nodes)])
    job = b.queued(
        state,
        workers=workers,
        parameter_servers=servers,
        worker=b.need(gpus=worker[0], cores=worker[1]),
        parameter_server=b.need(gpus=server[0], cores=server[1]),
    )
    tasks = [worker] * workers + [server] * servers

    def holds(assignment: tuple[int, ...]) -> bool:
        for i, (gpus, cores) in enumerate(nodes):
            here = [task for task, at in zip(tasks, assignment, strict=True) if at == i]
            if sum(g for g, _ in here) > gpus or sum(c for _, c in here) > cores:
                return False
        return True

    possible = any(holds(a) for a in itertools.product(range(len(nodes)), repeat=len(tasks)))
    if never_fits(state, job.demand) is not None:
        assert not possible
    elif not servers:
        assert possible
    plan = Liquid(0.5).place(state, job, LazyRng(0, "x"))
    assert possible or plan is None
    if not servers:
        assert (plan is not None) == possible


def test_a_policys_own_order_decides_whose_turn_it_is():
    """Under srtf the short job is owed all four GPUs, of which two are still being given back; the long one
    fits the other two, but it is not its turn."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4))
    for job_id, gpus, run_ms in (("running", 2, 1_000_000), ("short", 4, 10_000), ("long", 1, 5_000_000)):
        driver.submit(job_id, None, msgspec.structs.replace(estimate(gpus), run_ms=run_ms))
        driver.at(0)
        if job_id == "running":
            driver.start(job_id)
    found = explain(driver.state, "long")
    assert (found.reason, found.now_or_never) == (Reason.OUTRANKED, "later")
    assert found.detail == (
        "number 3 of 3 in the order of profile srtf (1 h 23 min left, as estimated); "
        "the GPUs go to earlier jobs: short (10 s left, as estimated)"
    )
    assert explain(driver.state, "short").reason is Reason.AWAITING_STOPS


def test_a_job_that_the_policy_ranks_behind_learns_who_comes_first():
    """Seven short jobs hold a cell of eight GPUs; a long one of four asks why it waits, and when one GPU is
    free."""
    claims = {
        "srtf": ("2 h 30 min left, as estimated", "1 s left, as estimated"),
        "tiresias": ("0 GPU seconds of service", "0 GPU seconds of service"),
        "sjf": ("2 h 30 min left, as estimated", "1 s left, as estimated"),
    }
    for profile, (own, others) in claims.items():
        driver = CellDriver(PlacerSettings(profile=profile))
        driver.join(node_spec("n0", 4), node_spec("n1", 4))
        for number in range(7):
            driver.submit(f"s{number}", None, msgspec.structs.replace(estimate(1), run_ms=1_000 + number))
        driver.at(0)
        driver.submit("long", None, msgspec.structs.replace(estimate(4), run_ms=9_000_000))
        driver.at(0)
        found = explain(driver.state, "long")
        assert (found.reason, found.now_or_never) == (Reason.OUTRANKED, "later"), profile
        assert found.detail.startswith(f"number 8 of 8 in the order of profile {profile} ({own}); "), (
            found.detail
        )
        named = found.detail.rpartition(": ")[2]
        assert named.endswith(" and 2 others")
        five = set(named.removesuffix(f" ({others}) and 2 others").split(f" ({others}), "))
        assert five < {f"s{number}" for number in range(7)}
        driver.start("s0")
        driver.exit("s0.1.w0")
        assert explain(driver.state, "long").reason is Reason.OUTRANKED, "three and two free make no four"


def test_a_job_that_the_policy_has_chosen_learns_what_it_lacks():
    """Its turn has come, but cores, which the plan does not count, are taken: the detail names cores."""
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 4, cores=8))
    driver.submit("a", None, msgspec.structs.replace(estimate(1, cores=6), run_ms=1_000))
    driver.submit("b", None, msgspec.structs.replace(estimate(1, cores=6), run_ms=2_000))
    driver.at(0)
    found = explain(driver.state, "b")
    assert (found.reason, found.now_or_never) == (Reason.CORES, "later")


def test_a_job_with_a_generated_id_has_its_name_in_the_text_about_another() -> None:
    """The gateway gave the ids: 22 letters tell a user nothing. Commands find a job by the first twelve."""
    generated = "j0" + "1" * 20
    driver = CellDriver(PlacerSettings(profile="srtf"))
    driver.join(node_spec("n0", 1))
    driver.submit(generated, job_spec(name="nightly"), msgspec.structs.replace(estimate(1), run_ms=10_000))
    driver.submit("long", None, msgspec.structs.replace(estimate(1), run_ms=90_000))
    assert explain(driver.state, "long").detail.endswith(
        "earlier jobs: nightly (j01111111111) (10 s left, as estimated)"
    )
