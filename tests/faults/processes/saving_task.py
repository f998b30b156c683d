"""A task that trains, saves with the SDK and judges by itself where it runs (`judge_task`).

Run as `python saving_task.py FOLDER`. Its training is a sum that no iteration may be missing from or be in
twice. Each iteration and each save is a line of `FOLDER/JOB.steps`: attempt, `step` or `save`, iteration. It
ends when `FOLDER/end` is there.
"""

import json
import os
import sys
import time

from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
from tests.faults.processes import judge_task

STEP_S = 0.005
SAVE_S = 0.06  # long enough for kills in the middle


def main() -> None:
    folder = sys.argv[1]
    write = judge_task.begin(folder)
    path = os.path.join(folder, f"{os.environ['PENSTOCK_JOB_ID']}.steps")
    steps = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    state = {"done": 0, "sum": 0}

    def note(kind: str) -> None:
        os.write(steps, f"{os.environ['PENSTOCK_ATTEMPT']} {kind} {state['done']}\n".encode())

    def save(into: str) -> None:
        for name in ("first", "second"):
            with open(os.path.join(into, name), "w") as file:
                json.dump(state, file)
            time.sleep(SAVE_S / 2)  # clock: this is its work
        note("save")

    def restore(found: str) -> None:
        texts = []
        for name in ("first", "second"):
            with open(os.path.join(found, name)) as file:
                texts.append(file.read())
        assert texts[0] == texts[1], "half a checkpoint"
        state.update(json.loads(texts[0]))

    checkpoint(save, restore)
    note("from")
    while not os.path.exists(os.path.join(folder, "end")):
        state["done"] += 1
        state["sum"] += state["done"]
        assert state["sum"] == state["done"] * (state["done"] + 1) // 2, "lost, or done twice"
        note("step")
        time.sleep(STEP_S)  # clock: this is its work
        progress(state["done"])
    write("done", code=0)


if __name__ == "__main__":
    main()
