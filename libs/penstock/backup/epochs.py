"""Register of the epochs that were used, in the folder that holds all copies.

An older copy knows nothing of the epochs that began after it. If two restorations began the same epoch, a
node could take an order of the second history for one of the first. So each backup and each restoration
enters its epoch beside the copies.
"""

from pathlib import Path

import msgspec

from penstock.errors import ConfigurationError
from penstock.log.archive import write_durably
from penstock.model.nouns.token import MAX_EPOCH

REGISTER = "epochs.json"


def highest(copies: Path, cell: str) -> int:
    """The highest epoch of the cell that is registered in this folder;
    0: none. Raises `ConfigurationError`."""
    return _read(copies / REGISTER).get(cell, 0)


def enter(copies: Path, cell: str, epoch: int) -> None:
    """Registers the epoch unless a higher one is. Raises `ConfigurationError`."""
    path = copies / REGISTER
    known = _read(path)
    if known.get(cell, -1) >= epoch:
        return
    try:
        write_durably(path, msgspec.json.format(msgspec.json.encode({**known, cell: epoch})))
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}; make the folder of the copies writable: it "
            "registers used epochs"
        ) from error


def choose(known: int, wanted: int | None) -> int:
    """The epoch to begin. Raises `ConfigurationError` for a wanted one
    that is not above those that are known."""
    epoch = known + 1 if wanted is None else wanted
    if not known < epoch <= MAX_EPOCH:
        raise ConfigurationError(f"--epoch: give one above {known}, up to {MAX_EPOCH}, not {epoch}")
    return epoch


def _read(path: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): restore it from another copy of this folder"
        ) from error
