"""Stories of gangs with parameter servers that no node holds, under `penstock` beside Liquid's best fit."""

import msgspec
import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import ResourceVector
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def cell(profile: str, *gpus: int) -> CellDriver:
    found = CellDriver(PlacerSettings(profile=profile))
    found.join(*(node_spec(f"n{number}", gpus=count) for number, count in enumerate(gpus)))
    return found


def submit(found: CellDriver, name: str, workers: int, server_gpus: int) -> tuple[str, list[str]]:
    """The server's node, and the workers'."""
    need = msgspec.structs.replace(
        estimate(1),
        parameter_server=ResourceVector(gpus=server_gpus, cores=1, host_memory_mib=1_024, gpu_memory_mib=0),
    )
    found.submit(name, job_spec(workers=workers, ps=1), need)
    tasks = found.job(name).tasks.values()
    (server,) = (task.place.node_id for task in tasks if task.place.role != "worker")
    return server, sorted(task.place.node_id for task in tasks if task.place.role == "worker")


@pytest.mark.parametrize(("profile", "workers_apart"), [("penstock", 1), ("liquid", 2)])
def test_a_server_is_beside_as_many_workers_as_fit(profile: str, workers_apart: int) -> None:
    """One GPU is left on n0 and two on n1: Liquid puts the server on the fuller one, and both workers are
    across the network from it."""
    found = cell(profile, 2, 2)
    found.submit("old", job_spec(workers=1), estimate(1))
    server, workers = submit(found, "j", 2, 1)
    assert sum(node != server for node in workers) == workers_apart


@pytest.mark.parametrize(("profile", "homes"), [("penstock", 3), ("liquid", 1)])
def test_servers_without_gpus_do_not_all_share_one_link(profile: str, homes: int) -> None:
    """Three jobs of four workers on nodes of three GPUs, of which one is full: Liquid puts all servers
    there."""
    found = cell(profile, *(3,) * 7)
    found.submit("old", job_spec(workers=3), estimate(1))
    assert len({submit(found, f"j{number}", 4, 0)[0] for number in range(3)}) == homes


def test_cores_that_free_gpus_will_want_are_those_of_each_node() -> None:
    """Both nodes have four free GPUs, n0 with 4 cores each and n1 with 16. A job of 20 cores is on n1, which
    lacks 20 for its GPUs now, and n0 lacks none: the next one goes there."""
    found = CellDriver(PlacerSettings(profile="penstock"))
    found.join(node_spec("n0", cores=16), node_spec("n1", cores=64))
    for name, cores, node in (("large", 20, "n1"), ("small", 2, "n0")):
        found.submit(name, job_spec(), estimate(0, cores=cores, gpu_memory_mib=0))
        [task] = found.job(name).tasks.values()
        assert task.place.node_id == node
