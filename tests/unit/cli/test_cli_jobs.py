"""`penstock get jobs`: the table of jobs, with the GPUs and cores that each has now."""

from rich.console import Console

from penstock.cli.queries.tables import jobs_table
from penstock.ledger.views import job_row
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.proposals import CoresProposed
from penstock.scheduling.acting.guard import PROPOSER
from tests.support.cluster.driver import CellDriver, estimate, node_spec

WIDTH = 100


def printed(cell: CellDriver) -> list[str]:
    """The lines of the table on a terminal of 100 columns."""
    console = Console(width=WIDTH)
    with console.capture() as shown:
        console.print(
            jobs_table([job_row(job, cell.state.seq) for job in cell.state.jobs.values()], cell.now_ms)
        )
    return shown.get().splitlines()


def has(cell: CellDriver, job_id: str) -> list[str]:
    """GPUs and cores in a job's line."""
    head, *lines = printed(cell)
    line = next(line for line in lines if line.startswith(job_id))
    names, cells = head.split(), line.split()
    return [cells[names.index(name)] for name in ("GPUS", "CORES")]


def test_a_job_without_gpus_shows_the_cores_that_it_has() -> None:
    """A person looks who has the node's cores: preprocessing of eight, a training of four with its GPU, and a
    job that waits has none of either."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1, cores=14))
    for job_id, gpus, cores in (("prepare", 0, 8), ("train", 1, 4), ("waits", 0, 12)):
        cell.submit(job_id, need=estimate(gpus, cores=cores))
    cell.start("prepare")
    cell.start("train")
    assert (has(cell, "prepare"), has(cell, "train"), has(cell, "waits")) == (
        ["0", "8"],
        ["1", "4"],
        ["0", "0"],
    )
    assert all(len(line) <= WIDTH and "…" not in line for line in printed(cell)), "no cell is cut"


def test_cores_follow_what_the_contention_guard_changes() -> None:
    """A job that slows a training has half of its cores from now on; a training whose search tries fewer
    shows those that it may use meanwhile."""
    cell = CellDriver(PlacerSettings(contention=Contention()))
    cell.join(node_spec("n1", gpus=1, cores=14))
    for job_id, gpus, cores in (("prepare", 0, 8), ("train", 1, 4)):
        cell.submit(job_id, need=estimate(gpus, cores=cores))
        cell.start(job_id)
    about = {"proposer": PROPOSER, "reason": "a test"}
    cell.feed(CoresProposed(proposal_id="p1", task_id="prepare.1.w0", cores=4, cause="contention", **about))
    cell.feed(CoresProposed(proposal_id="p2", task_id="train.1.w0", cores=3, cause="probe", **about))
    assert (has(cell, "prepare"), has(cell, "train")) == (["0", "4"], ["1", "3"])
