"""Session of one call of `penstock`, shared by its commands: the gateway's address, the command line, the
cell's events."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client import Client  # an HTTP client, which `--help` does not need
    from penstock.client.sessions import Session as Live


@dataclass(slots=True)
class Session:
    """The global options of one command line."""

    line: str
    """The command line as typed, for reports."""
    server: str | None = None
    token_file: Path | None = None
    ca: Path | None = None

    def gateway(self) -> "Client":
        """Raises `Stop`."""
        from penstock.client import Client

        return Client(self.server, token_file=self.token_file, ca=self.ca, tries=1)

    def session(self, path: str, body: Any) -> Callable[[], AbstractAsyncContextManager["Live"]]:
        """Opens a session (`penstock.session_lines`) at this path. The opening raises `ClientError`."""

        @asynccontextmanager
        async def opened() -> AsyncIterator["Live"]:
            from penstock.client import AsyncClient, sessions

            async with (
                AsyncClient(self.server, token_file=self.token_file, ca=self.ca, tries=1) as client,
                sessions.opened(client, path, body) as found,
            ):
                yield found

        return opened

    def events(self, cell: str | None = None) -> Iterator[bytes]:
        """All events of the cell, as JSON; refuses where the gateway serves another cell. Raises `Stop`."""
        from penstock.cli.events import cell_events

        return cell_events(self.gateway(), cell)

    def now_ms(self) -> int:
        """The cell's time, which goes on while nothing is recorded. Raises `Stop`."""
        from penstock.cli.events import cell_now_ms

        return cell_now_ms(self.gateway())
