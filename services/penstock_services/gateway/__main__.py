"""`penstock-gateway`, or `python -m penstock_services.gateway`: the gateway as a process of its own."""

from penstock.runtime.service import main as serve
from penstock_services.gateway.shell.service import run


def main() -> None:
    """Runs until SIGTERM; settings come from the environment (`penstock.runtime.settings`)."""
    serve("gateway", run)


if __name__ == "__main__":
    main()
