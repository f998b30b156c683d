"""`python -m penstock.projector`: the projector as a process of its own; with `verify` or `rebuild`, one of those."""

from penstock.kernel.service import main
from penstock.projector.shell.service import run

main("projector", run)
