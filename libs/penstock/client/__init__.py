"""Python client of the gateway: `Client`, `AsyncClient`, their answers and their errors."""

from penstock.client.aio import AsyncClient, AsyncFinishedJob, AsyncJobHandle
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
from penstock.client.sync import Client, FinishedJob, JobHandle
from penstock.model.nouns.types import JobSpec

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
