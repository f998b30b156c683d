"""Where a task's output lies: the node-reporter writes there, the gateway reads there."""

import hashlib
from pathlib import Path
from urllib.parse import quote

MAX_NAME_CHARS = 200  # file systems allow 255 bytes; suffixes need the rest


def file_name(identifier: str) -> str:
    """An identifier as one file name, different for different identifiers: `/` becomes `%2F`.

    Identifiers start with a letter or digit, so the name is never hidden, `.` or `..`.
    """
    name = quote(identifier, safe=":")
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[:160]}~{hashlib.sha256(identifier.encode()).hexdigest()[:32]}"


def log_path(log_dir: Path, job_id: str, task_id: str) -> Path:
    """`LOG_DIR/JOB/TASK.log`."""
    return log_dir / file_name(job_id) / f"{file_name(task_id)}.log"
