"""`python -m tests.bench.simulation.bytecodes [PROFILE|CASE…]`: Python instructions per event, of the
simulator and the core.

Times of one tree differ by a third from run to run on a machine that others use; this count does not differ
at all. It does not see what C code costs: beside it stand the times of `tests.bench.simulation.simulator` and
`tests.bench.scheduling.core`.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from tests.bench.cases import BY_NAME, DEFAULT, Case
from tests.bench.scheduling.core import WAITING, prepared
from tests.bench.simulation.simulator import CLUSTER, PROFILES, jobs

JOBS = 400
NODES = 1_000
EVENTS = 200
"""Of the core, after its cell is prepared."""


def bytecodes(call: Callable[[], object]) -> int:
    """Instructions that the call executes. Traced, which takes about a hundred times as long."""
    count = 0

    def count_one(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return count_one

    def enter(frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count_one

    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def of_simulator(profile: str, count: int = JOBS) -> float:
    """Per event of a whole run, where nearly all jobs wait."""
    run = Simulation(nodes_of(CLUSTER), PlacerSettings(profile=profile), SteadyWork(Constant()), jobs(count))

    def to_the_end() -> None:
        while run.step():
            pass

    return bytecodes(to_the_end) / run.figures(0, 1).events


def of_core(case: Case, nodes: int = NODES, events: int = EVENTS, waiting: int = WAITING) -> float:
    """Per event of the placer's core in the cell of `tests.bench.scheduling.core`."""
    bench = prepared(case, nodes, waiting)
    return bytecodes(lambda: bench.churn(events)) / len(bench.times_s)


def main(names: list[str]) -> None:
    for name in names:
        if name in BY_NAME:
            print(f"core {name}: {of_core(BY_NAME[name]):,.0f} bytecodes per event", flush=True)
        else:
            print(f"simulator {name}: {of_simulator(name):,.0f} bytecodes per event", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or [*PROFILES, DEFAULT, *BY_NAME])
