"""`python -m penstock.placer`: the placer as a process of its own."""

from penstock.kernel.service import main
from penstock.placer.shell.service import run

main("placer", run)
