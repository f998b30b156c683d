"""GPU faults from an NVML event set: a thread sleeps in the driver until one happens."""

import asyncio
import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from penstock.model.inputs.external_events import GpuFaulted
from penstock.model.nouns.nodes import Gpu
from penstock.model.schema.validation import checked

WAIT_MS = 3_600_000  # arbitrary: the wait begins again
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids caused by a program, not by a broken GPU. Source: NVIDIA's Xid catalogue, "application" rows."""
FELL_OFF_BUS_XID = 79

logger = logging.getLogger(__name__)


def classify(event_type: int, data: int) -> tuple[str, int] | None:
    """(fault, code) of an NVML event; None when the GPU still works as before."""
    if event_type & pynvml.nvmlEventTypeDoubleBitEccError:
        return "ecc", data
    if event_type & pynvml.nvmlEventTypeXidCriticalError and data not in APPLICATION_XIDS:
        return ("fell_off_bus" if data == FELL_OFF_BUS_XID else "xid"), data
    return None


def watch_faults(node_id: str, gpus: Sequence[Gpu], deliver: Callable[[GpuFaulted], None]) -> None:
    """Starts the watching thread; `deliver` is called on the running event loop. Needs NVML initialised."""
    loop = asyncio.get_running_loop()

    def report(fault: GpuFaulted) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, fault)

    watch = _Watch(node_id, gpus, report)
    threading.Thread(target=watch.run, name="gpu-faults", daemon=True).start()


class _Watch:
    """The thread's work: one event set over the GPUs that answer,
    created anew without each one that is lost."""

    def __init__(self, node_id: str, gpus: Sequence[Gpu], report: Callable[[GpuFaulted], None]) -> None:
        self._node_id = node_id
        self._gpus = list(gpus)
        self._reported: set[tuple[str, str, int]] = set()
        self._deliver = report

    def run(self) -> None:
        try:
            while self._gpus:
                events, known = self._registered()
                self._wait(events, known)
                pynvml.nvmlEventSetFree(events)
                if not self._drop_lost():
                    logger.error("GPU faults are no longer watched: a lost GPU cannot be identified")
                    return
        except pynvml.NVMLError as error:
            logger.error("GPU faults are no longer watched: %s", error)

    def _registered(self) -> tuple[Any, dict[int | None, Gpu]]:
        """The event set, and the GPU of each handle."""
        wanted = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError
        events = pynvml.nvmlEventSetCreate()
        known: dict[int | None, Gpu] = {}
        for gpu in self._gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                known[_address(handle)] = gpu
                supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                pynvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
            except pynvml.NVMLError as error:
                logger.warning("GPU %s: its faults cannot be watched: %s", gpu.uuid, error)
        return events, known

    def _wait(self, events: Any, known: Mapping[int | None, Gpu]) -> None:
        """Reports faults until a GPU is lost. Raises any other `NVMLError`."""
        while True:
            try:
                found = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError_GpuIsLost:
                return
            kind, gpu = classify(found.eventType, found.eventData), known.get(_address(found.device))
            if kind is None or gpu is None:
                name = "an unknown GPU" if gpu is None else gpu.uuid
                logger.warning("event %#x, data %d of %s: no fault", found.eventType, found.eventData, name)
            else:
                self._report(gpu, *kind)

    def _report(self, gpu: Gpu, kind: str, code: int) -> None:
        """Reports it once: a broken GPU may raise the same event thousands of times, and the queue to the
        journal is bounded."""
        if (gpu.uuid, kind, code) not in self._reported:
            self._reported.add((gpu.uuid, kind, code))
            self._deliver(_fault(self._node_id, gpu, kind, code))

    def _drop_lost(self) -> bool:
        """Reports GPUs that fell off the bus and stops watching them; returns whether there were any."""
        lost = [gpu for gpu in self._gpus if _is_lost(gpu)]
        self._gpus = [gpu for gpu in self._gpus if gpu not in lost]
        for gpu in lost:
            self._report(gpu, "fell_off_bus", FELL_OFF_BUS_XID)
        return bool(lost)


def _is_lost(gpu: Gpu) -> bool:
    try:
        pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound):
        return True
    except pynvml.NVMLError:
        return False
    return False


def _address(handle: Any) -> int | None:
    """NVML's handle of a GPU is a pointer, the same as long as the process lives."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _fault(node_id: str, gpu: Gpu, fault: str, code: int) -> GpuFaulted:
    fields = {"node_id": node_id, "gpu": gpu.index, "uuid": gpu.uuid, "fault": fault, "code": code}
    return checked(GpuFaulted, fields)
