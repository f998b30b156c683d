"""What the report says beside its pictures: titles, what to look for, and what is left out."""

from collections.abc import Callable, Mapping
from textwrap import fill
from types import MappingProxyType
from typing import NamedTuple

from penstock_services.estimator.core.accuracy import Reckoning
from penstock_services.estimator.evaluate.drawn.picture import Panel, Picture

PROMISED = 0.95  # a model promises the upper end of a 90% interval: one run in twenty lies above


class Section(NamedTuple):
    title: str
    says: str


def wrapped(text: str, width: int) -> str:
    return fill(text, width)


def section(key: str, picture: Picture) -> Section:
    """Of `pairs`, `promises`, `drift`, `owners`, `remaining`."""
    return SECTIONS[key](picture)


def of_panel(panel: Panel) -> str:
    """One line below the panel's title."""
    if panel.score is None:
        return "only asked for by users"
    score = panel.score
    text = f"{score.runs:,} runs: by the median {score.median_ratio:.2f} times used,\n95% within a factor of {factor(score.p95_off)}"
    return text + (f"; broken by {score.broken:.1%}" if panel.bound else "")


def factor(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def lead(found: Reckoning) -> list[str]:
    """What came out, in sentences."""
    aside = sum(found.set_aside.values())
    lines = [f"{found.runs:,} finished runs" + (f", {aside:,} of them set aside." if aside else ".")]
    if found.killed:
        lines.append(f"{found.killed:,} workers were killed for more host memory than they were promised.")
    memory = {
        tier: fields["gpu_memory_mib"] for tier, fields in found.tiers.items() if "gpu_memory_mib" in fields
    }
    if "model" in memory:
        score = memory["model"]
        lines.append(
            f"The learned model's promise of GPU memory held in {1 - score.broken:.1%} of {score.runs:,} runs and was, by the "
            f"median, {score.median_ratio:.2f} times what was used."
        )
    if found.remaining is not None:
        told = found.remaining
        lines.append(
            f"Remaining time was told in {told.runs:,} runs; the {told.level:.0%} interval held in {told.held.value:.1%} of them."
        )
    if found.over_asking:
        one = found.over_asking[0]
        lines.append(
            f"{one.owner} asks for the most that is not used: {one.asked_to_used:.1f} times the {field_text(one.field)}."
        )
    return lines


def field_text(field: str) -> str:
    """`GPU memory`, `cores`, `run time`."""
    plain = field.removesuffix("_mib").removesuffix("_percent").removesuffix("_ms")
    return plain.replace("_", " ").replace("gpu", "GPU")


def _pairs(picture: Picture) -> Section:
    left_out = sum(panel.left_out for panel in picture.panels)
    drawn = f" {left_out:,} points are left out, evenly over time." if left_out else ""
    return Section(
        "Said against used",
        "Each point is a run. On the diagonal an estimate was exactly right; right of it too much was said. Of GPU memory, "
        "host memory and cores the estimate is a promise: what lies above the diagonal broke it. The others are means, and "
        f"dotted lines mark twice and half.{drawn}",
    )


def _promises(picture: Picture) -> Section:
    return Section(
        "Promises kept",
        "The share of runs that used no more than was promised, with the interval that holds the true share 95 times in 100. "
        f"A model promises GPU memory as the upper end of a 90% interval, so {PROMISED:.0%} of that should be kept (dashed). "
        "The tier is the one that led the estimate; what it left open came from those after it.",
    )


def _drift(picture: Picture) -> Section:
    marks = " Dotted lines: a new model version answers." if picture.versions else ""
    return Section(
        "Drift",
        "Said / used over time, by when the runs ended (UTC): the median, and the band that holds eight of ten runs. On the "
        f"line at 1 the estimate is right; a step away from it is a change in code, data or library.{marks}",
    )


def _owners(picture: Picture) -> Section:
    return Section(
        "Who asks for more than is used",
        "What owners asked for themselves against what their jobs used, by the median of their runs. Left to the estimator, "
        "most of it could run other jobs.",
    )


def _remaining(picture: Picture) -> Section:
    told = picture.found.remaining
    says = (
        "Each point is a run that was told at its half how long it still takes: what was really left, as a multiple of what was "
        "said. Its bar is the interval that was told."
    )
    if told is not None:
        says += (
            f" {told.held.value:.1%} of {told.runs:,} intervals held what came ({told.held.low:.1%} to {told.held.high:.1%} with "
            f"95% certainty; promised: {told.level:.0%}); {told.early:.1%} ended sooner, {told.late:.1%} later. By the median "
            f"{told.median_off - 1:.1%} off."
        )
    return Section("Remaining time", says)


SECTIONS: Mapping[str, Callable[[Picture], Section]] = MappingProxyType(
    {"pairs": _pairs, "promises": _promises, "drift": _drift, "owners": _owners, "remaining": _remaining}
)
