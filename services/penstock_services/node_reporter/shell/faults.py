"""GPU faults from an NVML event set: a thread sleeps in the driver until one happens."""

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from penstock.model.external_events import GpuFaulted
from penstock.model.types import Gpu
from penstock.model.validation import checked

WAIT_MS = 3_600_000  # nothing depends on it: the wait begins again
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Raised by what a program does, not by a broken GPU. Source: NVIDIA's Xid catalogue, "application" rows."""
FELL_OFF_BUS_XID = 79

logger = logging.getLogger(__name__)


def classify(event_type: int, data: int) -> tuple[str, int] | None:
    """(fault, code) of an NVML event; None when the GPU is as good as before."""
    if event_type & pynvml.nvmlEventTypeDoubleBitEccError:
        return "ecc", data
    if event_type & pynvml.nvmlEventTypeXidCriticalError and data not in APPLICATION_XIDS:
        return ("fell_off_bus" if data == FELL_OFF_BUS_XID else "xid"), data
    return None


def watch_faults(node_id: str, gpus: Sequence[Gpu], deliver: Callable[[GpuFaulted], None]) -> None:
    """Starts the watching thread; `deliver` is called on the running event loop. Needs NVML initialised."""
    loop = asyncio.get_running_loop()
    wanted = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
    events = pynvml.nvmlEventSetCreate()
    known: dict[int | None, Gpu] = {}
    for gpu in gpus:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            known[_address(handle)] = gpu
            supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            pynvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
        except pynvml.NVMLError as error:
            logger.warning("GPU %s: its faults cannot be watched: %s", gpu.uuid, error)

    def work() -> None:
        while True:
            try:
                found = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:
                logger.error("GPU faults are no longer watched: %s", error)
                return
            fault = _fault(node_id, known, found)
            if fault is not None and not loop.is_closed():
                loop.call_soon_threadsafe(deliver, fault)

    threading.Thread(target=work, name="gpu-faults", daemon=True).start()


def _address(handle: Any) -> int | None:
    """NVML's handle of a GPU is a pointer, the same as long as the process lives."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _fault(node_id: str, known: Mapping[int | None, Gpu], found: Any) -> GpuFaulted | None:
    kind = classify(found.eventType, found.eventData)
    if kind is None:
        logger.warning("GPU event %#x, data %d: caused by a program", found.eventType, found.eventData)
        return None
    gpu = known.get(_address(found.device))
    if gpu is None:
        logger.warning("GPU event %#x, data %d: of no GPU of this node", found.eventType, found.eventData)
        return None
    fields = {"node_id": node_id, "gpu": gpu.index, "uuid": gpu.uuid, "fault": kind[0], "code": kind[1]}
    return checked(GpuFaulted, fields)
