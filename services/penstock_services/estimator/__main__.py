"""`penstock-estimator`, or `python -m penstock_services.estimator`: the estimator as a process of its own."""

from penstock.runtime.service import main as serve


def main() -> None:
    """Runs until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    from penstock_services.estimator.shell.service import run  # after the line above: it imports numpy

    serve("estimator", run)


if __name__ == "__main__":
    main()
