"""GPU memory limit of a task that shares a GPU, enforced by the framework: `keep_promise()` after the import of torch.

An allocation beyond the promised memory then fails in the script that makes it, as on a smaller GPU, and not in another job's. PyTorch alone needs
the call: JAX and TensorFlow read variables that Penstock sets. Source: Liquid §6.2, where each job's memory is limited by a parameter of its framework.
"""

import os
import sys
from typing import Any

BYTES_PER_MIB = 1 << 20


def promised_mib() -> int | None:
    """GPU memory promised to the task in MiB; None: it shares no GPU, has no promised amount, or runs outside of Penstock."""
    try:
        share = float(os.environ.get("PENSTOCK_GPU_SHARE", "1"))
        memory_mib = int(os.environ.get("PENSTOCK_GPU_MEMORY_MIB", "0"))
    except ValueError:
        return None
    return memory_mib if 0 < share < 1 and memory_mib > 0 else None


def keep_promise() -> bool:
    """Limits PyTorch's allocator on the task's GPU to the promised memory; returns whether it did. Imports nothing, never fails; `phase` calls it, too.

    Costs a dictionary look-up where the script has not imported torch. Earlier allocations stay.
    """
    torch: Any = sys.modules.get("torch")
    memory_mib = promised_mib()
    if torch is None or memory_mib is None:
        return False
    try:
        if not torch.cuda.is_available():
            return False
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib * BYTES_PER_MIB / total), 0)
    except (AttributeError, RuntimeError, TypeError, ValueError, ArithmeticError):
        return False
    return True
