"""Dominant resource fairness: the source's own example, fairness in time, and the rule followed line by
line."""

from fractions import Fraction

import numpy as np
import pytest

from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.proposals import CoresProposed
from penstock.scheduling.order.shares import NOTHING, PARTS, Amounts, Holdings, owner_of, plus
from penstock.why.explain import explain
from penstock_services.placer.core.step import Step
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver

GIB = 1_024


def cell(*nodes: NodeSpec) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile="drf"))
    driver.join(*nodes)
    return driver


def submit(driver: CellDriver, owner: str, job_id: str, need: ResourceVector, workers: int = 1) -> Step:
    spec = JobSpec(command=("train",), owner=owner, workers=workers)
    return driver.submit(job_id, spec, Estimate(worker=need, confidence=1.0, tier="user", source="a test"))


def running(driver: CellDriver) -> list[str]:
    return sorted(job.job_id for job in driver.state.jobs.values() if job.status is JobStatus.LAUNCHING)


def test_the_example_of_the_source() -> None:
    """9 cores and 18 GiB; A's tasks ask 1 core and 4 GiB, B's 3 cores and 1 GiB. A gets three tasks, B two:
    both hold two thirds of what they need most of. All wait when the node joins; A's came first and do not
    get it all.
    """
    driver = cell()
    for i in range(6):
        submit(driver, "A", f"a{i}", b.need(gpus=0, cores=1, host_memory_mib=4 * GIB))
    for i in range(6):
        submit(driver, "B", f"b{i}", b.need(gpus=0, cores=3, host_memory_mib=1 * GIB))
    driver.join(b.node("n0", gpus=0, cores=9, host_memory_mib=18 * GIB))
    assert running(driver) == ["a0", "a1", "a2", "b0", "b1"]


def test_who_holds_least_is_next() -> None:
    """One team has sent a hundred jobs before lunch; the intern's first one gets the next GPU that is
    free."""
    driver = cell(b.node("n0", gpus=4))
    for i in range(10):
        submit(driver, "team", f"t{i}", b.need())
    submit(driver, "intern", "i0", b.need())
    submit(driver, "intern", "i1", b.need())
    assert running(driver) == ["t0", "t1", "t2", "t3"]
    driver.start("t0")
    driver.exit("t0.1.w0")
    driver.start("t1")
    driver.exit("t1.1.w0")
    assert running(driver) == ["i0", "i1", "t2", "t3"]
    driver.start("i0")
    driver.exit("i0.1.w0")
    assert running(driver) == ["i1", "t2", "t3", "t4"]


def test_inside_an_owner_nothing_overtakes_but_others_go_on() -> None:
    """The lab's large job waits for the whole node, and so does its small one; somebody else's small job
    runs."""
    driver = cell(b.node("n0", gpus=4))
    submit(driver, "lab", "first", b.need(gpus=2))
    submit(driver, "lab", "large", b.need(gpus=4))
    submit(driver, "lab", "small", b.need())
    submit(driver, "other", "theirs", b.need())
    assert running(driver) == ["first", "theirs"]
    assert explain(driver.state, "small").reason is Reason.BEHIND_IN_QUEUE
    assert explain(driver.state, "large").reason is Reason.GPUS_BUSY


def share(state: CellState, owner: str, placed: list[tuple[JobState, list[str]]]) -> Fraction:
    """The owner's dominant share from nothing: what was held before, and what has been placed since."""
    held = [0, 0, 0, 0]
    for job in state.jobs.values():
        for task in job.tasks.values():
            if job.spec.owner == owner and task.status is not TaskStatus.EXITED:
                place = task.place
                of_task = (
                    len(place.gpus) * place.gpu_share_milli,
                    len(place.cores),
                    place.host_memory_mib,
                    place.bandwidth_mbps,
                )
                held = [have + more for have, more in zip(held, of_task, strict=True)]
    for job, nodes in placed:
        if job.spec.owner == owner:
            need = job.demand.worker
            of_task = (
                need.gpus * need.gpu_share_milli,
                need.cores,
                need.host_memory_mib,
                need.bandwidth_mbps,
            )
            held = [have + len(nodes) * more for have, more in zip(held, of_task, strict=True)]
    specs = [node.spec for node in state.nodes.values()]
    total = [
        1_000 * sum(len(spec.gpus) for spec in specs),
        sum(spec.cores for spec in specs),
        sum(spec.host_memory_mib for spec in specs),
        sum(spec.bandwidth_mbps for spec in specs),
    ]
    return max(Fraction(have, of) for have, of in zip(held, total, strict=True))


def rule(state: CellState) -> list[tuple[str, list[str]]]:
    """What is placed now, by the rule: (job id, node of each worker), in order."""
    free = {
        node_id: [n.free_gpu_mask.bit_count(), n.free_core_mask.bit_count(), n.free_host_memory_mib]
        for node_id, n in state.nodes.items()
    }
    waiting = [job for job in state.jobs.values() if job.status is JobStatus.QUEUED]
    placed: list[tuple[JobState, list[str]]] = []
    passed: set[str] = set()
    while True:
        heads: dict[str, JobState] = {}
        for job in waiting:
            if job.spec.owner not in passed:
                heads.setdefault(job.spec.owner, job)
        if not heads:
            return [(job.job_id, nodes) for job, nodes in placed]
        job = min(heads.values(), key=lambda head: (share(state, head.spec.owner, placed), head.order))
        need = job.demand.worker
        asks = [need.gpus, need.cores, need.host_memory_mib]
        trial = {node_id: list(left) for node_id, left in free.items()}
        nodes: list[str] = []
        for _ in range(job.spec.workers):
            for node_id, left in trial.items():
                if all(have >= ask for have, ask in zip(left, asks, strict=True)):
                    trial[node_id] = [have - ask for have, ask in zip(left, asks, strict=True)]
                    nodes.append(node_id)
                    break
        if len(nodes) == job.spec.workers:
            free = trial
            placed.append((job, nodes))
            waiting.remove(job)
        else:
            passed.add(job.spec.owner)


def decided(step: Step) -> list[tuple[str, list[str]]]:
    return [
        (fact.job_id, [place.node_id for place in fact.tasks])
        for fact in step.facts
        if isinstance(fact, PlacementDecided)
    ]


def before(driver: CellDriver, step: Step) -> CellState:
    """A copy of the state as it was when the step began to place."""
    state = load(dump(driver.state))
    for job_id, _ in decided(step):
        job = state.jobs[job_id]
        for task_id, task in job.tasks.items():
            node = state.nodes[task.place.node_id]
            node.take_back(task.place)
            node.tasks.pop(task_id)
        job.tasks = {}
        job.status = JobStatus.QUEUED
    return state


@pytest.mark.parametrize("seed", range(6))
def test_the_rule_line_by_line(seed: int) -> None:
    """Five owners with tastes of their own share three nodes for a while: each record places what the rule
    demands."""
    rng = np.random.default_rng(seed)
    driver = cell(*(b.node(f"n{i}", gpus=4, cores=32, host_memory_mib=64 * GIB) for i in range(3)))
    placed = 0
    for number in range(150):
        living = running(driver)
        if living and rng.random() < 0.45:
            gone = living[int(rng.integers(len(living)))]
            tasks = list(driver.job(gone).tasks)
            driver.start(gone)
            for task_id in tasks:
                step = driver.exit(task_id)
                assert decided(step) == rule(before(driver, step))
                placed += len(decided(step))
        else:
            owner = int(rng.integers(5))
            need = b.need(
                gpus=int(rng.integers(0, 2 if owner == 1 else 4)),
                cores=int(rng.integers(1, 16 if owner == 2 else 4)),
                host_memory_mib=GIB * int(rng.integers(1, 32 if owner == 3 else 4)),
            )
            step = submit(driver, f"owner-{owner}", f"job-{number}", need, int(rng.integers(1, 4)))
            assert decided(step) == rule(before(driver, step))
            placed += len(decided(step))
    assert placed > 40


def counted(state: CellState) -> dict[str, Amounts]:
    """What owners hold, counted anew, task by task."""
    held: dict[str, Amounts] = {}
    for job in state.holding.values():
        for task in job.tasks.values():
            place, mine = task.place, held.get(job.spec.owner, NOTHING)
            if task.status is not TaskStatus.EXITED:
                units = len(place.gpus) * place.gpu_share_milli, len(place.cores)
                gpus, cores, memory, bandwidth = *units, place.host_memory_mib, place.bandwidth_mbps
                more = gpus * PARTS, cores * PARTS, memory * PARTS, bandwidth * PARTS
                held[job.spec.owner] = plus(mine, more)
    return held


@pytest.mark.parametrize("seed", range(4))
def test_holdings_follow_each_change(seed: int) -> None:
    """Gangs start, an operator changes the cores of their tasks, and their tasks end one by one; some readers
    miss many records."""
    rng = np.random.default_rng(seed)
    driver = cell(*(b.node(f"n{i}", gpus=4, cores=32, host_memory_mib=64 * GIB) for i in range(3)))
    readers = [(Holdings(owner_of), each) for each in (1, 7)]
    for number in range(150):
        tasks = [task_id for node in driver.state.nodes.values() for task_id in node.tasks]
        choice = rng.random()
        if tasks and choice < 0.4:
            task_id = tasks[int(rng.integers(len(tasks)))]
            if (gone := driver.state.jobs[task_id.rsplit(".", 2)[0]]).status is JobStatus.LAUNCHING:
                driver.start(gone.job_id)
            driver.exit(task_id)
        elif tasks and choice < 0.6:
            task_id, cores = tasks[int(rng.integers(len(tasks)))], int(rng.integers(1, 9))
            proposal = {"proposal_id": f"c{number}", "proposer": "gateway", "reason": "r", "by": "ada"}
            driver.feed(CoresProposed(**proposal, task_id=task_id, cores=cores))
        else:
            need = b.need(gpus=int(rng.integers(0, 3)), cores=int(rng.integers(1, 5)))
            submit(driver, f"owner-{rng.integers(4)}", f"job-{number}", need, int(rng.integers(1, 4)))
        for holdings, each in readers:
            if number % each == 0:
                holdings.update(driver.state)
                assert holdings.held == counted(driver.state)
