# clocks: the time-out of a process group frees the run of processes that wait for one that nobody starts
"""A training of one all-reduce, as users of each framework write it: `python work.py FRAMEWORK OUT DEVICES
NODES`. Each process leaves what it found as a file in OUT.

`python work.py` alone forks members of gangs, of which stdin has one JSON array a line, so that frameworks
are imported once: `[[environment, arguments, output], …]`. It answers each line with the members' exit codes.
"""

import json
import os
import signal
import sys
import time
import traceback
import uuid
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def tell(out: str, framework: str, device: int) -> None:
    """Sums the ranks over all processes, and leaves what this one found."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    found = {
        "framework": framework,
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "sum": total.item(),
        "device": device,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "port": os.environ["MASTER_PORT"],
        "job": os.environ["PENSTOCK_JOB_ID"],
        "leads": leads(),
    }
    written = Path(out, f"{uuid.uuid4()}.new")
    written.write_text(json.dumps(found))
    written.rename(written.with_suffix(".json"))
    while len(list(Path(out).glob("*.json"))) < int(os.environ.get("TOGETHER", "0")):
        time.sleep(0.05)
    dist.barrier()


def leads() -> bool:
    from penstock.sdk.reporter import lines

    return lines.leads()


MEET = timedelta(seconds=120)


def ddp(out: str, devices: int, nodes: int) -> None:
    """A process that somebody started for each GPU."""
    dist.init_process_group("gloo", timeout=MEET)
    tell(out, "ddp", int(os.environ["LOCAL_RANK"]))


def spawned(out: str, devices: int, nodes: int) -> None:
    """One process, which starts another for each GPU by itself."""
    torch.multiprocessing.start_processes(_spawned, (out, devices), devices, start_method="fork")


def _spawned(rank: int, out: str, devices: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=devices, timeout=MEET)
    tell(out, "spawned", rank)


def lightning(out: str, devices: int, nodes: int) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import DDPStrategy

    class Model(BoringModel):  # type: ignore[misc]
        def on_train_start(self) -> None:
            tell(out, "lightning", self.trainer.local_rank)

    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=DDPStrategy(timeout=MEET),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    assert (trainer.global_rank, trainer.world_size) == (dist.get_rank(), devices * nodes)


def accelerate(out: str, devices: int, nodes: int) -> None:
    from accelerate import Accelerator

    state = Accelerator(cpu=True)
    assert (state.process_index, state.num_processes) == (dist.get_rank(), dist.get_world_size())
    tell(out, "accelerate", state.local_process_index)


def transformers(out: str, devices: int, nodes: int) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": ((x * self.weight - x) ** 2).mean()}

    asked = TrainingArguments(
        out, use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
    )
    rows = [{"x": torch.ones(1)} for _ in range(8)]
    Trainer(Model(), asked, train_dataset=rows).train()
    assert (asked.process_index, asked.world_size) == (dist.get_rank(), dist.get_world_size())
    tell(out, "transformers", asked.local_process_index)


def deepspeed(out: str, devices: int, nodes: int) -> None:
    from deepspeed import init_distributed, initialize

    init_distributed("gloo", timeout=MEET)
    model = torch.nn.Linear(1, 1)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = initialize(
        model=model, optimizer=rule, config={"train_micro_batch_size_per_gpu": 1, "steps_per_print": 9}
    )
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    assert (engine.global_rank, engine.world_size) == (dist.get_rank(), dist.get_world_size())
    tell(out, "deepspeed", engine.local_rank)


FRAMEWORKS = {each.__name__: each for each in (ddp, spawned, lightning, accelerate, transformers, deepspeed)}


def member(env: dict[str, str], argv: list[str], output: str) -> int:
    """Forks a member of a gang, which runs this script, or `torchrun` with it. Returns its process id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv
        run(argv)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def run(argv: list[str]) -> None:
    program, *arguments = argv
    if program == "torchrun":
        from torch.distributed.run import main

        main(arguments)
    elif program == "accelerate":
        from accelerate.commands.accelerate_cli import main

        sys.argv = argv
        main()
    elif program == "deepspeed":
        from deepspeed.launcher.runner import main

        main(arguments)
    else:
        framework, out, devices, nodes = arguments
        FRAMEWORKS[framework](out, int(devices), int(nodes))


def serve() -> None:
    import accelerate.commands.launch  # noqa: F401
    import lightning.pytorch.demos.boring_classes  # noqa: F401
    import torch.distributed.run  # noqa: F401
    import transformers.trainer  # noqa: F401

    with redirect_stdout(sys.stderr):  # to which it writes while it is imported
        import deepspeed.launcher.runner  # noqa: F401

    for line in sys.stdin:
        pids = [member(*one) for one in json.loads(line)]
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:  # the others would wait for this one
                for other in set(pids) - codes.keys():
                    os.killpg(other, signal.SIGKILL)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv)
    else:
        serve()
