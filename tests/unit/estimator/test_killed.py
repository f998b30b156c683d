"""Tasks that ran out of memory: what the next attempt and the next job are promised, and for whom that
counts."""

import msgspec
import pytest

from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import (
    JobEnded,
    JobQueued,
    JobRequeued,
    NodeLost,
    PlacementDecided,
    TaskLost,
)
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import NodeJoined, TaskExited
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate, TaskPlacement
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.fold.from_snapshot import begin_at
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.learning.limits import KILLS, KILLS_OF_ONE
from penstock_services.estimator.core.records.runs import job_info
from penstock_services.estimator.core.resources.bounds import Bounds
from penstock_services.estimator.core.resources.cores import CoresTier
from penstock_services.estimator.core.resources.estimate import Guess, HistoryTier, estimate
from penstock_services.estimator.core.resources.memory_kills import FIRST_WORKER_MIB, MemoryKills
from penstock_services.estimator.core.resources.nearest import NearestTier
from tests.support.cluster.driver import node_spec
from tests.unit.estimator.service.test_estimator import SPEC, Cell, ids, usage

NODE_MIB = 131_072


class Memory(Cell):
    """A cell with one node of 128 GiB, whose jobs run with what they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = State(Topic.JOBS, 0)
        for value in self.values:
            self.ledger.fold(value)
        self.record(NodeJoined(node=node_spec("node-1", 4)))

    def predicted(self, spec: JobSpec = SPEC) -> Estimate:
        tiers = (
            HistoryTier(self.ledger.history),
            NearestTier(self.ledger.nearest),
            CoresTier(self.ledger.past_cores, self.ledger.nodes),
        )
        return estimate(spec, tiers, None, Bounds(self.ledger.kills, self.ledger.nodes))

    def begin(self, job_id: str, spec: JobSpec = SPEC) -> int:
        """Submitted, estimated and placed; what it was promised, MiB."""
        found = self.predicted(spec)
        self.submit(job_id, spec)
        self.record(JobEstimated(job_id=job_id, estimate=found))
        self.place(job_id)
        return found.worker.host_memory_mib

    def kill(self, job_id: str, spec: JobSpec = SPEC) -> int:
        """One whole job that is killed for its memory; what it had been promised."""
        promised = self.begin(job_id, spec)
        self.record(killed_exit(job_id))
        self.record(JobEnded(job_id=job_id, outcome="failed"))
        return promised

    def restarted(self) -> State:
        """Of an estimator that begins with a snapshot of the cell."""
        replica, begun = Replica(), State(Topic.JOBS, 0)
        for offset, value in enumerate(self.values):
            replica.take(value, offset)
        begin_at(begun, replica)
        return begun

    def succeed(self, job_id: str, used_mib: int, spec: JobSpec = SPEC) -> None:
        self.begin(job_id, spec)
        self.exit(job_id, usage(used_mib))
        self.record(JobEnded(job_id=job_id, outcome="succeeded"))


def killed_exit(job_id: str, attempt: int = 1, rank: int = 0) -> TaskExited:
    return TaskExited(
        node_id="node-1",
        task_id=f"{job_id}/{attempt}/{rank}",
        token=1,
        cause="out_of_memory",
        signal=9,
        started_ms=0,
        exited_ms=9_000,
    )


def other(**changes: object) -> JobSpec:
    return msgspec.structs.replace(SPEC, **changes)


def test_the_next_job_is_promised_twice_as_much_until_it_runs() -> None:
    """Ada's new training needs 11 GiB: killed with 2 and 8, it runs with 16, and from then on its own use
    counts."""
    cell = Memory()
    assert [cell.kill(f"job-{number}") for number in range(2)] == [2_048, FIRST_WORKER_MIB]
    found = cell.predicted()
    assert found.worker.host_memory_mib == 16_384
    assert found.source.endswith("host memory: more than the 8192 MiB that this command ran out of")
    cell.succeed("job-3", 11_000)
    assert (cell.predicted().worker.host_memory_mib, cell.predicted().tier) == (12_100, "history")
    assert "ran out" not in cell.predicted().source


def test_a_kill_raises_even_what_the_history_says() -> None:
    """A command of many small runs gets a larger data set: the largest of its past is not enough any more."""
    cell = Memory()
    cell.succeed("small", 1_000)
    assert cell.kill("large") == 1_100
    assert (cell.predicted().worker.host_memory_mib, cell.predicted().tier) == (FIRST_WORKER_MIB, "history")


def test_a_run_that_had_no_more_than_the_killed_one_proves_nothing() -> None:
    """Of two jobs side by side one is killed, the other is lucky and ends later with the same promise."""
    cell = Memory()
    cell.begin("lucky")
    cell.kill("killed")
    cell.exit("lucky", usage(2_000))
    cell.record(JobEnded(job_id="lucky", outcome="succeeded"))
    assert cell.predicted().worker.host_memory_mib == FIRST_WORKER_MIB
    cell.succeed("enough", 2_100)
    assert cell.predicted().worker.host_memory_mib == 2_310


def test_a_retry_is_estimated_anew() -> None:
    """A job that needs 4 GiB and asks for none: its second attempt has them, and so has its owner's next
    job."""
    cell = Memory()
    cell.begin("job-1")
    cell.record(killed_exit("job-1"))
    assert cell.ledger.forgotten() == []
    cell.record(JobRequeued(job_id="job-1", attempt=1, reason="failed", estimate_again=True))
    [live] = cell.ledger.forgotten()
    assert (live.job.job_id, live.job.awaited_estimate) == ("job-1", 2)
    found = estimate(live.job.spec, (), live.info.key, Bounds(cell.ledger.kills, cell.ledger.nodes))
    assert found == cell.predicted()
    assert found.worker.host_memory_mib == FIRST_WORKER_MIB
    cell.record(JobEstimated(job_id="job-1", estimate=found, attempt=2))
    assert cell.ledger.unestimated() == []
    cell.place("job-1", attempt=2)
    cell.exit("job-1", usage(4_300), attempt=2)
    cell.record(JobEnded(job_id="job-1", outcome="succeeded"))
    assert cell.predicted().worker.host_memory_mib == 4_730


def test_an_estimator_that_restarts_meanwhile_estimates_the_retry() -> None:
    """The estimator is killed after the job, too, was killed: a snapshot has the job without an estimate."""
    cell = Memory()
    cell.begin("job-1")
    cell.record(killed_exit("job-1"))
    cell.record(JobRequeued(job_id="job-1", attempt=1, reason="failed", estimate_again=True))
    [live] = cell.restarted().unestimated()
    assert (live.job.job_id, live.job.awaited_estimate) == ("job-1", 2)


def failed_once() -> Memory:
    """Job `failed` is promised 2 GiB; its first attempt fails, for no matter of memory, and backs off."""
    cell = Memory()
    assert cell.begin("failed") == 2_048
    cell.exit("failed", usage(), code=1)
    cell.record(JobRequeued(job_id="failed", attempt=1, reason="failed", not_before_ms=1_000))
    return cell


def test_a_retry_after_another_failure_is_estimated_anew() -> None:
    """Exit code 1. Meanwhile another run of the same command has shown what it needs: 9,900 MiB, and not the
    2 GiB of the first guess."""
    cell = Memory()
    for job_id in ("other", "failed"):
        assert cell.begin(job_id) == 2_048
    cell.exit("other", usage(9_000))
    cell.record(JobEnded(job_id="other", outcome="succeeded"))
    cell.exit("failed", usage(), code=1)
    cell.record(JobRequeued(job_id="failed", attempt=1, reason="failed", not_before_ms=1_000))
    [live] = cell.ledger.forgotten()
    assert (live.job.job_id, live.job.awaited_estimate) == ("failed", 2)
    found = estimate(live.job.spec, (HistoryTier(cell.ledger.history),), live.info.key)
    assert (found.worker.host_memory_mib, found.tier) == (9_900, "history")


def test_what_a_retry_was_promised_counts_until_it_is_estimated_anew() -> None:
    """Its back-off ends before the answer: it runs with the old estimate, and nothing is left to estimate,
    also after a restart."""
    cell = failed_once()
    [live] = cell.ledger.forgotten()
    assert live.job.estimate is not None
    assert live.job.estimate.worker.host_memory_mib == 2_048
    assert ids(cell.restarted().unestimated()) == ["failed"]
    cell.record(JobQueued(job_id="failed"))
    assert (cell.ledger.unestimated(), cell.restarted().unestimated()) == ([], [])


def test_a_retry_that_queues_at_once_keeps_its_estimate() -> None:
    """Its node was lost, or it gave way: nothing is wrong with what it was promised, and it may be placed in
    the same record."""
    cell = Memory()
    cell.begin("job-1")
    for attempt, reason in enumerate(("node_lost", "preempted", "migrated", "drained"), start=1):
        cell.record(TaskLost(task_id=f"job-1/{attempt}/0", node_id="node-1", reason=reason))
        cell.record(JobRequeued(job_id="job-1", attempt=attempt, reason=reason))
        cell.place("job-1", attempt=attempt + 1)
    assert (cell.ledger.forgotten(), cell.ledger.unestimated()) == ([], [])


def failed_exit(job_id: str, rank: int = 0, memory: str = "host_memory") -> TaskExited:
    """An allocation failed inside the program."""
    return TaskExited(
        node_id="node-1",
        task_id=f"{job_id}/1/{rank}",
        token=1,
        cause="exited",
        exit_code=1,
        started_ms=0,
        exited_ms=9_000,
        exhausted=memory,
        detail="MemoryError in its last lines",
    )


def test_the_cap_that_was_enforced_is_the_lower_bound() -> None:
    """Its promise of 2 GiB was a guess, so that it had its share of the node, 32 GiB, and needed more."""
    cell = Memory()
    cell.submit("job-1")
    cell.record(JobEstimated(job_id="job-1", estimate=cell.predicted()))
    place = TaskPlacement(
        task_id="job-1/1/0",
        role="worker",
        rank=0,
        node_id="node-1",
        gpus=(0,),
        host_memory_mib=2_048,
        host_memory_cap_mib=32_768,
    )
    cell.record(PlacementDecided(job_id="job-1", attempt=1, tasks=(place,)))
    cell.record(failed_exit("job-1"))
    found = cell.predicted()
    assert found.worker.host_memory_mib == 65_536
    assert found.source.endswith("more than the 32768 MiB that this command ran out of")
    assert len(cell.ledger.history) == 0, "a lower bound is no measured peak"


def test_a_gpu_that_was_too_small_asks_for_a_larger_one() -> None:
    """CUDA out of memory on a V100 of 16 GiB: the next attempt goes where there is twice as much, or the most
    that there is."""
    cell = Memory()
    cell.begin("job-1")
    cell.record(failed_exit("job-1", memory="gpu_memory"))
    assert cell.predicted().worker.gpu_memory_mib == 16_384, "no node has more"
    larger = node_spec("node-2", 1)
    gpus = tuple(msgspec.structs.replace(gpu, memory_mib=24_576) for gpu in larger.gpus)
    cell.record(NodeJoined(node=msgspec.structs.replace(larger, gpus=gpus)))
    found = cell.predicted()
    assert (found.worker.gpu_memory_mib, found.worker.host_memory_mib) == (24_576, 2_048)
    assert found.source.endswith("GPU memory: more than the 16384 MiB that this command ran out of")


def test_a_gang_is_raised_no_further_than_it_fits_the_empty_cell() -> None:
    """Four workers on one node of 128 GiB, killed with 24 GiB each: twice that would never start, 32 GiB
    does."""
    cell = Memory()
    gang = other(workers=4)
    cell.ledger.kills.host.add(job_info(gang), 24_576)
    assert cell.predicted(gang).worker.host_memory_mib == NODE_MIB // 4
    cell.ledger.kills.host.add(job_info(gang), NODE_MIB // 4)
    found = cell.predicted(gang)
    assert found.worker.host_memory_mib == NODE_MIB // 4
    assert found.source.endswith("the most that fits, though this command ran out of 32768 MiB")
    with_servers = other(workers=3, parameter_servers=1)
    cell.ledger.kills.host.add(job_info(with_servers), 24_576)
    assert cell.predicted(with_servers).worker.host_memory_mib == NODE_MIB // 4, "beside 1 GiB for its server"


def test_the_promise_never_exceeds_the_largest_node() -> None:
    """It leaks: whatever it is given, it is killed. It must still be placed, or nobody would see why it
    fails."""
    cell = Memory()
    promised = [cell.kill(f"job-{number}") for number in range(10)]
    assert promised[4:] == [65_536, *[NODE_MIB] * 5]
    cell.record(
        NodeJoined(node=msgspec.structs.replace(node_spec("node-2", 4), host_memory_mib=4 * NODE_MIB))
    )
    assert cell.predicted().worker.host_memory_mib == 2 * NODE_MIB
    assert cell.predicted(other(gpu_models=("A100",))).worker.host_memory_mib == 2 * NODE_MIB, (
        "no such node: unbounded"
    )
    cell.record(NodeLost(node_id="node-2"))
    assert cell.predicted().worker.host_memory_mib == NODE_MIB


def test_what_the_user_asks_for_wins_and_is_learned_from() -> None:
    """Bob asks for 6,000 MiB and is killed; asking again he gets them again, asking for nothing he gets the
    double."""
    cell = Memory()
    asks = other(resources=ResourceRequest(host_memory_mib=6_000))
    assert cell.kill("job-1", asks) == 6_000
    assert cell.predicted(asks).worker.host_memory_mib == 6_000
    assert cell.predicted().worker.host_memory_mib == 12_000


def test_a_kill_counts_for_the_same_network_of_the_same_owner_alone() -> None:
    """Ada renames her script and is warned by her own kill; Bob runs the same network and is told what he was
    told before."""
    cell = Memory()
    before = cell.predicted(other(owner="bob"))
    cell.kill("job-1")
    renamed = other(command=("python", "renamed.py"))
    found = cell.predicted(renamed)
    assert found.worker.host_memory_mib == FIRST_WORKER_MIB
    assert found.source.endswith("more than the 2048 MiB that the owner's resnet18 ran out of")
    for far in ({"batch_size": 8 * 64}, {"model": "bert"}, {"model": None}):
        assert cell.predicted(msgspec.structs.replace(renamed, **far)).worker.host_memory_mib == 2_048, far
    assert cell.predicted(other(owner="bob")) == before
    cell.succeed("renamed", 700, renamed)
    assert cell.predicted(renamed).worker.host_memory_mib == 770, (
        "its own run says more than another command's kill"
    )


def test_a_kill_is_stored_as_a_run_that_teaches_nothing_else() -> None:
    """What Postgres keeps of it: who, which command, which promise; not its run time, which is of half a
    run."""
    cell = Memory()
    stored = cell.ledger.finished
    cell.kill("job-1")
    [run] = stored
    assert (run.job_id, run.info, run.rejected) == (
        "job-1",
        job_info(SPEC),
        "out_of_memory: killed with 2048 MiB of host memory",
    )
    assert run.estimate is not None
    assert run.estimate.host_memory_mib == 2_048
    assert run.measured.run_ms != run.measured.run_ms
    assert len(cell.ledger.history) == 0
    cell.ledger.learning = False
    cell.kill("job-2")
    assert len(stored) == 1, "folded again after a restart: it is in Postgres already"


def test_a_parameter_server_that_ran_out_of_memory_gets_more_in_the_next_job() -> None:
    """A large embedding: the guess for servers was too small for it. Its workers' memory is another
    matter."""
    cell = Memory()
    servers = other(parameter_servers=1)
    assert cell.predicted(servers).parameter_server.host_memory_mib == 1_024
    for limit_mib, next_mib in ((0, 1_024), (1_024, 2_048), (2_048, 4_096)):
        cell.submit(job_id := f"job-{limit_mib}", servers)
        cell.record(JobEstimated(job_id=job_id, estimate=cell.predicted(servers)))
        worker = TaskPlacement(task_id=f"{job_id}/1/0", role="worker", rank=0, node_id="node-1", gpus=(0,))
        server = TaskPlacement(
            task_id=f"{job_id}/1/1", role="ps", rank=1, node_id="node-1", host_memory_mib=limit_mib
        )
        cell.record(PlacementDecided(job_id=job_id, attempt=1, tasks=(worker, server)))
        cell.record(killed_exit(job_id, rank=1))
        cell.exit(job_id, usage(), code=143)
        cell.record(JobEnded(job_id=job_id, outcome="failed"))
        found = cell.predicted(servers)
        assert (found.parameter_server.host_memory_mib, found.worker.host_memory_mib) == (next_mib, 2_048)
    assert found.source.endswith(
        "host memory of parameter servers: more than the 2048 MiB that this command ran out of"
    )


def test_a_job_from_a_snapshot_teaches_when_it_is_killed() -> None:
    """The estimator restarts beside a ledger of a year while the job runs."""
    cell = Memory()
    cell.begin("job-1")
    cell.restart()
    cell.record(killed_exit("job-1"))
    assert cell.predicted().worker.host_memory_mib == FIRST_WORKER_MIB
    assert (
        cell.predicted(other(model=None, resources=ResourceRequest(gpus=2))).worker.host_memory_mib == 2_048
    )


def test_memory_is_bounded_and_nobody_pushes_out_another() -> None:
    """Mallory's sweep is killed a thousand times; Ada's one kill is still known. A thousand more owners are
    too many."""
    killed = MemoryKills(FIRST_WORKER_MIB)
    killed.add(job_info(SPEC), 2_048)
    for number in range(1_000):
        killed.add(job_info(other(owner="mallory", command=("sweep", str(number)))), 2_048)
    assert killed.floor(SPEC, job_info(SPEC).key, near=False) is not None
    assert len(list(killed._kills.of_owner("mallory"))) == KILLS_OF_ONE
    for number in range(KILLS):
        killed.add(job_info(other(owner=f"o{number}")), 2_048)
    assert len(killed) == KILLS
    assert killed.floor(SPEC, job_info(SPEC).key, near=False) is None


def test_a_small_promise_is_raised_far_enough_at_once() -> None:
    """Others' runs of the network were tiny: one kill costs less than thirteen doublings from one MiB."""
    killed = MemoryKills(FIRST_WORKER_MIB)
    killed.add(job_info(SPEC), 1)
    least = killed.floor(SPEC, job_info(SPEC).key, near=False)
    assert least is not None
    assert (least.memory_mib, least.promised_mib) == (FIRST_WORKER_MIB, 1)


def test_without_a_promise_a_kill_says_nothing() -> None:
    """The machine itself ran out of memory and killed a job that nobody had bounded."""
    killed = MemoryKills(FIRST_WORKER_MIB)
    killed.add(job_info(SPEC), 0)
    assert (len(killed), killed.floor(SPEC, job_info(SPEC).key, near=True)) == (0, None)


@pytest.mark.parametrize(
    ("tier", "learned_mib", "promised_mib"),
    [
        ("history", NODE_MIB + 1_000, NODE_MIB),
        ("history", 2 * NODE_MIB, 2 * NODE_MIB),
        ("nearest", 2 * NODE_MIB, NODE_MIB),
    ],
)
def test_learned_needs_are_cut_to_the_largest_node(tier: str, learned_mib: int, promised_mib: int) -> None:
    """A job that used nearly all of a node is promised all of it, not 10 % more than there is. One that ran
    on a node that has left keeps what it needs: it ends as unschedulable instead of being killed. What
    others' runs say only guides."""
    cell = Memory()
    guess = Guess(tier, 0.5, "s", 1, 100, learned_mib, 16_384 + 100, 50.0)  # type: ignore[arg-type]
    found = Bounds(cell.ledger.kills, cell.ledger.nodes)(SPEC, b"key", guess)
    assert (found.cores, found.host_memory_mib, found.gpu_memory_mib) == (32, promised_mib, 16_384)


def test_a_placement_that_names_nobody_is_no_kill() -> None:
    """An exit of a task that the fold does not know (its job had ended) changes nothing."""
    cell = Memory()
    cell.record(killed_exit("gone"))
    assert cell.predicted().worker.host_memory_mib == 2_048


def test_a_member_that_was_held_to_its_promise_is_promised_twice_of_it() -> None:
    """It had a whole V100 of 16 GiB by its placement, but companions on it, and 4 GiB was its limit: 8 GiB,
    and not another card, is what it lacks."""
    cell = Memory()
    cell.begin("job-1")
    exited = msgspec.structs.replace(failed_exit("job-1", memory="gpu_memory"), gpu_memory_limit_mib=4_096)
    cell.record(exited)
    found = cell.predicted()
    assert found.worker.gpu_memory_mib == 8_192
    assert found.source.endswith("more than the 4096 MiB that this command ran out of")


def test_a_member_that_kept_to_the_same_promise_proves_nothing() -> None:
    """Two jobs of one command are in a group. One is stopped at its limit; the other had the same one, though
    its placement names a whole GPU, and was lucky."""
    cell = Memory()
    found = cell.predicted()
    found = msgspec.structs.replace(found, worker=msgspec.structs.replace(found.worker, gpu_memory_mib=4_096))
    for job_id in ("lucky", "greedy"):
        cell.submit(job_id)
        cell.record(JobEstimated(job_id=job_id, estimate=found))
        cell.place(job_id)
    exited = msgspec.structs.replace(failed_exit("greedy", memory="gpu_memory"), gpu_memory_limit_mib=4_096)
    cell.record(exited)
    cell.record(JobEnded(job_id="greedy", outcome="failed"))
    cell.exit("lucky", usage(2_000))
    cell.record(JobEnded(job_id="lucky", outcome="succeeded"))
    assert cell.predicted().worker.gpu_memory_mib == 8_192
    cell.succeed("alone", 2_000)
    assert "ran out" not in cell.predicted().source, "a run that had the whole GPU shows what it needs"
