"""Out-of-memory reports of a training script: call `report_out_of_memory()` once at its beginning.

A failed allocation is then recognised by the type of the error that ended the script, independent of its
output. Without this, the node searches the last lines of the output for the names of such errors. The next
attempt gets more of that memory.
"""

import errno
import json
import re
import sys
from types import TracebackType

from penstock.sdk.reporter.lines import write_line

HOST, GPU = "host_memory", "gpu_memory"
MAX_CAUSES = 32  # of one error that are examined
TYPES = {
    ("torch", "OutOfMemoryError"): GPU,
    ("cupy", "OutOfMemoryError"): GPU,
    ("tensorflow", "ResourceExhaustedError"): GPU,
}
"""(package, class) → memory. Sources: PyTorch ≥ 1.13, CuPy, TensorFlow."""
TEXTS = (
    (GPU, "", re.compile(r"^(?:CUDA|HIP) (?:error: )?out of memory")),
    (GPU, "", re.compile(r"^RESOURCE_EXHAUSTED: Out of memory")),
    (GPU, "CUBLAS_STATUS_ALLOC_FAILED", re.compile(r"CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED")),
    (HOST, "DefaultCPUAllocator", re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) memory")),
    (HOST, "std::bad_alloc", re.compile(r"^std::bad_alloc$")),
)
"""(memory, name; empty: the class's, text of a RuntimeError), for errors whose type does not name the memory.
Sources: PyTorch, JAX, pybind11."""


def report_out_of_memory() -> None:
    """Installs a hook: an error that ends the script is reported if it, or one of its causes, is a failed
    allocation.

    The traceback, the exit code and an earlier `sys.excepthook` stay as they are. Outside of Penstock, and
    called again, it does nothing more.
    """
    before = sys.excepthook
    if getattr(before, "reports_memory", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            report(error)
        finally:
            before(kind, error, trace)

    hook.reports_memory = True  # type: ignore[attr-defined] # marks this hook
    sys.excepthook = hook


def report(error: BaseException) -> bool:
    """Reports an error that the script has caught and that will end it; True: it is a failed allocation, and
    its report is written.

    It counts only if the task then fails. Never blocks, never fails.
    """
    found = exhausted(error)
    if found is None:
        return False
    memory, name = found
    return write_line(json.dumps({"exhausted": {"memory": memory, "error": name}}, separators=(",", ":")))


def exhausted(error: BaseException) -> tuple[str, str] | None:
    """(`host_memory` or `gpu_memory`, name of the error) of the first failed allocation among an error and
    its causes."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is None:
            return None
        found = _by_type(cause) or _by_text(cause)
        if found is not None:
            return found
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def _by_type(error: BaseException) -> tuple[str, str] | None:
    """The failed allocation by the error's class or its bases, the most derived known class first."""
    for kind in type(error).__mro__:
        memory = TYPES.get((kind.__module__.partition(".")[0], kind.__name__))
        if memory is not None:
            return memory, _name(kind)
    if isinstance(error, MemoryError):
        return HOST, _name(type(error))
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return HOST, "ENOMEM"
    return None


def _by_text(error: BaseException) -> tuple[str, str] | None:
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)[:10_000]
    return next(
        ((memory, name or _name(type(error))) for memory, name, pattern in TEXTS if pattern.search(text)),
        None,
    )


def _name(kind: type) -> str:
    """Package and class; at most 100 of the characters that a line may have."""
    package = kind.__module__.partition(".")[0]
    name = kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"
    return re.sub(r"[^\w.:]", "_", name, flags=re.ASCII)[:100]
