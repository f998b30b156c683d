"""`penstock-estimator`, or `python -m penstock_services.estimator`: the estimator as a process of its own."""

import os

from penstock.runtime.service import main as serve


def main() -> None:
    """Runs until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        # Before numpy is imported, and for the worker that trains: a machine's cores are its jobs'.
        os.environ.setdefault(library, "1")
    from penstock_services.estimator.shell.service import run

    serve("estimator", run)


if __name__ == "__main__":
    main()
