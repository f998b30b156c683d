"""TCP ports of an attempt, at which the processes of its gang or of its launcher meet: two jobs on a node
have different ones.

A job has one port, with parameter servers one for each of them, in a row. Ports are given in turn over the
whole cell, so that a process of an ended gang does not reach a later one, and jobs of nodes on one machine
differ, too. A port of another job on the attempt's nodes is skipped.
"""

from collections.abc import Sequence
from zlib import crc32

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import TaskPlacement

PORTS = range(20_000, 30_000)
"""Below the ephemeral ports of Linux (ip_local_port_range, from 32,768) and the node ports of Kubernetes
(from 30,000)."""


def ports_of(job: JobState) -> range:
    """The ports of its attempt."""
    return range(job.port, job.port + max(1, job.spec.parameter_servers))


def give_ports(state: CellState, job: JobState, places: Sequence[TaskPlacement]) -> None:
    """Gives the job's new attempt the next ports that are free on its nodes; the first ones of all where
    none are. The cell's first job determines where the turn begins, so that cells on one machine are
    apart."""
    count = len(ports_of(job))
    nodes = {place.node_id for place in places}
    others = {job_id for node_id in nodes for job_id in state.nodes[node_id].tasks.values()}
    taken = {port for job_id in others if job_id != job.job_id for port in ports_of(state.jobs[job_id])}
    begin = state.next_port or crc32(job.job_id.encode())
    for number in range(len(PORTS)):
        job.port = PORTS[(begin + number) % len(PORTS)]
        if job.port + count <= PORTS.stop and (
            not taken or taken.isdisjoint(range(job.port, job.port + count))
        ):
            break
    else:
        job.port = PORTS.start
    state.next_port = job.port + count
