"""Stories of the peers of a large gang, which its tasks find in one file."""

import sys

from penstock.model.decisions.orders import Peer, pack_peers
from penstock.model.inputs import external_events
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.linux import LinuxHost
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    Cell,
    start_order,
)

options, broker = node_fixtures.options, node_fixtures.broker
cell, node = node_fixtures.cell, node_fixtures.node
in_background = node_fixtures.in_background
nothing_left = node_fixtures.nothing_left


async def test_a_large_gangs_peers_are_one_file(node: Options, cell: Cell) -> None:
    """512 members with long names, 190 KiB of peers: more than the kernel takes in one variable. Two of them
    run here; one order has the peers. A third comes without the order that has its own, a fourth with damaged
    ones."""
    peers = tuple(
        Peer(rank=rank, role="worker", node_id=f"node-{rank}-{'x' * 100}", address=f"10.{'y' * 200}")
        for rank in range(512)
    )
    program = (
        "import json, os; peers = json.load(open(os.environ['PENSTOCK_PEERS_FILE'])); assert [peer['rank'] "
        "for peer in peers] == list(range(512)); assert 'PENSTOCK_PEERS' not in os.environ; assert "
        "os.environ['WORLD_SIZE'] == '512'; print(os.stat(os.environ['PENSTOCK_PEERS_FILE']).st_ino)"
    )
    first, second = (
        start_order(
            1,
            sys.executable,
            "-c",
            program,
            gpus=(rank,),
            task_id=f"job-1.1.{rank}",
            job_id="job-1",
            peers=(),
            peers_of="job-1.1.0",
            packed_peers=None if rank else pack_peers(peers),
        )
        for rank in (0, 1)
    )
    await cell.order(first, second)
    for task_id in ("job-1.1.0", "job-1.1.1"):
        exited = await cell.until(external_events.TaskExited, task_id=task_id)
        log = log_path(node.log_dir, "job-1", task_id)
        assert (exited.cause, exited.exit_code) == ("exited", 0), (exited, log.exists() and log.read_text())
    inodes = {log_path(node.log_dir, "job-1", f"job-1.1.{rank}").read_text() for rank in (0, 1)}
    assert len(inodes) == 1, "it is written once"
    await cell.order(start_order(2, task_id="job-2.1.1", peers=(), peers_of="job-2.1.0"))
    refused = await cell.until(external_events.OrderRefused)
    assert (refused.task_id, refused.reason) == ("job-2.1.1", "unknown_task")
    assert "job-2.1.0" in refused.detail
    await cell.order(
        start_order(3, task_id="job-3.1.1", peers=(), peers_of="job-3.1.1", packed_peers="eJyLjgUAARUAuQ")
    )
    refused = await cell.until(external_events.OrderRefused, task_id="job-3.1.1")
    assert "packed_peers cannot be read" in refused.detail
    host = LinuxHost(node)
    gangs = node.state_dir / "gangs"
    for rank, left in ((0, 1), (1, 0)):
        host.forget((f"job-1.1.{rank}", 1))
        assert len(list(gangs.iterdir())) == left
