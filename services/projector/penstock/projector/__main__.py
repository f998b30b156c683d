"""`python -m penstock.projector [verify|rebuild]`: the projector as a process of its own, or one of its chores.

A chore prints one JSON object and exits with 0 when all is well, 1 when something differs, 2 on a wrong setting.
"""

import sys

from penstock.kernel.service import main
from penstock.projector.shell.chores import CHORES, run_chore
from penstock.projector.shell.service import run

if len(sys.argv) == 1:
    main("projector", run)
elif len(sys.argv) == 2 and sys.argv[1] in CHORES:
    sys.exit(run_chore(sys.argv[1]))
else:
    print(f"usage: python -m penstock.projector [{'|'.join(CHORES)}]", file=sys.stderr)
    sys.exit(2)
