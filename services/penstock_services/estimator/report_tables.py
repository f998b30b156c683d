"""Tables of the estimator's report, for terminal and page: scores per tier,
owners who over-ask, the worst estimates."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.charts.report import Cell, Table
from penstock_services.estimator.core.accuracy import USER, Accuracy, share

TIERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "history": ("#0072B2", "runs of the same job"),
        "model": ("#D55E00", "learned model"),
        "nearest": ("#009E73", "nearest runs"),
        "default": ("#8C8C8C", "default"),
        USER: ("#CC79A7", "asked for by the user"),
    }
)
"""Tier → colour, name, in order of precedence.
Source of the colours: Okabe and Ito, Color Universal Design, 2008."""
OTHER_COLOUR = "#56B4E9"

TITLES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_memory_mib": "GPU memory",
        "host_memory_mib": "Host memory",
        "cores": "Cores",
        "gpu_utilisation_percent": "GPU utilisation",
        "run_ms": "Run time",
    }
)


def colour_of(tier: str) -> str:
    return TIERS.get(tier, (OTHER_COLOUR,))[0]


def name_of(tier: str) -> str:
    return TIERS[tier][1] if tier in TIERS else tier


def in_order(tiers: Mapping[str, object] | set[str]) -> list[str]:
    """In order of precedence."""
    return sorted(tiers, key=lambda tier: (list(TIERS).index(tier) if tier in TIERS else len(TIERS), tier))


def shown(field: str, value: float) -> str:
    """With its unit, as text for users."""
    if field.endswith("_mib"):
        return f"{value:,.0f} MiB" if value < 10_240 else f"{value / 1_024:,.1f} GiB"
    if field.endswith("_ms"):
        return time_text(value)
    return f"{value:.1f}%" if field.endswith("_percent") else f"{value:.2g}"


def time_text(ms: float) -> str:
    """`420 ms`, `12 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= 2 * size or (unit == "s" and ms >= size):
            return f"{ms / size:.1f} {unit}"
    return f"{ms:.0f} ms"


def scores(found: Accuracy) -> Table | None:
    """Per tier and field; for bounds the share of runs that used no more, with its 95 % interval."""
    rows = []
    for tier in in_order(found.tiers):
        for name, score in found.tiers[tier].items():
            held = ""
            if not math.isnan(score.broken):
                part = share(round((1 - score.broken) * score.runs), score.runs)
                held = f"{part.value:.1%} ({part.low:.1%} to {part.high:.1%})"
            texts = (
                TITLES[name],
                f"{score.runs:,}",
                f"{score.median_ratio:.2f}",
                f"{score.p95_off:,.2f}",
                held,
            )
            rows.append([Cell(name_of(tier), colour=colour_of(tier)), *map(Cell, texts)])
    heads = ("From", "Field", "Runs", "Estimate / use, median", "95% within a factor of", "Bound held")
    return _table(heads, rows, 2)


def owners(found: Accuracy) -> Table | None:
    """Owners' own requests against the use of their jobs."""
    rows = [
        [Cell(one.owner), Cell(TITLES[one.field]), Cell(f"{one.runs:,}"), Cell(f"{one.asked_to_used:.1f}")]
        for one in found.over_asking
    ]
    return _table(("Owner", "Field", "Runs", "Asked for / used, median"), rows, 2)


def worst(found: Accuracy) -> Table | None:
    rows = []
    for job in found.worst:
        estimate, used = shown(job.field, job.estimate), shown(job.field, job.used)
        who = (job.run.job_id, job.run.info.owner, name_of(job.tier), TITLES[job.field])
        texts = (*who, estimate, used, f"{job.ratio:.2g}")
        rows.append([Cell(text) for text in texts])
    return _table(("Job", "Owner", "From", "Field", "Estimate", "Used", "Estimate / use"), rows, 4)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], texts: int) -> Table | None:
    return Table(heads, rows, texts) if rows else None


def summary(found: Accuracy) -> list[str]:
    """One sentence per finding."""
    lines = [f"{found.runs:,} finished runs, {sum(found.rejected.values()):,} of them rejected."]
    lines += [f"{count:,} × {reason} that cannot be true." for reason, count in found.rejected.items()]
    lines += [f"{count:,} × disturbed: {reason}." for reason, count in found.disturbed.items()]
    lines += [f"{count:,} × run time corrected by {what}." for what, count in found.corrected.items()]
    if found.killed:
        lines.append(f"{found.killed:,} workers were killed for exceeding their estimate of host memory.")
    if found.remaining is not None:
        eta = found.remaining
        lines.append(
            f"Remaining time, estimated at half of {eta.runs:,} runs: {eta.held.value:.1%} inside the "
            f"{eta.level:.0%} interval ({eta.held.low:.1%} to {eta.held.high:.1%} with 95% confidence); "
            f"{eta.early:.1%} ended sooner, {eta.late:.1%} later; median error {eta.median_off - 1:.1%}."
        )
    return lines
