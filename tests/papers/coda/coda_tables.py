"""CODA's cluster beside §VI: `python -m tests.papers.coda.coda_tables`; its month: `--month`. How it is
simulated: `tests.papers.coda.coda_runs`.

Over 20 seeds a day on a quarter of the cluster is simulated, with every fourth job: load per node, mix of
jobs and bursts are those of the whole, while a job with four GPUs takes a larger part of what there is, so
that more GPUs are left over. The whole cluster for three days is there with one seed: FIFO, DRF and CODA.

The utilisation of a GPU is the speed of its training relative to the best cores, mean over the GPUs held
(§III-A1: rates of use are averages across active GPUs). The published one is that of the hardware, which is
below 1 at its best: only the ratio between policies compares. Intervals: 95 % over seeds, resampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from tests.papers.coda.coda_runs import (
    ABLATIONS,
    AS_TRACED,
    CODA,
    CONTENDED,
    DAYS,
    DRF,
    FIFO,
    MONTH,
    PART,
    WITH_CAPS,
    WITHOUT_ELIMINATOR,
    Mix,
    Outcome,
    Variant,
    run,
)
from tests.papers.resampling import less, mean, more, ratio
from tests.papers.tables import PaperTable, Row, main

SEEDS = 20


class Published(NamedTuple):
    """In percent; None: not published. Source: CODA §VI."""

    utilisation: float | None = None
    active: float | None = None
    fragmented: float | None = None
    at_once: float | None = None
    over_10_min: float | None = None
    cpu_10_s: float | None = None
    cpu_3_min: float | None = None
    more_cores: float | None = None
    fewer_cores: float | None = None


PUBLISHED: Mapping[Variant, Published] = {
    FIFO: Published(45.4, 83.5, 14.3, over_10_min=43.1, cpu_10_s=87.4),
    DRF: Published(44.7, 83.3, 14.6, over_10_min=28.9, cpu_10_s=87.8),
    CODA: Published(62.1, 91.2, 1.0, at_once=92.1, cpu_3_min=94.5, more_cores=57.1, fewer_cores=33.6),
}
LABELS: Mapping[str, str] = {
    "utilisation": "speed on GPUs held, of the best (published: their utilisation)",
    "active": "GPUs held while trainings wait",
    "allocated": "GPUs held",
    "fragmented": "GPUs free that waiting trainings could use",
    "at_once": "trainings that start at once",
    "over_10_min": "trainings that wait more than 10 min",
    "cpu_10_s": "CPU jobs that start within 10 s",
    "cpu_3_min": "CPU jobs that start within 3 min",
    "aborts": "aborts per 100 CPU jobs",
    "moves": "moves per 100 trainings",
    "more_cores": "trainings with 1 to 5 cores more than asked for",
    "fewer_cores": "trainings with 1 to 20 cores fewer",
}
REACH: Mapping[str, tuple[float, str]] = {
    "fragmented": (1.0, "lower"),
    "at_once": (92.1, "higher"),
    "cpu_3_min": (94.5, "higher"),
}
"""What CODA has to reach here, in percent."""
MONTH_CPU_S = 300.0
LOST, QUEUED_MORE = 2.3, 100.0
"""Without the eliminator: percent of the utilisation lost while tasks queue, percent more that queue. Source:
CODA §VI-E."""


def rows(variant: Variant, found: Sequence[Outcome]) -> Iterator[Row]:
    published = PUBLISHED.get(variant, Published())
    for name, label in LABELS.items():
        here, interval = mean([100 * getattr(one, name) for one in found])
        reach, better = REACH.get(name, (None, "higher")) if variant == CODA else (None, "higher")
        yield Row(
            label,
            here,
            getattr(published, name, None),
            interval,
            reach,
            better,
        )


def against_fifo(runs: Mapping[Variant, Sequence[Outcome]]) -> Iterator[Row]:
    """How much faster trainings are on the GPUs that they hold than under FIFO, in percent of it."""
    fifo = PUBLISHED[FIFO].utilisation
    assert fifo is not None
    for variant in (DRF, CODA, *ABLATIONS):
        pairs = zip(runs[variant], runs[FIFO], strict=True)
        here, interval = mean([100 * (ours.utilisation / theirs.utilisation - 1) for ours, theirs in pairs])
        published = PUBLISHED.get(variant)
        value = (
            None
            if published is None or published.utilisation is None
            else 100 * (published.utilisation / fifo - 1)
        )
        yield Row(variant.title, here, value, interval, value if variant == CODA else None)


def in_their_terms(runs: Mapping[Variant, Sequence[Outcome]]) -> Iterator[Row]:
    """Utilisation of the hardware: a scale on which FIFO here is FIFO there."""
    fifo = PUBLISHED[FIFO].utilisation
    assert fifo is not None
    for variant in (FIFO, DRF, CODA):
        here, interval = ratio(
            [fifo * one.utilisation for one in runs[variant]], [one.utilisation for one in runs[FIFO]]
        )
        published = PUBLISHED[variant].utilisation
        yield Row(variant.title, here, published, interval, published if variant == CODA else None)


class Contended(NamedTuple):
    """Runs of one mix, in pairs of seeds."""

    mix: Mix
    by_cores: Sequence[Outcome]
    by_caps: Sequence[Outcome]
    """Empty: not run."""
    without: Sequence[Outcome]

    def rows(self) -> Iterator[Row]:
        traced = self.mix == AS_TRACED
        for how, runs in (("cores are halved", self.by_cores), ("bandwidth is capped", self.by_caps)):
            if not runs:
                continue
            title = f"{self.mix.title}; {how}"
            found = less([one.utilisation for one in self.without], [one.utilisation for one in runs])
            reach = None if traced else LOST
            yield Row(f"{title}: utilisation lost without it", found[0], None, found[1], reach)
            found = less([one.while_queued for one in self.without], [one.while_queued for one in runs])
            published = LOST if traced else None
            yield Row(f"{title}: the same while jobs wait", found[0], published, found[1], published)
            found = more([one.queued for one in self.without], [one.queued for one in runs])
            published = QUEUED_MORE if traced else None
            yield Row(f"{title}: jobs that wait, more without it", found[0], published, found[1])
        for title, runs in (("with", self.by_cores), ("without", self.without)):
            found = mean([100 * one.crowded for one in runs])
            label = f"{self.mix.title}: GPUs held on nodes over 75 % of their bandwidth, {title} it"
            yield Row(label, found[0], None, found[1])
        found = mean([100 * one.by_cpu_jobs for one in self.without])
        label = f"{self.mix.title}: traffic by CPU jobs, on nodes with trainings"
        yield Row(label, found[0], None, found[1])


def month() -> Iterator[PaperTable]:
    """the month of 100,000 jobs, one seed"""
    for variant in (FIFO, CODA):
        found = run(MONTH, variant, 0)
        time = Row("processor time, s", found.cpu_s, None, None, MONTH_CPU_S, "lower")
        title = f"The whole month, 100,000 jobs: {variant.title}"
        yield PaperTable(f"coda-month-{variant.profile}", title, "%", [*rows(variant, [found]), time])


def tables() -> Iterator[PaperTable]:
    for variant in (FIFO, DRF, CODA):
        title = f"CODA's cluster for three days, one seed: {variant.title}"
        found = [run(DAYS, variant, 0)]
        yield PaperTable(f"coda-days-{variant.profile}", title, "%", list(rows(variant, found)))
    runs: dict[Variant, Sequence[Outcome]] = {}
    for variant in (FIFO, DRF, CODA, *ABLATIONS):
        runs[variant] = _of_seeds(variant)
        title = f"A day on a quarter of CODA's cluster: {variant.title}"
        yield PaperTable(f"coda-{variant.key}", title, "%", list(rows(variant, runs[variant])))
    yield PaperTable(
        "coda-utilisation",
        "Speed of trainings on their GPUs against FIFO",
        "% more",
        list(against_fifo(runs)),
        "Over the same trace all policies do the same work; only on the GPUs that are held can utilisation "
        "differ.",
    )
    yield PaperTable(
        "coda-hardware",
        "Utilisation of the GPUs held in the source's terms",
        "%",
        list(in_their_terms(runs)),
        "The source measures hardware, this the speed relative to the best cores: both scales are "
        "proportional if hardware is used in proportion to speed. FIFO sets the factor.",
    )
    of = {variant: _of_seeds(variant, CONTENDED) for variant in (CODA, WITH_CAPS, WITHOUT_ELIMINATOR)}
    contended = (
        Contended(AS_TRACED, runs[CODA], (), runs[WITHOUT_ELIMINATOR]),
        Contended(CONTENDED, of[CODA], of[WITH_CAPS], of[WITHOUT_ELIMINATOR]),
    )
    yield PaperTable(
        "coda-eliminator",
        "CODA with and without the contention eliminator",
        "%",
        [row for one in contended for row in one.rows()],
    )
    users = [
        Row(f"{variant.title}, {kind}", fmean(getattr(one, name) for one in runs[variant]))
        for variant in (FIFO, DRF, CODA)
        for name, kind in (
            ("p99_gpu_user_s", "users 1 – 14"),
            ("p99_cpu_user_s", "users 15 – 20, CPU jobs only"),
        )
    ]
    yield PaperTable("coda-users", "Longest of the users' 99th percentiles of queueing", "s", users)


def _of_seeds(variant: Variant, mix: Mix = AS_TRACED) -> Sequence[Outcome]:
    return [run(PART, variant, seed, mix) for seed in range(SEEDS)]


if __name__ == "__main__":
    main("tests.papers.coda.coda_tables", tables, month=month)
