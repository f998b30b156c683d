"""Data-parallel training in PyTorch that resumes from its checkpoint after any number of stops, on any node.

Penstock sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every worker, which is all that
`init_process_group` needs: no torchrun. With GPUs it uses NCCL, without them Gloo on CPUs. Alone it runs as a
gang of one:

    python tilt/jobs/pytorch_ddp.py --checkpoints /tmp/checkpoints

Each job has a checkpoint of its own. Its folder must be one that all nodes share, since the next attempt may
run elsewhere.
"""

import argparse
import hashlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.sdk.out_of_memory import report_out_of_memory
from penstock.sdk.phases import phase
from penstock.sdk.progress import progress

FEATURES, CLASSES = 64, 10
STOPPED = 128 + signal.SIGTERM  # a shell's exit code for a program that SIGTERM ended
PEERS_TIMEOUT = timedelta(
    seconds=60
)  # the last worker may start later; a peer that is silent for so long is gone


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoints", type=Path, required=True, help="A folder.")
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--save-every", type=int, default=200, help="Iterations.")
    parser.add_argument("--batch-size", type=int, default=256, help="Per worker.")
    return parser.parse_args()


def meet() -> torch.device:
    """Joins the gang."""
    for name, alone in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ):
        os.environ.setdefault(name, alone)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Penstock shows each worker its own GPUs only
        dist.init_process_group("nccl", timeout=PEERS_TIMEOUT)
        return torch.device("cuda", 0)
    dist.init_process_group("gloo", timeout=PEERS_TIMEOUT)
    return torch.device("cpu")


def save(path: Path, state: dict[str, Any]) -> None:
    """The file is written atomically: a kill at any time leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(path)


def batch(done: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Each iteration and rank has its own samples, the same ones in every attempt. Class: the largest of the
    first features."""
    random = torch.Generator().manual_seed(done * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(size, FEATURES, generator=random)
    return inputs.to(device), inputs[:, :CLASSES].argmax(1).to(device)


def main() -> None:
    report_out_of_memory()  # an out-of-memory error raises the next attempt's memory
    phase("launch")
    asked, device = arguments(), meet()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = asked.checkpoints / f"{os.environ.get('PENSTOCK_JOB_ID', 'alone')}.pt"
    done = 0
    if checkpoint.exists():
        found = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        done = found["done"]
    first = dist.get_rank() == 0
    if first:
        print(f"begin at iteration {done} with {dist.get_world_size()} workers on {device.type}", flush=True)
    parallel = DistributedDataParallel(model)

    asked_to_stop = torch.zeros(1, device=device)
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.fill_(1))
    phase("train")
    while done < asked.iterations:
        inputs, classes = batch(done, asked.batch_size, device)
        loss = nn.functional.cross_entropy(parallel(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += 1
        progress(done, asked.iterations, loss=loss)
        stops = asked_to_stop.clone()
        dist.all_reduce(stops, dist.ReduceOp.MAX)  # all leave after the same iteration
        if first and (stops or done % asked.save_every == 0 or done == asked.iterations):
            save(checkpoint, {"done": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
        if stops and done < asked.iterations:
            if first:
                print(f"stopped after iteration {done}", flush=True)
            sys.exit(STOPPED)

    if first:
        weights = torch.cat([part.detach().flatten().cpu() for part in model.parameters()])
        digest = hashlib.sha256(str(weights.tolist()).encode()).hexdigest()[:16]
        print(f"done: {done} iterations, weights {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
