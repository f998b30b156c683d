"""Limits BLAS and OpenMP to one thread, in this process and its children. Import before numpy: libraries read
the limit once.

A machine's cores belong to its jobs, and on matrices this small threads wait for each other: a training that
takes 4 s on one thread takes 10 s on two, and 16 s on two beside a busy core (measured on 2 cores).
"""

import os


def use_one_thread() -> None:
    """Sets the limit, also over a higher one in the environment. OpenBLAS and MKL read OMP_NUM_THREADS unless
    their own variable is set."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for own in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.pop(own, None)


use_one_thread()
