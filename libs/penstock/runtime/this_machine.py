"""Machine id and boot id of the machine that a process runs on."""

import re
from pathlib import Path


def boot_id() -> str:
    """An id that changes with each boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def machine_id() -> str | None:
    """An id that stays over boots; None where the system has none (a container, say, or an image that was
    never booted)."""
    try:
        found = Path("/etc/machine-id").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return found if re.fullmatch("[0-9a-f]{32}", found) else None
