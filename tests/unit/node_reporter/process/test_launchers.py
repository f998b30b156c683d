"""Variables of tasks on which launchers and training frameworks rely: they agree with each other and with
the visible GPUs."""

from itertools import chain
from typing import Any

import pytest

from penstock.ledger.derived.ports import PORTS, ports_of
from penstock.model.decisions.orders import Peer
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock_services.node_reporter.core.environment import task_environment
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.node_reporter.core.test_node_core import start

RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}


def placed(nodes: int, gpus_each: int, /, gpus: int = 1, **spec: Any) -> list[dict[str, str]]:
    """Environments of a job's tasks in a cell of so many nodes; its workers have `gpus` GPUs each."""
    driver = CellDriver()
    driver.join(*(node_spec(f"n{number}", gpus_each) for number in range(nodes)))
    driver.submit("job", job_spec(**spec), estimate(gpus))
    return driver.environments("job")


def visible(env: dict[str, str]) -> list[str]:
    return [gpu for gpu in env["CUDA_VISIBLE_DEVICES"].split(",") if gpu]


@pytest.mark.parametrize(
    ("nodes", "gpus_each", "workers", "gpus"),
    [(1, 4, 4, 1), (2, 2, 4, 1), (2, 1, 2, 1), (2, 4, 2, 4), (3, 0, 3, 0), (1, 8, 2, 2)],
)
def test_ranks_of_a_gang_agree(nodes: int, gpus_each: int, workers: int, gpus: int) -> None:
    """Every DDP script has the line `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, and a worker
    sees its own GPUs alone. Lightning counts ranks as NODE_RANK times the processes of a node and
    LOCAL_RANK. Each worker is such a node. Where it has several GPUs its framework starts the processes:
    LOCAL_RANK would mean that somebody else had."""
    found = placed(nodes, gpus_each, gpus, workers=workers)
    assert len(found) == workers
    for rank, env in enumerate(found):
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), str(workers))
        assert env["NODE_RANK"] == env["GROUP_RANK"] == str(rank)
        assert len(visible(env)) == gpus
        assert ("LOCAL_RANK" in env) == ("LOCAL_WORLD_SIZE" in env) == (gpus <= 1)
        if gpus <= 1:
            local, each = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
            assert rank == int(env["NODE_RANK"]) * each + local
            assert local < max(1, gpus)
        assert env["PET_NNODES"] == str(workers)
        assert env["PET_NODE_RANK"] == str(rank)
        assert env["PET_NPROC_PER_NODE"] == str(max(1, gpus))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        assert len({env[name] for env in found} | {env[f"PET_{name}"] for env in found}) == 1


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_a_job_of_one_task_has_no_ranks(gpus: int) -> None:
    """With RANK and LOCAL_RANK of one worker Lightning waits for processes that nobody starts, and
    Transformers uses one of four GPUs. Without them frameworks do what they do on a workstation; torchrun
    starts a process for each GPU, at a port of the job's own."""
    [env] = placed(1, 4, gpus)
    assert not RANKS & env.keys()
    assert PORTS.start <= int(env["MASTER_PORT"]) < PORTS.stop
    torchrun = {name.removeprefix("PET_"): text for name, text in env.items() if name.startswith("PET_")}
    assert torchrun == {
        "NNODES": "1",
        "NODE_RANK": "0",
        "NPROC_PER_NODE": str(max(1, gpus)),
        "MASTER_ADDR": env["MASTER_ADDR"],
        "MASTER_PORT": env["MASTER_PORT"],
    }


def test_a_job_that_may_have_more_workers_has_ranks_with_one() -> None:
    """A moldable job gets one worker today and four tomorrow: its script finds the same variables."""
    [env] = placed(1, 1, workers=4, min_workers=1, global_batch_size=64)
    assert {name: env[name] for name in sorted(RANKS)} == {
        "GROUP_RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }


def test_servers_are_members_of_the_gang_and_of_no_process_group() -> None:
    """Two workers and a parameter server: WORLD_SIZE counts workers, the server's rank follows theirs, and
    no launcher starts processes for it."""
    *workers, server = placed(1, 4, workers=2, ps=1)
    assert [env["RANK"] for env in (*workers, server)] == ["0", "1", "2"]
    assert {env["WORLD_SIZE"] for env in (*workers, server)} == {"2"}
    assert [env["NODE_RANK"] for env in workers] == ["0", "1"]
    assert RANKS & server.keys() == {"RANK", "WORLD_SIZE"}
    assert not any(name.startswith("PET_") for name in server)


def test_what_a_job_sets_for_torchrun_wins_and_its_ranks_do_not() -> None:
    """A job of two GPUs wants one process; another pretends to be rank 0."""
    [env] = placed(1, 2, 2, env={"PET_NPROC_PER_NODE": "1"})
    assert env["PET_NPROC_PER_NODE"] == "1"
    found = placed(1, 2, workers=2, env={"RANK": "0", "MASTER_PORT": "1"})
    assert [env["RANK"] for env in found] == ["0", "1"]
    assert found[0]["MASTER_PORT"] != "1"


def test_torchrun_finds_a_node_by_its_ipv6_address() -> None:
    """In an endpoint such an address stands in brackets; in MASTER_ADDR it does not."""
    node = NodeSpec(node_id="n1", boot_id="b", cores=2, host_memory_mib=1, address="fd00::1")
    order = start(5, (), gpu_uuids=(), peers=(Peer(rank=1, role="worker", node_id="n2", address="fd00::2"),))
    env = task_environment(order, node, {}, {}, virtual=False)
    assert (env["MASTER_ADDR"], env["PET_MASTER_ADDR"]) == ("fd00::1", "[fd00::1]")


def test_gpus_have_numbers_where_the_task_can_open_no_others() -> None:
    """The GPUs 1 and 3 of a node, in the order of their slots. With a device cgroup CUDA shows two GPUs,
    in the order of the bus; without one it shows four, and a UUID is safe when one of them disappears.
    With MPS the daemon numbers them."""
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{i}", model="V100", memory_mib=10) for i in range(4))
    node = NodeSpec(node_id="n1", boot_id="b", cores=4, host_memory_mib=100, gpus=gpus)
    order = start(5, (0, 1), gpu_uuids=("GPU-3", "GPU-1"))
    shown = task_environment(order, node, {}, {}, virtual=False, apart=True)
    assert (shown["CUDA_VISIBLE_DEVICES"], shown["CUDA_DEVICE_ORDER"]) == ("1,0", "PCI_BUS_ID")
    for how in ({}, {"apart": True, "mps": True}):
        found = task_environment(order, node, {}, {}, virtual=False, **how)
        assert found["CUDA_VISIBLE_DEVICES"] == "GPU-3,GPU-1"
        assert "CUDA_DEVICE_ORDER" not in found
    assert task_environment(order, node, {}, {}, virtual=True)["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_jobs_that_start_together_meet_at_different_ports() -> None:
    """Eight jobs wait; a node of eight GPUs joins, and one record places all of them. Each listens at a
    port of its own."""
    driver = CellDriver()
    names = [f"j{number}" for number in range(8)]
    for name in names:
        driver.submit(name)
    driver.join(node_spec("n1", 8))
    found = [env["MASTER_PORT"] for name in names for env in driver.environments(name)]
    assert len(set(found)) == 8


def test_a_port_that_a_long_job_on_the_node_holds_is_not_given_again() -> None:
    """A job trains for weeks, while ten thousand short ones come and go on its node."""
    driver = CellDriver()
    driver.join(node_spec("n1", 2))
    driver.submit("long")
    driver.start("long")
    driver.submit("short")
    held = driver.job("long").port
    driver.exit("short.1.w0")
    driver.state.next_port = driver.follower.state.next_port = held
    driver.submit("late")
    assert driver.job("late").port == held + 1


def test_servers_listen_side_by_side_and_at_the_end_of_the_range() -> None:
    """Three parameter servers on one node take a port each, in a row, the last of which is a legal one."""
    driver = CellDriver()
    driver.join(node_spec("n1", 8), node_spec("n2", 8))
    driver.state.next_port = driver.follower.state.next_port = PORTS.stop - 2
    for name in ("a", "b", "c"):
        driver.submit(name, job_spec(workers=1, ps=3))
    rows = [ports_of(driver.job(name)) for name in ("a", "b", "c")]
    assert all(row.start in PORTS and row[-1] in PORTS and len(row) == 3 for row in rows)
    assert len(set(chain(*rows))) == 9
