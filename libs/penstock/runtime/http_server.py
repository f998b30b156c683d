"""HTTP server of a service: uvicorn without its signal handlers and without its ten wake-ups a second."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn


class Server(uvicorn.Server):
    """Serves until `stop`. The process has its own signal handlers."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._stop.wait()
        self.should_exit = True
