"""`python -m penstock.gateway`: the gateway as a process of its own."""

from penstock.gateway.shell.service import run
from penstock.kernel.service import main

main("gateway", run)
