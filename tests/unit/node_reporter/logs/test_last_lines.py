"""Which memory a failed program reports as exhausted, by the end of its output; and by its exit record as a
whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_services.node_reporter.core.inputs import Outcome
from penstock_services.node_reporter.shell.logs.last_lines import LAST_BYTES, exhausted
from penstock_services.node_reporter.shell.ports import Exit
from penstock_services.node_reporter.shell.process.exits import outcome_of
from tests.support.node_reporter.node_cell import start_order

TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 7, in <module>
    batch = load(everything)
            ^^^^^^^^^^^^^^^^
"""
HOST = {
    "MemoryError": (
        TRACEBACK + "MemoryError\n",
        TRACEBACK
        + (
            "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB for an array with shape "
            "(100000, 100000)\n"
        ),
        "[rank1]: Traceback (most recent call last):\n[rank1]: MemoryError: out of memory\n",
        TRACEBACK + "  | MemoryError\n  +------------------------------------\n",
    ),
    "std::bad_alloc": (
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
    ),
    "DefaultCPUAllocator": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)\n",
    ),
    "Cannot allocate memory": (
        TRACEBACK + "OSError: [Errno 12] Cannot allocate memory\n",
        "sh: fork: Cannot allocate memory\n",
    ),
    "memory allocation failed": ("memory allocation of 1073741824 bytes failed\n",),
}
GPU = {
    "CUDA out of memory": (
        TRACEBACK
        + (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total "
            "capacity of 15.77 GiB\n"
        ),
        "RuntimeError: CUDA driver error: out of memory\n",
        "CUDA Error: out of memory: File exists\n",
        "RuntimeError: Triton Error [CUDA]: out of memory\n",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'\n",
        "node7:41:93 [0] NCCL WARN Cuda failure 2 'out of memory'\n",
        "XGBoostError: cudaMalloc failed: out of memory\n",
        "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at "
        "some other API call\n",
    ),
    "RESOURCE_EXHAUSTED": (
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 "
        "bytes.\n",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB (2147483648B) "
        "on device ordinal 0\n",
    ),
    "cupy.OutOfMemoryError": (
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes.\n",
    ),
    "CUBLAS_STATUS_ALLOC_FAILED": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
    ),
}
CASES = [
    (memory, name, text)
    for memory, table in (("host_memory", HOST), ("gpu_memory", GPU))
    for name, texts in table.items()
    for text in texts
]


@pytest.mark.parametrize(("memory", "name", "text"), CASES)
def test_a_failed_allocation_is_recognised(memory: str, name: str, text: str) -> None:
    """Also where the launcher prints its table after it."""
    assert exhausted(text.encode()) == (memory, name)
    assert exhausted((text + "worker exited with code 1\n" * 20).encode()) == (memory, name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        TRACEBACK + "ValueError: shapes do not match\n",
        "see https://docs.example/MemoryError for MemoryError handling\n",
        TRACEBACK + "KeyError: 'MemoryErrors'\n",
        "Killed\n",
        "MemoryError\n" + "epoch done\n" * 200,  # long ago, and survived
        "CUDA out of memory, halving the batch\n" + "x" * LAST_BYTES,
    ],
)
def test_other_failures_are_not_taken_for_it(text: str) -> None:
    """A retry with more memory would be in vain."""
    assert exhausted(text.encode()) == ("", "")


@given(st.binary(max_size=4_096))
def test_any_output_can_be_looked_at(tail: bytes) -> None:
    assert exhausted(tail)[0] in ("", "host_memory", "gpu_memory")


def ended(code: int | None = 1, number: int | None = None, **more: object) -> Outcome:
    found = outcome_of(Exit(0, 1, code, number, 5, 100 << 10, **more), start_order(1, host_memory_mib=1_024))
    assert found is not None
    return found


def test_what_the_kernel_counted_comes_before_what_the_program_printed() -> None:
    """A data loader's worker is killed, and PyTorch complains about something else."""
    found = ended(oom=True, exhausted=("gpu_memory", "CUDA out of memory"))
    assert (found.out_of_memory, found.exhausted, found.evidence) == (
        True,
        "host_memory",
        "the kernel killed a process of it",
    )
    found = ended(exhausted=("host_memory", "MemoryError"))
    assert (found.out_of_memory, found.exhausted) == (False, "host_memory")
    assert found.evidence == "MemoryError in its last lines"


def test_a_task_that_succeeds_all_the_same_has_had_enough() -> None:
    """It caught the error, or went on without the process that was killed."""
    assert ended(code=0, oom=True).exhausted == ""
