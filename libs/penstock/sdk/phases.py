"""Phase reports of a training script: `phase("launch")` while it loads, `phase("train")`, `phase("save")`.

Outside of Penstock, and without a reader, it does nothing. Source of the phases: Liquid §3 eq. 1.
"""

from typing import Literal

from penstock.sdk.gate import pass_gate
from penstock.sdk.gpu_memory import keep_promise
from penstock.sdk.reporter.lines import write_line


def phase(name: Literal["launch", "train", "save"]) -> None:
    """Reports that this phase begins now. Costs one small write; never fails, and never blocks, with one
    exception:

    in a job with `prelaunch: true`, `phase("train")` first waits until the job holds its GPUs alone
    (`penstock.sdk.gate`). Call `phase("save")` once the script needs its GPUs no more: the next job may be
    started then.
    """
    keep_promise()
    if name == "train":
        pass_gate()
    write_line(name)
