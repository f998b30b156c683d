"""An operator moves a running job on a live cell: it is stopped, and goes on where a place was kept for it."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Installation, eventually, installed, listed

pytestmark = pytest.mark.postgres


@pytest.fixture
def two() -> Iterator[Installation]:
    """Two nodes with one GPU each."""
    with installed("--nodes", "2", "--virtual-gpus", "1") as running:
        yield running


def test_a_running_job_goes_on_at_its_target(two: Installation) -> None:
    """Others queue for the GPU to which it moves; they get the one that it leaves. What cannot be is refused with the reason."""
    waits = "trap 'sleep 1; exit 3' TERM; while :; do sleep 0.1; done"
    assert two.run("submit", "-d", "--name", "mover", "--gpus", "1", "--", "sh", "-c", waits).returncode == 0
    eventually(lambda: listed(two, "describe", "job", "mover")["status"] == "running", "it does not run")
    eventually(lambda: len(listed(two, "get", "nodes")["nodes"]) == 2, "no second node")  # type: ignore[arg-type]
    [here] = listed(two, "describe", "job", "mover")["nodes"]  # type: ignore[misc]
    there = "node-1" if here == "node-0" else "node-0"
    for to, words in (
        (here, "runs on these nodes already"),
        ("node-9", "no such node"),
        (f"{there},{there}", "2 nodes"),
    ):
        refused = two.run("move", "mover", "--to", to)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
    moved = listed(two, "move", "mover", "--to", there, "--reason", "its fans are loud")
    assert (moved["decided"], moved["nodes"]) == (True, [there])
    assert two.run("submit", "-d", "--name", "next", "--gpus", "1", "--", "sleep", "60").returncode == 0
    eventually(lambda: listed(two, "describe", "job", "mover")["attempt"] == 2, "it is not there")
    eventually(
        lambda: listed(two, "describe", "job", "next")["status"] == "running", "nobody has its old place"
    )
    mover, other = (listed(two, "describe", "job", name) for name in ("mover", "next"))
    assert (mover["nodes"], other["nodes"]) == ([there], [here])
    assert mover["infrastructure_retries"] == 1
    why = " ".join(two.run("why", "mover").stdout.split())
    assert f"Move: to {there}, asked for by ana/" in why
    assert "its fans are loud; attempt 2 is there" in why
    assert f"moved from {here}; its stop took " in why
    assert "of work" in why
    described = " ".join(two.run("describe", "job", "mover").stdout.split())
    assert "its fans are loud" in described
    assert f"moved from {here}; its stop took " in described
    answer = listed(two, "why", "mover")
    placement, move = answer["placement"], answer["move"]
    assert [found["nodes"] for found in placement["candidates"]] == [[there]]  # type: ignore[index]
    assert placement["reason"] == "its fans are loud"  # type: ignore[index]
    assert move["moved"] == placement["moved"]  # type: ignore[index]
    assert 0 < move["moved"]["stop_ms"] < 30_000  # type: ignore[index]
    assert move["target"]["moved"]["seq"] == move["moved"]["seq"]  # type: ignore[index]
    kinds = [event["type"] for event in json.loads(two.run("events", "mover", "-o", "json").stdout)["events"]]
    last = kinds.index("penstock.task.exited")
    assert kinds[last : last + 3] == [
        "penstock.task.exited", "penstock.job.requeued", "penstock.placement.decided",
    ]  # fmt: skip
