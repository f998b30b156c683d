"""Applies adjustments of tasks on the host and returns the result, for the core to report."""

from typing import Literal

from penstock_services.node_reporter.core.actions import CapBandwidth, SetAffinity
from penstock_services.node_reporter.core.inputs import Done
from penstock_services.node_reporter.shell.ports import Host


def carry_out(host: Host, action: SetAffinity | CapBandwidth) -> Done | None:
    """None: the task has ended."""
    key = (action.task_id, action.token)
    what: Literal["cores", "memory_bandwidth"]
    if isinstance(action, SetAffinity):
        what, found = "cores", host.set_affinity(key, action.cores, action.cap_percent)
    else:
        what, found = "memory_bandwidth", host.cap_bandwidth(key, action.percent)
    return None if found is None else Done(*key, action.order_token, what, *found)
