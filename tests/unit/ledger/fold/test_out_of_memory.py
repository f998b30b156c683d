"""Out of memory that nobody asked for: caps beyond promises, who is blamed, how often it is tried, and
what the user reads."""

from typing import Any

import msgspec
import pytest

from penstock.ledger.derived.memory import MAX_RAISES, fair_share_mib
from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import TaskExited
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, ResourceVector, Usage
from penstock.why.explain import explain
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.visible import reason_for
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

GUESS = Estimate(
    worker=ResourceVector(gpus=1, cores=1, host_memory_mib=2_048),
    parameter_server=ResourceVector(gpus=0, cores=1, host_memory_mib=1_024),
    confidence=0.1,
    tier="default",
    source="default: nothing is known yet",
    guessed=("worker", "ps"),
)
NODE_MIB = 131_072
KILLED: dict[str, Any] = {
    "cause": "out_of_memory",
    "exit_code": None,
    "signal": 9,
    "usage": Usage(host_memory_mib=9_000),
}
"""The machine ran short, and the kernel ended the task that had most beyond its promise."""


@pytest.fixture
def cell() -> CellDriver:
    """One node of 128 GiB, 4 V100 and 32 cores."""
    driver = CellDriver()
    driver.join(node_spec("n1"))
    return driver


def exhausted(cell: CellDriver, task_id: str, memory: Any = "host_memory", **more: Any) -> list[str]:
    """An allocation of the task fails; the kinds of facts that follow."""
    job = cell.job(task_id.rsplit(".", 2)[0])
    exited = TaskExited(
        node_id=job.tasks[task_id].place.node_id,
        task_id=task_id,
        token=job.token,
        cause="exited",
        exit_code=1,
        started_ms=cell.now_ms,
        exited_ms=cell.now_ms,
        usage=Usage(host_memory_mib=1_900),
        exhausted=memory,
        detail="MemoryError in its last lines",
    )
    return kinds(cell.feed(msgspec.structs.replace(exited, **more)))


def test_what_nobody_asked_for_is_no_cap(cell: CellDriver) -> None:
    """2 GiB are reserved for the new user's job; what the idle node has besides is what it may use,
    guessed or learned."""
    cell.submit("j", job_spec(ps=1), GUESS)
    worker, server = (task.place for task in cell.job("j").tasks.values())
    assert (worker.host_memory_mib, worker.cap_mib) == (2_048, NODE_MIB)
    assert (server.host_memory_mib, server.cap_mib) == (1_024, NODE_MIB - 2_048)
    assert cell.state.nodes["n1"].free_host_memory_mib == NODE_MIB - 2_048 - 1_024
    starts = {order.place.role: order.place.cap_mib for order in cell.orders()}  # type: ignore[union-attr]
    assert starts == {"worker": NODE_MIB, "ps": NODE_MIB - 2_048}
    learned = msgspec.structs.replace(
        GUESS, guessed=(), tier="history", worker=ResourceVector(gpus=1, cores=1, host_memory_mib=48)
    )
    cell.submit("nightly", None, learned)
    place = cell.job("nightly").tasks["nightly.1.w0"].place
    assert (place.host_memory_mib, place.cap_mib) == (48, NODE_MIB - 3_072), (
        "48 MiB last night, 1.5 GiB today"
    )


def test_what_others_were_promised_is_not_taken(cell: CellDriver) -> None:
    """Beside a neighbour that asked for 120 GiB, a job that asked for nothing may use the rest, or its
    fair share."""
    asked = msgspec.structs.replace(job_spec(), resources=ResourceRequest(host_memory_mib=90_000))
    large = estimate(memory_mib=90_000)
    cell.submit("large", asked, large)
    assert cell.job("large").tasks["large.1.w0"].place.cap_mib == 90_000
    cell.submit("j", None, GUESS)
    assert cell.job("j").tasks["j.1.w0"].place.cap_mib == NODE_MIB - 90_000
    cell.submit("more", asked, estimate(memory_mib=30_000))
    cell.submit("k", None, GUESS)
    assert cell.job("k").tasks["k.1.w0"].place.cap_mib == NODE_MIB // 4


def test_fair_shares_of_a_node_add_up_to_it() -> None:
    node = node_spec("n1", gpus=4, cores=32)
    assert 4 * fair_share_mib(node, ResourceVector(gpus=1, cores=1)) == node.host_memory_mib
    assert 8 * fair_share_mib(node, ResourceVector(gpus=1, gpu_share_milli=500)) == node.host_memory_mib
    assert 32 * fair_share_mib(node, ResourceVector(cores=1)) == node.host_memory_mib


def test_a_guess_that_was_too_small_costs_one_attempt_and_none_of_the_users_own(cell: CellDriver) -> None:
    """It waits for the estimator, who knows by now what did not suffice; a late copy of the first estimate is
    not taken for it."""
    cell.submit("j", None, GUESS)
    cell.start("j")
    assert exhausted(cell, "j.1.w0", **KILLED) == ["task.exited", "job.requeued"]
    job = cell.job("j")
    assert (job.status, job.retries.infrastructure, job.estimate) == (JobStatus.SUBMITTED, 1, None)
    found = explain(cell.state, "j")
    assert found.reason == "awaiting_estimate"
    assert "its node ran short while it had 9000 MiB, and was promised 2048 MiB" in found.detail
    assert cell.feed(JobEstimated(job_id="j", estimate=GUESS)).reason == "duplicate_estimate"
    raised = msgspec.structs.replace(GUESS, worker=ResourceVector(gpus=1, cores=1, host_memory_mib=18_000))
    step = cell.feed(JobEstimated(job_id="j", estimate=raised, attempt=2))
    assert kinds(step) == ["job.estimated", "placement.decided", "timer.set"]
    assert job.tasks["j.2.w0"].place.host_memory_mib == 18_000
    assert job.retries.short_of == {"worker:host_memory": 9_000}
    cell.start("j")
    cell.exit("j.2.w0")
    assert cell.state.ended["j"] == "succeeded"


def test_another_tenant_is_not_shown_what_failed_while_the_job_waits_to_be_estimated(
    cell: CellDriver,
) -> None:
    """The sentence names the task, its node and what its owner's runs used."""
    cell.submit("j", None, GUESS)
    cell.start("j")
    exhausted(cell, "j.1.w0", **KILLED)
    found = msgspec.to_builtins(explain(cell.state, "j"))
    assert found["detail"]
    other, own = (Caller(frozenset({Role.READ}), tenant) for tenant in ("other", "ada"))
    assert reason_for(other, found, "ada")["detail"] is None
    assert reason_for(own, found, "ada")["detail"] == found["detail"]


def test_all_of_a_node_and_no_larger_one_ends_the_job_with_the_whole_reason(cell: CellDriver) -> None:
    """It leaks: there is no more memory to give. The limit, its origin, the measured peak and the remedy are
    in one sentence."""
    everything = msgspec.structs.replace(
        GUESS, worker=ResourceVector(gpus=1, cores=1, host_memory_mib=131_072)
    )
    cell.submit("j", None, everything)
    cell.start("j")
    exhausted(cell, "j.1.w0")
    assert cell.state.ended["j"] == "failed"
    ended = msgspec.json.decode(cell.values[-1])["facts"][1]["data"]
    assert ended["reason"] == (
        "j.1.w0 on n1: out of host memory (MemoryError in its last lines); its cap was 131072 MiB, all that "
        "its node has: Penstock's estimate, 10% sure, tier default: default: nothing is known yet; measured "
        "peak 1900 MiB. Ask for more with --host-memory 256GiB, or in the job file: resources: "
        "{host_memory: 256GiB}"
    )


def test_what_the_user_asked_for_is_his_limit(cell: CellDriver) -> None:
    """He asked for 2 GiB, and his own attempts are used up one by one."""
    spec = msgspec.structs.replace(job_spec(attempts=2), resources=ResourceRequest(host_memory_mib=2_048))
    cell.submit("j", spec, msgspec.structs.replace(GUESS, guessed=()))
    cell.start("j")
    assert exhausted(cell, "j.1.w0") == ["task.exited", "job.requeued", "timer.set"]
    assert cell.job("j").status is JobStatus.BACKOFF
    assert "its cap was 2048 MiB: the job asked for it" in cell.job("j").exit.failure
    assert "--host-memory 4GiB" in cell.job("j").exit.failure


def test_a_parameter_server_is_blamed_although_its_worker_failed_first(cell: CellDriver) -> None:
    """The kernel kills the server; its worker reports a closed connection before the kill is reported."""
    cell.submit("j", job_spec(ps=1), GUESS)
    cell.start("j")
    assert kinds(cell.exit("j.1.w0", 1)) == ["task.exited", "stop.decided"]
    assert cell.job("j").exit.failure == "j.1.w0 on n1: exit code 1"
    facts = exhausted(cell, "j.1.ps0", cause="out_of_memory", exit_code=None, signal=9)
    assert facts == ["task.exited", "job.requeued"]
    job = cell.job("j")
    assert job.exit.failure.startswith("j.1.ps0 on n1: out of host memory")
    assert "its node ran short while it had 1900 MiB, and was promised 1024 MiB" in job.exit.failure
    assert "Penstock's guess for parameter servers" in job.exit.failure
    assert job.exit.code == 137


def test_cuda_out_of_memory_is_tried_again_where_a_card_has_more(cell: CellDriver) -> None:
    """On the only V100s it is the job's own failure; with a node of larger cards it gets another attempt."""
    for job_id in ("small", "large"):
        cell.submit(job_id, None, estimate())
        cell.start(job_id)
    assert exhausted(cell, "small.1.w0", "gpu_memory") == ["task.exited", "job.ended"]
    cell.join(node_spec("n2", 1, model="A100", memory_mib=40_960))
    assert exhausted(cell, "large.1.w0", "gpu_memory") == ["task.exited", "job.requeued"]
    assert "it had all 16384 MiB of its V100" in cell.job("large").exit.failure
    assert "or use a smaller batch" in cell.job("large").exit.failure


def test_a_member_stopped_beyond_its_promise_gets_another_attempt_as_one_with_a_part_of_a_gpu(
    cell: CellDriver,
) -> None:
    """Its node held it to 4 GiB while a companion was there. No card is larger than that one, but it had not
    all of it. A job that named the figure itself has used up an attempt of its own."""
    worker = ResourceVector(gpus=1, cores=1, host_memory_mib=2_048, gpu_memory_mib=4_096)
    found = msgspec.structs.replace(GUESS, worker=worker)
    for job_id, spec in (
        ("member", job_spec()),
        ("asked", msgspec.structs.replace(job_spec(), resources=ResourceRequest(gpu_memory_mib=4_096))),
    ):
        cell.submit(job_id, spec, found)
        cell.start(job_id)
    evidence = "stopped by its node: it held 6000 MiB of a shared GPU, and was promised 4096"
    how: dict[str, Any] = {"exit_code": None, "signal": 9, "detail": evidence, "gpu_memory_limit_mib": 4_096}
    assert exhausted(cell, "member.1.w0", "gpu_memory", **how) == ["task.exited", "job.requeued"]
    member = cell.job("member")
    assert (member.status, member.retries.memory) == (JobStatus.SUBMITTED, 1)
    assert member.retries.short_of == {"worker:gpu_memory": 4_096}
    assert f"out of GPU memory ({evidence}); it was promised 4096 MiB of a shared GPU" in member.exit.failure
    assert "--gpu-memory 8GiB" in member.exit.failure
    assert exhausted(cell, "asked.1.w0", "gpu_memory", **how) == ["task.exited", "job.ended"]
    cell.feed(JobEstimated(job_id="member", estimate=found, attempt=2))
    cell.start("member")
    assert exhausted(cell, "member.2.w0", "gpu_memory", **how) == ["task.exited", "job.ended"], (
        "no more than it had"
    )


def test_memory_is_raised_a_bounded_number_of_times(cell: CellDriver) -> None:
    """An estimator that answers with the same again, or with a little more each time, does not make a job run
    for ever."""
    cell.submit("same", None, GUESS)
    cell.start("same")
    exhausted(cell, "same.1.w0", **KILLED)
    cell.feed(JobEstimated(job_id="same", estimate=GUESS, attempt=2))
    cell.start("same")
    exhausted(cell, "same.2.w0", **KILLED)
    assert cell.state.ended["same"] == "failed"

    cell.submit("more", None, GUESS)
    for attempt in range(1, MAX_RAISES + 1):
        cell.start("more")
        exhausted(cell, f"more.{attempt}.w0", **(KILLED | {"usage": Usage(host_memory_mib=9_000 + attempt)}))
        assert cell.job("more").retries.memory == attempt
        worker = msgspec.structs.replace(GUESS.worker, host_memory_mib=9_000 + attempt)
        raised = msgspec.structs.replace(GUESS, worker=worker)
        cell.feed(JobEstimated(job_id="more", estimate=raised, attempt=attempt + 1))
    cell.start("more")
    exhausted(cell, f"more.{MAX_RAISES + 1}.w0", **(KILLED | {"usage": Usage(host_memory_mib=10_000)}))
    assert cell.state.ended["more"] == "failed"


def test_a_job_that_waits_for_its_second_estimate_can_be_cancelled_and_times_out(cell: CellDriver) -> None:
    """The estimator is down; the queue's time-out counts as for a new job."""
    cell.submit("j", job_spec(queue_timeout_ms=5_000), GUESS)
    cell.start("j")
    assert exhausted(cell, "j.1.w0", **KILLED) == ["task.exited", "job.requeued", "timer.set"]
    cell.at(5_000)
    assert cell.state.ended["j"] == "timed_out_queued"


def test_a_kill_that_an_earlier_version_reports_is_the_jobs_own_failure(cell: CellDriver) -> None:
    """Ledgers of earlier versions are decided again to the byte."""
    cell.submit("j", None, GUESS)
    cell.start("j")
    step = cell.exit("j.1.w0", None, cause="out_of_memory", signal=9)
    [_, ended] = step.facts
    assert isinstance(ended, JobEnded)
    assert ended.reason == "j.1.w0 on n1: out of memory"
