"""`python -m penstock_services.projector [verify|rebuild]`: the projector as a process of its own, or one of its admin commands.

A command prints one JSON object and exits with 0 when all is well, 1 when something differs, 2 on a wrong setting.
"""

import sys

from penstock.runtime.service import main as serve
from penstock_services.projector.shell.admin import COMMANDS, run_command
from penstock_services.projector.shell.service import run


def main() -> None:
    """The service until SIGTERM, or one of its admin commands."""
    if len(sys.argv) == 1:
        serve("projector", run)
    elif len(sys.argv) == 2 and sys.argv[1] in COMMANDS:
        sys.exit(run_command(sys.argv[1]))
    else:
        print(f"usage: penstock-projector [{'|'.join(COMMANDS)}]", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
