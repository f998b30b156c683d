"""Stories of valid records with absurd contents: they must not stop the projector, for they never go away."""

import orjson
import pytest

from penstock.ledger.replica.replica import Replica
from penstock.model.inputs.external_events import TaskStarted
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import LARGEST, _json, _saturate
from tests.support.cluster.driver import CellDriver, node_spec

BIGINT = 1 << 63


@pytest.mark.parametrize("pid", [4_711, BIGINT - 1, BIGINT, 1 << 64, 10**30])
def test_an_absurd_pid_reaches_no_table(pid: int) -> None:
    """A foreign node-reporter sends a pid that no column can hold; the schema of the event allows it."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j1")
    token = cell.job("j1").token
    started = TaskStarted(node_id="n1", task_id="j1.1.w0", token=token, pid=pid, started_ms=1)
    assert cell.feed(started).outcome == "committed"
    projection = Projection(Replica())
    for offset, value in enumerate(cell.values):
        projection.take(value, offset)
    [task] = orjson.loads(_json(projection.drain()["tasks"]))
    assert task["pid"] == (pid if pid == 4_711 else None)


def test_a_number_that_its_column_cannot_hold_becomes_the_nearest() -> None:
    """A node reports that a process has used 2^70 ms, and slots beyond all machines."""
    bounds = {"cpu_ms": LARGEST["bigint"], "pid": LARGEST["integer"], "gpus": LARGEST["smallint[]"]}
    row = {"cpu_ms": 1 << 70, "pid": -(1 << 40), "gpus": [3, 1 << 20], "other": 1 << 70}
    rows = [row, {"cpu_ms": None, "pid": 7, "gpus": [1]}]
    _saturate(rows, bounds)
    assert rows == [
        {"cpu_ms": (1 << 63) - 1, "pid": -((1 << 31) - 1), "gpus": [3, (1 << 15) - 1], "other": 1 << 70},
        {"cpu_ms": None, "pid": 7, "gpus": [1]},
    ]
