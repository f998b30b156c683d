"""Small workloads of fixed rows, and the ledger of each under any profile.

Together their jobs wait, form gangs, change shape, have deadlines and service classes, share GPUs, are
preempted, take turns in groups, and borrow cores without a GPU. Each workload is simulated as users do it, by
`penstock simulate`; its ledger is the file that the command writes. No measured data are needed: tables of
`tests.simulation.small_tables` stand in their place. The rows follow from arithmetic alone, so that another
version of a library draws no other ones.
"""

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from penstock.model.nouns.settings import PlacerSettings
from tests.simulation.cell import test_profiles
from tests.simulation.small_tables import MODELS, write_tables
from tests.support.cli.command_line import penstock
from tests.support.cluster.random_cell import RandomCell

SHAPED, ARRAYED, STAGED = 26, 44, 30  # jobs
CELL_JOBS = 40
MEASURED = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
CLASSES = ("urgent", "prior", "normal")
SHAPES_HEADER = (
    "job_id,submit_s,duration_s,gpus,model,batch_size,owner,iterations,workers,min_workers,inference,labels"
)
ARRAYS_HEADER = (
    "job_id,submit_s,duration_s,gpus,model,batch_size,owner,iterations,cores,patience_s,"
    "memory_bandwidth,labels"
)
BURSTS_HEADER = "job_id,submit_s,duration_s,gpus,model,owner,workers,parameter_servers,labels"
STEPS_HEADER = "placement,local_bsz,step_time,sync_time"
STAGES_HEADER = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,iteration_time,resource_time_0,"
    "resource_time_1,resource_time_2"
)


class Workload(NamedTuple):
    """A trace of its own with the options of `penstock simulate` for it."""

    lines: Sequence[str]
    """Of the trace's file; the first is its header."""
    options: Sequence[str]
    """Without the profile."""


def shapes() -> Workload:
    """Trainings that may start with fewer workers, and inference, in three classes; run times are learned."""
    rows = []
    for i in range(SHAPED):
        gpus = (1, 4, 1, 2, 1, 8)[i % 6]
        least = 1 if i % 3 == 1 else ""
        rows.append(
            f"s{i:02},{7 * i},{60 + 23 * (i * 5 % 13)},{gpus},{MEASURED[i % 3]},{(16, 64)[i % 2]},"
            f"owner-{i % 4},{60 + 20 * (i % 7)},{gpus},{least},{'yes' if i % 5 == 4 else ''},"
            f"qos={CLASSES[i * 3 % 7 % 3]}"
        )
    return Workload((SHAPES_HEADER, *rows), ("--cluster", "2x4+1x2", "--truth", "step-times", *LEARNED))


def arrays() -> Workload:
    """Trainings and bursts of jobs without a GPU on scarce cores and memory bandwidth; a stop costs time."""
    rows = []
    for i in range(ARRAYED):
        gpus = (1, 0, 2, 0, 0, 4, 0, 1)[i % 8]
        at_s = 11 * (i - i % 8) + (0 if gpus == 0 else 3 * (i % 8))
        model = MODELS[i % len(MODELS)] if gpus else ""
        cores = (2, 3, 4)[i % 3] * gpus or (2, 5, 14, 3, 9)[i % 5]
        rows.append(
            f"a{i:02},{at_s},{50 + 41 * (i * 7 % 11)},{gpus},{model},{16 if gpus else ''},owner-{i % 5},"
            f"{500 if gpus else ''},{cores},{600 if i % 12 == 3 else ''},"
            f"{(0.02, 0.3, 0.1)[i % 3]},kind={'train' if gpus else 'array'}"
        )
    options = "--cluster 2x4x20+1x2x12+1x0x8 --truth bandwidth(cpu) --restart-cost 5s,20s,2m --grace 8"
    return Workload((ARRAYS_HEADER, *rows), (*options.split(), "--durations", "unknown"))


def stages() -> Workload:
    """Trainings with complementary stages, which may take turns on GPUs; they launch before their turn."""
    rows = []
    for i in range(STAGED):
        gpus = (1, 2, 1, 4, 8)[i // 3 % 5]
        storage, gpu, network = ((180, 20, 5), (20, 170, 10), (15, 60, 120), (90, 80, 20))[i % 4]
        step_ms, steps = storage + gpu + network, 6_000 + 2_000 * (i * 5 % 9)
        rows.append(
            f"{i},{gpus},{700_000 * (i // 3)},{steps},vgg16,16,{steps * step_ms},"
            f"{step_ms},{storage},{gpu},{network}"
        )
    options = "--cluster 2x8 --truth muri --profile-noise 0.2 --prelaunch --durations known"
    return Workload((STAGES_HEADER, *rows), options.split())


def bursts() -> Workload:
    """Gangs that wait behind long jobs, bursts with parameter servers, then urgent jobs among small ones.

    They lead to reservations, backfill, plans of bursts, launches ahead of time, and jobs that make way.
    """
    rows = [
        "long-0,0,6900,4,bert,a,,,",
        "long-1,0,7600,4,bert,b,,,",
        "long-2,0,8000,2,bert,a,,,",
        "long-3,0,9000,3,bert,c,,,",
        "wide,20,30,4,bert,e,,,",
        "gang,30,20,8,bert,e,8,,",
    ]
    rows += [
        f"small-{i:02},{60 + 300 * i},{(200, 900, 2_500)[i % 3]},{1 + i % 2},bert,{'bcd'[i % 3]},,,"
        for i in range(21)
    ]
    rows += [f"burst-{i},2000,{200 + 70 * (i * 3 % 7)},2,bert,{'abcd'[i % 4]},2,1," for i in range(8)]
    rows += [
        f"dawn-{i:02},19000,{200 + 40 * (i * 5 % 7)},{1 + i % 2},bert,{'abcd'[i % 4]},{1 + i % 2},{i % 2},"
        for i in range(14)
    ]
    rows += [f"full-{i},20000,6000,4,bert,a,,,qos=normal" for i in range(2)]
    rows += [
        f"one-{i},{20_010 + 5 * i},{600 if i in (0, 1, 2, 4) else 4_000 + 100 * i},1,bert,a,,,qos=normal"
        for i in range(8)
    ]
    rows += [f"now-{i},{20_900 + 900 * i},{500 - 90 * i},4,bert,d,,,qos=urgent" for i in range(3)]
    rows += [f"soon-{i},{21_200 + 650 * i},300,3,bert,b,,,qos=prior" for i in range(3)]
    options = "--cluster 4x4 --truth phases --prelaunch --durations known --stop-latency 3"
    return Workload((BURSTS_HEADER, *rows), options.split())


def afternoon() -> Workload:
    """That of `golden/profiles.json`: singles, gangs, parts of GPUs, jobs without any, parameter servers."""
    lines = (test_profiles.HEADER, *test_profiles.rows())
    return Workload(lines, ("--cluster", test_profiles.CLUSTER, "--durations", "known"))


LEARNED = ("--durations", "learned", "--start-latency", "4", "--stop-latency", "2")
WORKLOADS = {"afternoon": afternoon, "shapes": shapes, "arrays": arrays, "stages": stages, "bursts": bursts}
"""Simulated ones, by name."""
CELLS = {"disturbed": (29, 0.0), "hostile": (28, 0.25)}
"""Cells of `tests.support.cluster.random_cell`: name → (seed, rate of inputs of any kind with any numbers).

Users cancel and hold jobs and set deadlines, operators cordon nodes, nodes fall silent and lose GPUs.
"""
GENERATED: Mapping[str, Sequence[str]] = {
    "genie/5-per-hour": ("genie", "penstock"),
    "liquid/batch-5": ("liquid", "liquid-levels", "penstock"),
    "specon/fixed": ("specon", "balance", "penstock"),
}
"""The simulator's own generators, on small tables → the profiles for which each is meant."""
VARIANTS: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "bursts-without-groups": ("bursts", ("--set", 'without=["groups"]'), ("penstock",)),
    "bursts-batched": ("bursts", ("--set", "batch_window_ms=5000"), ("liquid", "liquid-levels")),
    "bursts-make-way": ("bursts", ("--set", 'genie={"make_way":true}'), ("genie",)),
}
"""Name → (workload, settings, the profiles for which they are meant)."""
LONG = frozenset({"afternoon", "genie/5-per-hour"})
"""Workloads that the CI run leaves out; `tests.simulation.cell.test_profiles` compares the heads of the
first."""
BY_PLACE = frozenset(
    {
        *("fifo-strict", "random", "even", "k8s-default", "kubeflow", "hived", "best-fit", "dot-product"),
        *("clustering", "packing", "fgd", "sjf", "specon", "liquid-levels"),
    }
)
"""Profiles that differ from others in one stage. Of these the CI run has the workloads of `FOR_ALL` alone."""
FOR_ALL = frozenset({"arrays", "disturbed", *GENERATED, *VARIANTS})


def names_of(profile: str) -> Sequence[str]:
    """The workloads of a profile."""
    found = [*WORKLOADS, *CELLS]
    found += [name for name, profiles in GENERATED.items() if profile in profiles]
    found += [name for name, (_, _, profiles) in VARIANTS.items() if profile in profiles]
    return found


def is_slow(name: str, profile: str) -> bool:
    """Whether the CI run leaves this one out."""
    return name in LONG or (profile in BY_PLACE and name not in FOR_ALL)


@lru_cache(16)
def ledger(name: str, profile: str) -> Sequence[bytes]:
    """All records of the workload's ledger under a profile, in order."""
    if name in CELLS:
        return random_cell(name, profile)
    with TemporaryDirectory() as folder:
        root, path = small_tables(Path(folder, "data")), Path(folder, "trace.csv")
        with patch.dict(os.environ, PENSTOCK_DATA=str(root)):
            if name in GENERATED:
                return simulated(name, ("--durations", "known", "--profile", profile))
            plain, more, _ = VARIANTS.get(name, (name, (), ()))
            workload = WORKLOADS[plain]()
            path.write_text("\n".join([*workload.lines, ""]))
            return simulated(str(path), (*workload.options, *more, "--profile", profile))


def simulated(trace: str, options: Sequence[str]) -> Sequence[bytes]:
    """The records of `penstock simulate TRACE OPTIONS --ledger FILE`. Raises `AssertionError` if it fails."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "ledger")
        quietly("simulate", trace, *options, "--ledger", str(path))
        return path.read_bytes().splitlines()


def quietly(*arguments: str) -> None:
    """`penstock ARGUMENTS`. Raises `AssertionError` with what it printed if it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = penstock(*arguments)
    assert code == 0, f"penstock {' '.join(arguments)}:\n{said.getvalue()}"


def small_tables(root: Path) -> Path:
    """Small tables below `root`, with step times on every placement that a workload here may get."""
    write_tables(root)
    for name in MEASURED:
        (root / "pollux/traces" / name / "placements.csv").write_text("\n".join([STEPS_HEADER, *steps(), ""]))
    return root


def steps() -> Iterator[str]:
    """Lines of step times, s, on every placement of up to four GPUs on each of up to three nodes."""
    for nodes in (1, 2, 3):
        for held in product((1, 2, 3, 4), repeat=nodes):
            for local in (1, 64):
                sync_s = 0.02 * (sum(held) - 1) + 0.15 * (nodes - 1)
                yield f"{''.join(map(str, held))},{local},{0.05 * local + sync_s:.3f},{sync_s:.3f}"


class _Kept(RandomCell):
    """A random cell that keeps its records."""

    def __init__(self, seed: int, settings: PlacerSettings, jobs: int, *, extremes: float) -> None:
        self.values: list[bytes] = []
        super().__init__(seed, settings, jobs, extremes=extremes)

    def written(self, value: bytes) -> None:
        self.values.append(value)


def random_cell(name: str, profile: str) -> Sequence[bytes]:
    """The records of a random cell, until nothing can happen any more."""
    seed, extremes = CELLS[name]
    cell = _Kept(seed, PlacerSettings(profile=profile, seed=1), CELL_JOBS, extremes=extremes)
    cell.run()
    return cell.values
