"""Liquid's batch and immediate runs through the real engine, beside Figs 18 and 19: `python -m
tests.papers.liquid.liquid_tables`.

The jobs are those of `penstock_papers.generators.liquid`; a batch is planned by the batcher in the placer's
window, which opens at the second arrival. Intervals: 95 % over seeds, resampled. Rows `bound` say what no
placement and no schedule can do better (`tests.papers.liquid.liquid_bounds`).
"""

from collections.abc import Iterator, Mapping
from statistics import fmean

import msgspec

from penstock.model.nouns.settings import Stage
from penstock.scheduling.definition import text_of
from penstock.simulator.commands.options import validate
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.measurements.steps import StageTimes
from penstock_papers.settings import LiquidSettings
from tests.papers.liquid.liquid_bounds import least_makespan_s, least_mean_s, shortest_s
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import less, more
from tests.papers.tables import PaperTable, Row, main
from tests.support.cli.command_line import simulate_options

SEEDS = 20
SERVER_GPUS = 1  # of the generator's parameter servers
NODE_GPUS, GANG_GPUS = 2, 3
WEIGHTS = (0.1, 0.5, 0.9)
NODES = (20, 15, 10, 5)
WINDOW_MS = 1_000
OURS = ("liquid", "penstock")
OTHERS = ("random", "even", "k8s-default", "kubeflow", "hived")
MAKESPAN: Mapping[str, float] = dict(zip(OTHERS, (24, 23, 23, 18, 22), strict=True))
JCT: Mapping[str, float] = dict(zip(OTHERS, (24, 25, 22, 22, 18), strict=True))
SPEED: Mapping[str, float] = dict(zip(OTHERS, (14, 32, 19, 16, 20), strict=True))
"""Percent, at 20 nodes or of the immediate run."""


@simulated((1.0, 1.0))
def run(
    trace: str,
    profile: str,
    seed: int,
    *,
    batch: bool,
    server_gpus: int = SERVER_GPUS,
    network_weight: float | None = None,
    without: tuple[Stage, ...] = (),
    batch_exact: bool = False,
) -> tuple[float, float]:
    """Mean completion time and makespan, s. `network_weight`: λ other than the default; `without`: as
    `PlacerSettings`; `batch_exact`: as `LiquidSettings`."""
    given = validate(simulate_options(trace))
    jobs = given.trace(seed)
    jobs = jobs._replace(jobs=[job._replace(server_gpus=server_gpus) for job in jobs.jobs])
    settings = msgspec.structs.replace(given.settings(profile, seed), without=without)
    if network_weight is not None:
        settings = msgspec.structs.replace(settings, network_weight=network_weight)
    if batch:
        own = text_of(LiquidSettings(batch_exact=batch_exact))
        settings = msgspec.structs.replace(
            settings, batch_window_ms=WINDOW_MS, batch_arrivals=2, profile_settings=own
        )
    work = given.work(seed, jobs, settings)
    simulation = Simulation(given.cluster.under(seed), settings, work, jobs.jobs, given.options)
    while simulation.step():
        pass
    figures = simulation.figures(0, 0)
    assert figures.unfinished_jobs == 0
    return figures.avg_jct_s, figures.makespan_s


@simulated([1.0])
def shortest_times(trace: str, seed: int) -> list[float]:
    """Of each job, s: alone at its best placement."""
    jobs = validate(simulate_options(trace)).trace(seed).jobs
    return [shortest_s(StageTimes(), job._replace(server_gpus=SERVER_GPUS), NODE_GPUS) for job in jobs]


def bounds(nodes: int, seed: int) -> tuple[float, float]:
    """Least mean completion time and makespan, s, of a batch."""
    times = shortest_times(f"liquid/batch-{nodes}", seed)
    at_once = nodes * NODE_GPUS // GANG_GPUS
    return least_mean_s(times, at_once), least_makespan_s(times, at_once)


def batch_tables() -> Iterator[PaperTable]:
    seeds = range(SEEDS)
    for nodes in NODES:
        runs = {
            (profile, planned): [run(f"liquid/batch-{nodes}", profile, seed, batch=planned) for seed in seeds]
            for profile in (*OURS, *OTHERS)
            for planned in ((False, True) if profile in OURS else (False,))
        }
        exact: list[tuple[float, float]] = []
        if nodes == max(NODES):
            exact = [
                run(f"liquid/batch-{nodes}", OURS[0], seed, batch=True, batch_exact=True) for seed in seeds
            ]
        least = [bounds(nodes, seed) for seed in seeds]
        for which, what, published in ((0, "JCT", JCT), (1, "makespan", MAKESPAN)):
            rows = []
            for profile in OURS:
                mine = [one[which] for one in runs[profile, True]]
                others: list[tuple[str, list[tuple[float, float]], float | None]]
                others = [(f"{profile} one after the other", runs[profile, False], None)]
                others += [(other, runs[other, False], published[other]) for other in OTHERS]
                for label, theirs, claimed in others:
                    found, interval = less(mine, [one[which] for one in theirs])
                    claim = claimed if nodes == max(NODES) and profile == OURS[0] else None
                    rows.append(Row(f"{profile} vs {label}", found, claim, interval, claim))
            for other in OTHERS:
                if exact:
                    found, interval = less(
                        [one[which] for one in exact], [one[which] for one in runs[other, False]]
                    )
                    rows.append(Row(f"{OURS[0]}, batch_exact vs {other}", found, published[other], interval))
                found, interval = less(
                    [one[which] for one in least], [one[which] for one in runs[other, False]]
                )
                rows.append(Row(f"bound vs {other}", found, None, interval))
            yield PaperTable(
                f"liquid-batch-{nodes}-{what.lower()}", f"Batch on {nodes} nodes: {what}", "% less", rows
            )


def immediate_tables() -> Iterator[PaperTable]:
    """With parameter servers that have a GPU each, and with such as have none."""
    seeds = range(SEEDS)
    runs = {
        (profile, server_gpus): [
            run("liquid/immediate", profile, seed, batch=False, server_gpus=server_gpus)[0] for seed in seeds
        ]
        for server_gpus in (SERVER_GPUS, 0)
        for profile in (*OURS, *OTHERS)
    }
    for server_gpus, key, title in (
        (SERVER_GPUS, "liquid-immediate", "Immediate mode: job speed"),
        (0, "liquid-immediate-servers", "Immediate mode, parameter servers without GPUs: job speed"),
    ):
        rows = []
        for profile in OURS:
            for other in OTHERS:
                found, interval = more(runs[other, server_gpus], runs[profile, server_gpus])
                claim = SPEED[other] if profile == OURS[0] else None
                rows.append(Row(f"{profile} vs {other}", found, claim, interval, claim))
        if server_gpus:
            least = [fmean(shortest_times("liquid/immediate", seed)) for seed in seeds]
            for other in OTHERS:
                found, interval = more(runs[other, server_gpus], least)
                rows.append(Row(f"bound vs {other}", found, None, interval))
        yield PaperTable(key, title, "% faster", rows)


def server_tables() -> Iterator[PaperTable]:
    """What parameter servers without GPUs cost in mean completion time, jobs placed one after the other: eq.
    6 likes the fullest node for all of them."""
    seeds = range(SEEDS)
    trace = f"liquid/batch-{max(NODES)}"

    def mean_times(profile: str, weight: float | None = None) -> list[float]:
        return [
            run(trace, profile, seed, batch=False, server_gpus=0, network_weight=weight)[0] for seed in seeds
        ]

    other = mean_times("random")
    rows = []
    for profile in OURS:
        for weight in WEIGHTS:
            found, interval = less(mean_times(profile, weight), other)
            rows.append(Row(f"{profile}, lambda {weight} vs random", found, None, interval))
    yield PaperTable("liquid-servers", "Parameter servers without GPUs: JCT", "% less", rows)


def tables() -> Iterator[PaperTable]:
    yield from immediate_tables()
    yield from server_tables()
    yield from batch_tables()


if __name__ == "__main__":
    main("tests.papers.liquid.liquid_tables", tables)
