"""Python client of the gateway: `Client`, `AsyncClient`, their answers and their errors.

A name is imported when it is used: the blocking client needs no event loop, and errors need no client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.aio.client import AsyncClient, AsyncFinishedJob, AsyncJobHandle
    from penstock.client.errors import (
        BadField,
        BadRequest,
        ClientError,
        Conflict,
        GatewayFault,
        JobNotSucceeded,
        KeyConflict,
        NotFound,
        NotPermitted,
        Unreachable,
        WaitTimeout,
    )
    from penstock.client.models import Checkpoint, Eta, Event, Job, Node, Page, Status, Task, TaskCores, Why
    from penstock.client.sync.client import Client, FinishedJob, JobHandle
    from penstock.model.jobs.job_spec import JobSpec

_MODULES = {
    "aio.client": "AsyncClient AsyncFinishedJob AsyncJobHandle",
    "errors": "BadField BadRequest ClientError Conflict GatewayFault JobNotSucceeded KeyConflict NotFound "
    "NotPermitted Unreachable WaitTimeout",
    "models": "Checkpoint Eta Event Job JobSpec Node Page Status Task TaskCores Why",
    "sync.client": "Client FinishedJob JobHandle",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AsyncClient",
    "AsyncFinishedJob",
    "AsyncJobHandle",
    "BadField",
    "BadRequest",
    "Checkpoint",
    "Client",
    "ClientError",
    "Conflict",
    "Eta",
    "Event",
    "FinishedJob",
    "GatewayFault",
    "Job",
    "JobHandle",
    "JobNotSucceeded",
    "JobSpec",
    "KeyConflict",
    "Node",
    "NotFound",
    "NotPermitted",
    "Page",
    "Status",
    "Task",
    "TaskCores",
    "Unreachable",
    "WaitTimeout",
    "Why",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is used first."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
