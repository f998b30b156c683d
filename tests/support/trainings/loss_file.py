"""A file of (attempt, iteration, loss) lines that a made-up training writes, and whether its loss goes on as
if nobody had stopped it."""

from pathlib import Path

RATE = 0.01  # of gradient descent
TRAIN = """
import json, os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

losses, end = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if os.environ.get("RANK", "0") != "0":
    losses = pathlib.Path(os.devnull)
gains = sys.argv[3:] == ["gains"]
state = {"done": 0, "weight": 1.0}

def save(path):
    pathlib.Path(path, "state.json").write_text(json.dumps(state))

def restore(path):
    state.update(json.loads(pathlib.Path(path, "state.json").read_text()))

checkpoint(save, restore)
while not end.exists():
    state["weight"] -= 0.01 * state["weight"]
    state["done"] += 1
    with losses.open("a") as file:
        print(os.environ["PENSTOCK_ATTEMPT"], state["done"], state["weight"] ** 2, file=file)
    time.sleep(0.02)
    progress(state["done"], loss=-(1.02 ** min(state["done"], 11_000)) if gains else state["weight"] ** 2)
"""
"""Writes its losses, those of rank 0, into the file of its first argument until the second one is there. It
reports that its loss falls by less and less; with the third one, `gains`, that it falls by 2 % of all that it
fell before in each iteration: no window with an iteration in it shows less gain than that, however slow the
machine is."""


def rows(path: Path) -> list[tuple[int, int, float]]:
    """(attempt, iteration, loss) so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(attempt), int(done), float(loss)) for attempt, done, loss in map(str.split, lines)]


def check_losses(path: Path) -> None:
    """Fails where an iteration or its loss is not that of a run that was never stopped."""
    found, weight = rows(path), 1.0
    assert [done for _, done, _ in found] == list(range(1, len(found) + 1)), (
        "no iteration was lost or came twice"
    )
    for _, _, loss in found:
        weight -= RATE * weight
        assert loss == weight**2
