"""State folder of the node-reporter: a failed write there ends the reporter."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_services.node_reporter.shell.journal import JournalFailed


@contextmanager
def state_folder() -> Iterator[None]:
    """Turns an OSError into `JournalFailed`: without writable state no order may be acted on."""
    try:
        yield
    except OSError as error:
        raise JournalFailed(f"the state folder cannot be written: {error}") from error


def make_folder(path: Path) -> Path:
    """A folder that only the reporter's user can read. Raises `JournalFailed`."""
    with state_folder():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders that do not lie in another of them."""
    whole = {folder.resolve() for folder in folders}
    return sorted(folder for folder in whole if whole.isdisjoint(folder.parents))
