"""Out of memory as a training script reports it itself: by the type of its error, whatever it prints and
where that goes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.sdk.out_of_memory import exhausted, report
from penstock.sdk.reporter.lines import FIFO, LINE_BYTES
from penstock_services.node_reporter.core.reports.progress import ProgressParser

TORCH = "class OutOfMemoryError(RuntimeError): pass\n"
"""A stand-in for `torch`: PyTorch's error has this name, this module and this base."""


def foreign(module: str, name: str, text: str = "", base: type[Exception] = RuntimeError) -> Exception:
    """An error of a library that is not installed here."""
    return type(name, (base,), {"__module__": module})(text)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), ("host_memory", "MemoryError")),
        (
            foreign("numpy._core._exceptions", "_ArrayMemoryError", base=MemoryError),
            ("host_memory", "numpy._ArrayMemoryError"),
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
            ),
            ("host_memory", "DefaultCPUAllocator"),
        ),
        (OSError(12, "Cannot allocate memory"), ("host_memory", "ENOMEM")),
        (foreign("torch", "OutOfMemoryError"), ("gpu_memory", "torch.OutOfMemoryError")),
        (foreign("torch.cuda", "OutOfMemoryError"), ("gpu_memory", "torch.OutOfMemoryError")),
        (
            foreign("torch", "AcceleratorError", "CUDA error: out of memory"),
            ("gpu_memory", "torch.AcceleratorError"),
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            ("gpu_memory", "CUBLAS_STATUS_ALLOC_FAILED"),
        ),
        (
            foreign(
                "jaxlib._jax", "XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."
            ),
            ("gpu_memory", "jaxlib.XlaRuntimeError"),
        ),
        (
            foreign("cupy.cuda.memory", "OutOfMemoryError", base=MemoryError),
            ("gpu_memory", "cupy.OutOfMemoryError"),
        ),
        (foreign("torch", "AcceleratorError", "CUDA error: an illegal memory access was encountered"), None),
        (foreign("disks", "OutOfMemoryError"), None),
        (ValueError("CUDA out of memory"), None),
        (RuntimeError("shape mismatch"), None),
    ],
)
def test_the_error_says_which_memory(error: Exception, found: tuple[str, str] | None) -> None:
    """By type where the library has one of its own; by the allocator's own words in a RuntimeError, never in
    other errors."""
    assert exhausted(error) == found


def test_an_error_that_came_of_it_is_no_disguise() -> None:
    """A training framework wraps what its step raised; what was handled before, `from None`, counts no
    more."""

    def raised(*, hidden: bool) -> BaseException:
        try:
            try:
                raise MemoryError
            except MemoryError:
                if hidden:
                    raise ValueError("a wrong batch") from None
                raise ValueError("training failed")  # noqa: B904 - as a framework does
        except ValueError as error:
            return error

    assert exhausted(raised(hidden=False)) == ("host_memory", "MemoryError")
    assert exhausted(raised(hidden=True)) is None
    one, other = ValueError(), ValueError()
    one.__context__, other.__context__ = other, one
    assert exhausted(one) is None, "a ring of causes ends"


def run(tmp_path: Path, script: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """A script with a FIFO as its shim holds it; what it wrote there."""
    path = tmp_path / "phases"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    (tmp_path / "torch.py").write_text(TORCH)
    env = {
        **os.environ,
        FIFO: str(path),
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    } | env
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    try:
        lines = os.read(held, LINE_BYTES).splitlines()
    except BlockingIOError:
        lines = []
    os.close(held)
    return done, [json.loads(line) for line in lines]


def test_a_script_that_opted_in_reports_what_ended_it(tmp_path: Path) -> None:
    """Any rank; the traceback and the exit code are Python's own, and a hook that was there before still
    runs."""
    script = (
        "import sys, torch; sys.excepthook = lambda *found: print('hook', found[0].__name__)\n"
        "from penstock.sdk.out_of_memory import report_out_of_memory\n"
        "report_out_of_memory(); report_out_of_memory()\n"
        "raise torch.OutOfMemoryError('CUDA out of memory')"
    )
    done, lines = run(tmp_path, script, RANK="3")
    assert (done.returncode, done.stdout) == (1, "hook OutOfMemoryError\n")
    assert lines == [{"exhausted": {"memory": "gpu_memory", "error": "torch.OutOfMemoryError"}}]


def test_outside_of_penstock_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIFO, raising=False)
    assert not report(MemoryError())
    script = "from penstock.sdk.out_of_memory import report_out_of_memory as r; r(); raise ValueError('x')"
    done, lines = run(tmp_path, script)
    assert (done.returncode, lines) == (1, [])
    assert done.stderr.endswith("ValueError: x\n")


@pytest.mark.parametrize(
    "line",
    [
        {"memory": "disk", "error": "x"},
        {"memory": "host_memory", "error": "a b\nc"},
        {"memory": "host_memory", "error": "x" * 101},
        {"memory": "host_memory"},
        {"memory": "host_memory", "error": "x", "more": 1},
    ],
)
def test_a_hand_written_line_that_is_none_of_ours_is_garbage(line: dict[str, Any]) -> None:
    parser = ProgressParser("n1", "job-1.1.0", 7, leads=False)
    assert parser.parse(json.dumps({"exhausted": line}).encode() + b"\n", 0) == []
    assert (parser.exhausted, parser.garbage) == (("", ""), 1)
