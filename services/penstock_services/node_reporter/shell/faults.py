"""GPU faults from an NVML event set: a thread sleeps in the driver until one happens."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pynvml

from penstock.model.external_events import GpuFaulted
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


def watch_faults(node_id: str, gpu_count: int, deliver: Callable[[GpuFaulted], None]) -> None:
    """Starts the watching thread; `deliver` is called on the running event loop. Needs NVML initialised."""
    loop = asyncio.get_running_loop()
    wanted = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
    events = pynvml.nvmlEventSetCreate()
    for index in range(gpu_count):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            pynvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
        except pynvml.NVMLError as error:
            logger.warning("GPU %d: its faults cannot be watched: %s", index, error)

    def work() -> None:
        while True:
            try:
                found = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:
                logger.error("GPU faults are no longer watched: %s", error)
                return
            fault = _fault(node_id, found)
            if fault is not None and not loop.is_closed():
                loop.call_soon_threadsafe(deliver, fault)

    threading.Thread(target=work, name="gpu-faults", daemon=True).start()


def _fault(node_id: str, found: Any) -> GpuFaulted | None:
    kind = classify(found.eventType, found.eventData)
    if kind is None:
        logger.warning("GPU event %#x, data %d: caused by a program", found.eventType, found.eventData)
        return None
    index = pynvml.nvmlDeviceGetIndex(found.device)
    return checked(GpuFaulted, {"node_id": node_id, "gpu": index, "fault": kind[0], "code": kind[1]})
