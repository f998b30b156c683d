"""The node-reporter's state folder: what cannot be written there ends the reporter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_services.node_reporter.shell.journal import JournalFailed


@contextmanager
def state_folder() -> Iterator[None]:
    """Turns an OSError into `JournalFailed`: a state folder that cannot be written is no base to act on."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"the state folder cannot be written: {error}") from error


def make_folder(path: Path) -> Path:
    """A folder only we can look into. Raises `JournalFailed`."""
    with state_folder():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path
