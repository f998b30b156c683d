"""An operator moves a running job on a live cell: it is stopped, and goes on where a place was kept for
it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Installation, installed, listed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture
def two(place: Path) -> Iterator[Installation]:
    """Two nodes with one GPU each."""
    with installed(place, "--nodes", "2", "--virtual-gpus", "1") as running:
        yield running


def test_a_running_job_goes_on_at_its_target(two: Installation) -> None:
    """Others queue for the GPU to which it moves; they get the one that it leaves. What cannot be is refused
    with the reason."""
    ready, gate = two.home / "ready", two.home / "gate"
    waits = (
        f"trap 'until test -e {gate}; do sleep 0.05; done; exit 3' TERM; touch {ready}; while :; do "
        "sleep 0.05; done"
    )
    flags = ("--name", "mover", "--gpus", "1", "--grace", "10m")
    assert two.run("submit", "-d", *flags, "--", "sh", "-c", waits).returncode == 0
    two.until("mover", "running")
    wait_until(ready.exists, "the mover's trap")
    two.gateway.until_nodes(2)
    [here] = listed(two, "describe", "job", "mover")["nodes"]
    there = "node-1" if here == "node-0" else "node-0"
    for to, words in (
        (here, "runs on these nodes already"),
        ("node-9", "no such node"),
        (f"{there},{there}", "2 nodes"),
    ):
        refused = two.run("move", "mover", "--to", to)
        assert (refused.returncode, words in refused.stderr) == (1, True), refused.stderr
    moved = listed(two, "move", "mover", "--to", there, "--reason", "its fans are loud")
    assert moved["nodes"] == [there]
    two.until("mover", "stopping")
    assert two.run("submit", "-d", "--name", "next", "--gpus", "1", "--", *ENDLESS).returncode == 0
    two.until("next", "queued")
    gate.touch()
    wait_until(lambda: listed(two, "describe", "job", "mover")["attempt"] == 2, "the mover's second attempt")
    two.until("next", "running")
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
    assert [found["nodes"] for found in placement["candidates"]] == [[there]]
    assert placement["reason"] == "its fans are loud"
    assert move["moved"] == placement["moved"]
    assert 0 < move["moved"]["stop_ms"]
    assert move["target"]["moved"]["seq"] == move["moved"]["seq"]

    def kinds_so_far() -> list[str]:
        return [event["type"] for event in listed(two, "events", "mover")["events"]]

    wait_until(
        lambda: kinds_so_far().count("penstock.placement.decided") == 2, "the second placement in the tables"
    )
    kinds = kinds_so_far()
    last = kinds.index("penstock.task.exited")
    assert kinds[last : last + 3] == [
        "penstock.task.exited",
        "penstock.job.requeued",
        "penstock.placement.decided",
    ]
