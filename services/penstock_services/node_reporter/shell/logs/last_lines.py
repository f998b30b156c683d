"""Detection of out-of-memory errors in a program's own output: the errors of allocators and frameworks in its
last lines. Standard library only.

A refused allocation is an error inside the program, of which the kernel reports nothing. Searched are the
last LAST_BYTES of the output of a failed task; only the name of the error leaves the node.
"""

import re

LAST_BYTES = 16_384  # a traceback, and the table that torchrun prints after it
MAX_LINES = 100
_PREFIX = rb"^(?:\[[^\]\n]{0,64}\][: ]*|[ |+]*)"  # a rank's, or an exception group's
ERRORS = (
    (
        "gpu_memory",
        "CUDA out of memory",
        rb"(?:CUDA|HIP) out of memory|(?:CUDA|HIP)(?: driver)? [Ee]rror: out of memory",
    ),
    (
        "gpu_memory",
        "CUDA out of memory",
        rb"Triton Error \[(?:CUDA|HIP)\]: out of memory|(?i:cuda failure) (?:2 )?'out of memory'",
    ),
    ("gpu_memory", "CUDA out of memory", rb"cudaMalloc(?: retry)? failed: out of memory"),
    ("gpu_memory", "cupy.OutOfMemoryError", rb"cupy[\w.]*\.OutOfMemoryError"),
    ("gpu_memory", "CUDA_ERROR_OUT_OF_MEMORY", rb"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
    ("gpu_memory", "CUBLAS_STATUS_ALLOC_FAILED", rb"CU(?:BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED"),
    (
        "gpu_memory",
        "RESOURCE_EXHAUSTED",
        rb"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)|OOM when allocating tensor",
    ),
    ("host_memory", "MemoryError", _PREFIX + rb"(?:[\w.]+\.)?(?:_Array)?MemoryError\b"),
    ("host_memory", "std::bad_alloc", rb"std::bad_alloc"),
    ("host_memory", "DefaultCPUAllocator", rb"DefaultCPUAllocator: (?:can't allocate|not enough) memory"),
    ("host_memory", "Cannot allocate memory", rb"Cannot allocate memory"),
    ("host_memory", "java.lang.OutOfMemoryError", rb"java\.lang\.OutOfMemoryError"),
    ("host_memory", "memory allocation failed", rb"^memory allocation of \d+ bytes failed"),
    ("host_memory", "runtime: out of memory", rb"^(?:fatal error: )?runtime: out of memory"),
)
"""(memory, name of the error, its pattern), the more specific first. Sources: CPython, libstdc++, glibc,
PyTorch, JAX and TensorFlow, Triton, NCCL, CuPy, cuBLAS, the JVM, Rust's and Go's runtimes."""
_PATTERNS = [(memory, name, re.compile(pattern, re.MULTILINE)) for memory, name, pattern in ERRORS]


def exhausted(tail: bytes) -> tuple[str, str]:
    """(memory, name of the error) that the end of a failed task's output reports; both empty for none."""
    lines = b"\n".join(tail[-LAST_BYTES:].splitlines()[-MAX_LINES:])
    return next(((memory, name) for memory, name, pattern in _PATTERNS if pattern.search(lines)), ("", ""))
