"""A training that saves by the SDK, each of whose iterations is one all-reduce of all ranks: `python saves.py
PLACE`.

Each iteration of rank 0 becomes a line `ATTEMPT DONE` in PLACE/steps, each save one in PLACE/saves. It ends
in the iteration after PLACE/end is there.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

place = Path(sys.argv[1])
state = {"done": 0}


def save(folder: str) -> None:
    Path(folder, "done").write_text(str(state["done"]))
    write("saves")


def restore(folder: str) -> None:
    state["done"] = int(Path(folder, "done").read_text())


def write(name: str) -> None:
    with (place / name).open("a") as file:
        print(os.environ["PENSTOCK_ATTEMPT"], state["done"], file=file)


dist.init_process_group("gloo")
checkpoint(save, restore)
ends = False
while not ends:
    total = torch.tensor([float((place / "end").exists())])
    dist.all_reduce(total)
    ends = total.item() > 0
    state["done"] += 1
    if dist.get_rank() == 0:
        write("steps")
    time.sleep(0.02)  # clock: an iteration; no verdict depends on its length
    progress(state["done"])
