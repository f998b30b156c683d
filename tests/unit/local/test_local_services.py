"""The services of `penstock up` in one process: their start can be given up at any moment."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.local import services
from penstock.runtime.settings import Settings


async def test_a_stop_waits_for_the_import_of_one_service_and_not_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C just after the first installation, whose modules are not compiled yet: all imports together take
    a minute on a busy machine."""
    imported: list[str] = []
    loop = asyncio.get_running_loop()

    async def serve(settings: Settings, stop: asyncio.Event, **_: Any) -> None:
        await stop.wait()

    def imports(name: str) -> Callable[..., Any]:
        imported.append(name)
        loop.call_soon(starting.cancel)  # the signal came meanwhile
        return serve

    async def start() -> None:
        settings = Settings(log_url="postgresql://127.0.0.1:9/none")
        async with services.all_services(settings, None, tmp_path / "log", loop.create_future()):
            pytest.fail("not all are up")

    monkeypatch.setattr(services, "entry", imports)
    starting = asyncio.ensure_future(start())
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert 1 <= len(imported) <= 2 < len(services.NAMES)
