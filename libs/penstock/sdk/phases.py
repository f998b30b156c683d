"""Phase reports of a training script: `phase("launch")` while it loads, `phase("train")`, `phase("save")`.

Outside of Penstock, and without a reader, it does nothing. Source of the phases: Liquid §3 eq. 1.
"""

from typing import Literal

from penstock.sdk.lines import write_line


def phase(name: Literal["launch", "train", "save"]) -> None:
    """Reports that this phase begins now. Costs one small write; never blocks and never fails."""
    write_line(name)
