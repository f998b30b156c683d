"""`python -m tests.bench.bytecodes [PROFILE...]`: Python instructions that the simulator executes per event.

Times of one tree differ by a third from run to run on a machine that others use; this count does not differ at all. It does not
see what C code costs: beside it stand the times of `tests.bench.simulator`.
"""

import sys
from types import FrameType
from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from tests.bench.simulator import CLUSTER, PROFILES, jobs

JOBS = 400


def bytecodes_per_event(profile: str) -> float:
    """Traced, which takes about a hundred times as long."""
    run = Simulation(nodes_of(CLUSTER), PlacerSettings(profile=profile), SteadyWork(Constant()), jobs(JOBS))
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
        while run.step():
            pass
    finally:
        sys.settrace(None)
    return count / run.figures(0, 1).events


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PROFILES:
        print(f"{wanted}: {bytecodes_per_event(wanted):,.0f} bytecodes per event")
