"""Peers of a gang for its tasks: in a variable, or for a large gang in one file per node, to which each task
has a link."""

from contextlib import suppress
from pathlib import Path

from penstock.runtime.files.task_logs import file_name
from penstock_services.node_reporter.shell.ports import Key
from penstock_services.node_reporter.shell.state_folder import make_folder, state_folder

PEERS = "peers.json"
PEERS_VARIABLE, PEERS_FILE = "PENSTOCK_PEERS", "PENSTOCK_PEERS_FILE"
MAX_PEERS_CHARS = 16_384  # in a variable, of which the kernel takes 128 KiB at most; about 190 members


class GangFiles:
    """In `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def peers(self, key: Key, text: str, folder: Path) -> dict[str, str]:
        """The variable with the peers, or with their file in the task's folder."""
        if len(text) <= MAX_PEERS_CHARS:
            return {PEERS_VARIABLE: text}
        whole = self._file(key)
        with state_folder():
            if not whole.exists():
                make_folder(whole.parent)
                part = whole.with_suffix(".part")
                part.write_text(text)
                part.chmod(0o444)
                part.rename(whole)
            with suppress(FileExistsError):
                (folder / PEERS).hardlink_to(whole)
        return {PEERS_FILE: str(folder / PEERS)}

    def forget(self, key: Key, folder: Path) -> None:
        """The file is removed with the last task's link."""
        gang = self._file(key)
        with suppress(OSError):
            (folder / PEERS).unlink()
            if gang.stat().st_nlink == 1:
                gang.unlink()

    def _file(self, key: Key) -> Path:
        task_id, token = key
        return self._root / f"{file_name(task_id.rsplit('.', 2)[0])}@{token}.json"
