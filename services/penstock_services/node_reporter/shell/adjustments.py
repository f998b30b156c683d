"""Applies adjustments of tasks on the host, and requests to save, and returns the result,
for the core to report."""

from penstock.clock import wall_ms
from penstock_services.node_reporter.core.actions import (
    AskToSave,
    CapBandwidth,
    Carried,
    LookForSaver,
    SetAffinity,
)
from penstock_services.node_reporter.core.inputs import Done, Unsaved
from penstock_services.node_reporter.shell.ports import Host


def carry_out(host: Host, action: Carried) -> Done | Unsaved | None:
    """None: there is nothing to report, such as where the task has ended."""
    key = (action.task_id, action.token)
    match action:
        case AskToSave():
            asked = host.ask_to_save(key, by_sdk=action.by_sdk)
            return None if asked else Unsaved(*key, action.order_token, wall_ms())
        case LookForSaver():
            return None if host.saves(key) else Unsaved(*key, action.token, wall_ms())
        case SetAffinity():
            set_ = host.set_affinity(key, action.cores, action.cap_percent)
            return None if set_ is None else Done(*key, action.order_token, "cores", *set_)
        case CapBandwidth():
            capped = host.cap_bandwidth(key, action.percent)
            return None if capped is None else Done(*key, action.order_token, "memory_bandwidth", *capped)
    raise TypeError(f"{action} is not carried out on the host")
