"""GPU memory limit of a task that shares its GPUs, enforced by the framework: `keep_promise()` after the
import of torch.

An allocation beyond the promised memory then fails in the script that makes it, as on a smaller GPU, and not
in another job's. PyTorch alone needs the call: JAX and TensorFlow read variables that Penstock sets. Source:
Liquid §6.2, where each job's memory is limited by a parameter of its framework.
"""

import os
import sys
from typing import Any

BYTES_PER_MIB = 1 << 20


def promised_mib() -> int | None:
    """Memory promised to the task on each of its GPUs, MiB; None: it began alone on its GPUs, has no promised
    amount, or runs outside of Penstock."""
    try:
        memory_mib = int(os.environ.get("PENSTOCK_GPU_MEMORY_LIMIT_MIB", "0"))
    except ValueError:
        return None
    return memory_mib if memory_mib > 0 else None


def keep_promise() -> bool:
    """Limits PyTorch's allocator on the process's current GPU to the promised memory; returns whether it did.
    Imports nothing, never fails; `phase` calls it, too.

    Costs a dictionary look-up where the script has not imported torch. Earlier allocations stay.
    """
    torch: Any = sys.modules.get("torch")
    memory_mib = promised_mib()
    if torch is None or memory_mib is None:
        return False
    try:
        if not torch.cuda.is_available():
            return False
        device = torch.cuda.current_device()  # a limit of another one would take memory there: its context
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_mib * BYTES_PER_MIB / total), device)
    except (AttributeError, RuntimeError, TypeError, ValueError, ArithmeticError):
        return False
    return True
