"""`python -m penstock.estimator`; settings come from the environment (penstock.kernel.settings)."""

import os

from penstock.kernel.service import main

if __name__ == "__main__":
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(
            library, "1"
        )  # before numpy, and for the worker that trains: a machine's cores are its jobs'
    from penstock.estimator.shell.service import run

    main("estimator", run)
