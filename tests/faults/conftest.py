"""The fault suite: real processes, real kills, and an independent judge."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from infra.devservers.kafka import KafkaBroker, kafka_broker
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.runtime.keys.node_keys import OPERATOR_KEY
from tests.faults.processes.fault_cell import FaultCell
from tests.faults.processes.zygote import Zygote

SEED = 20260101
TAKEOVER_MS = 400


@pytest.fixture
def broker() -> Iterator[KafkaBroker]:
    """A broker of its own for each test: a cell's topics have fixed names, and some tests kill it."""
    with kafka_broker() as found:
        yield found


MakeCell = Callable[..., Awaitable[FaultCell]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-scale", type=int, default=1, help="so many times the kills and seeds of the CI run"
    )


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--faults-scale", default=1))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    modules = [
        "penstock_services.placer",
        "penstock_services.estimator",
        "penstock_services.node_reporter",
        "tests.faults.processes.judge_node",
        "penstock.log.kafka.kafka",
        *(
            name
            for name in ("penstock_services.projector", "penstock_services.gateway")
            if find_spec(f"{name}.__main__")
        ),
    ]
    found = Zygote(modules, {"PENSTOCK_TAKEOVER_MS": str(TAKEOVER_MS)})
    yield found
    found.close()


@pytest_asyncio.fixture
async def make_cell(zygote: Zygote, tmp_path: Path) -> AsyncIterator[MakeCell]:
    """Opens a cell over a log URL; afterwards no process of it is left."""
    cells: list[FaultCell] = []
    logs: list[Log] = []

    async def make(log_url: str, dsn: str, seed: int = SEED, **settings: str) -> FaultCell:
        log = await open_log(log_url, "test").start()
        logs.append(log)
        found: Mapping[str, str] = {
            "PENSTOCK_LOG": log_url,
            "PENSTOCK_DSN": dsn,
            OPERATOR_KEY: os.environ[OPERATOR_KEY],
            **settings,
        }
        cell = FaultCell(zygote, log, tmp_path / f"cell{len(cells)}", found, seed)
        cells.append(cell)
        await cell.open()
        return cell

    yield make
    for cell in cells:
        await cell.close()
    for log in logs:
        await log.close()
