"""Private /tmp and /dev/shm of a task: file systems in memory, in its own mount namespace, that end with its
last process.

Standard library only (see `confinement`). Their pages are charged to the task's memory, as the kernel charges
them to the group of the process that writes. Of the machine's folders those entries stay visible that the job
names: its workdir, or a path below them in its command or its variables. A job that works in /tmp itself has
the machine's.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MODE = "mode=1777"
ALWAYS = ("nvidia-mps",)
"""Entries that stay visible unnamed. `nvidia-mps`: CUDA's default of CUDA_MPS_PIPE_DIRECTORY."""
Mount = Callable[[str, str, str | None, int, str | None], None]


def hide_places(request: Mapping[str, Any], mount: Mount, flags: int, bind: int) -> None:
    """Mounts the task's own file systems, `request["private"]`: folder → size in bytes (0: the kernel's
    default, half of the memory).

    `mount`: source, target, type, flags, options; `flags`: of the file systems; `bind`: of the entries that
    stay. Raises `OSError`.
    """
    texts = list(_named(request))
    for place, size in request["private"].items():
        if not os.path.isdir(place) or os.path.realpath(request["cwd"]) == os.path.realpath(place):
            continue
        old = os.open(place, os.O_PATH | os.O_DIRECTORY)
        kept = sorted({*ALWAYS, *_entries(place, texts)} & set(os.listdir(place)))
        mount("tmpfs", place, "tmpfs", flags, f"size={size},{MODE}" if size else MODE)
        for name in kept:
            source, target = f"/proc/self/fd/{old}/{name}", f"{place}/{name}"
            if os.path.isdir(source):
                os.mkdir(target)
            elif os.path.exists(source):
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            else:  # a link to nothing
                continue
            mount(source, target, None, bind, None)
        os.close(old)


def _named(request: Mapping[str, Any]) -> Iterator[str]:
    """Texts in which the job names paths."""
    yield from request["argv"]
    yield from request["env"].values()
    for path in (request["cwd"], request["folder"], request["argv"][0]):
        yield path
        if path.startswith("/"):
            yield os.path.realpath(path)
    for path in (*(request["programs"] or ())[1:2], *(request["code"] or ())):
        yield path


def _entries(place: str, texts: list[str]) -> set[str]:
    """Names of the entries of a folder that the texts name, also by a path below one,
    or within a shell's command."""
    pattern = re.compile(rf"(?<![\w./-]){re.escape(place)}/+([^/\s:;,'\"|&<>()=]+)")
    return {name for text in texts for name in pattern.findall(text)} - {".", ".."}
