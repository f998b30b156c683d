"""Check of a submission for folders that exist on none of its nodes, possible where all nodes are on the
gateway's own machine."""

import asyncio
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from penstock.ledger.state.node.node_state import NodeState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import NodeStatus
from penstock.runtime.this_machine import boot_id, machine_id
from penstock.sdk.job_file.job_warnings import Doubt

PATIENCE_S = 1.0  # for a folder on a network file system
MAX_LOOKS = 2  # at once: a look at a network file system that hangs may never end
_looks = threading.BoundedSemaphore(MAX_LOOKS)


async def absent_folders(spec: JobSpec, nodes: Iterable[NodeState]) -> list[Doubt]:
    """Empty where a node is elsewhere: the gateway does not see its files. A folder may be created before the
    job starts, so it is no error."""
    venv = spec.environment.venv if spec.environment is not None else None
    asked = {"workdir": spec.workdir, "environment.venv": venv and f"{venv}/bin/python"}
    paths = {field: path for field, path in asked.items() if path is not None and path.startswith("/")}
    if not paths or not _all_here(nodes):
        return []
    absent = await _looked_for(paths)
    remedy = "make it, or name another one, before the job starts"
    return [
        Doubt(field, f"{path!r} is not on this machine, where all nodes are", remedy)
        for field, path in absent
    ]


async def _looked_for(paths: dict[str, str]) -> list[tuple[str, str]]:
    """Folders that do not exist; none where that is not known in time. Runs in a thread for which neither
    other work nor the process's end waits."""
    if not _looks.acquire(blocking=False):
        return []
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[tuple[str, str]]] = loop.create_future()

    def look() -> None:
        found = _absent(paths)
        _looks.release()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))

    threading.Thread(target=look, name="absent-folders", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, PATIENCE_S)
    except TimeoutError:
        return []


def _all_here(nodes: Iterable[NodeState]) -> bool:
    """Whether there are nodes, and each is of this boot of this machine."""
    specs = [node.spec for node in nodes if node.status is not NodeStatus.GONE]
    here = (boot_id(), machine_id())
    return bool(specs) and all((spec.boot_id, spec.machine_id) == here for spec in specs)


def _absent(paths: dict[str, str]) -> list[tuple[str, str]]:
    """Folders that do not exist; one that may not be read is left to the node."""
    found = []
    for field, path in paths.items():
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            found.append((field, path))
        except OSError:
            continue
    return found
