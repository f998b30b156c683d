"""`python -m penstock.estimator`; settings come from the environment (penstock.kernel.settings)."""

from penstock.estimator.shell.service import run
from penstock.kernel.service import main

if __name__ == "__main__":
    main("estimator", run)
