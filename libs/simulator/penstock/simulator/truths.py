"""Truth models by name, made for one trace. Source data is read here, so that the models stay pure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.events.facts import PlacerSettings
from penstock.policies.profiles import policy_for
from penstock.policies.tiresias import Tiresias
from penstock.simulator.measured import read_model
from penstock.simulator.muri import MuriWork
from penstock.simulator.placement_table import TableWork
from penstock.simulator.reading import BadTrace, Problem, Row, header_of, rows, text_of
from penstock.simulator.traces import DATA_VARIABLE, Trace, data_root
from penstock.simulator.truth import Constant, SteadyWork, Work

STAGE_PROFILES = "stage_profiles.csv"
MEASURED = "pollux/traces"


class Run(NamedTuple):
    """What a truth may have to know of the run."""

    gpus_per_node: int = 8
    tick_s: float = 0.0


class UnknownTruth(LookupError):
    """No truth model has this name; the message lists those that exist."""


def _constant(trace: Trace, path: Path, settings: PlacerSettings, run: Run) -> Work:
    """Every job needs a run time."""
    without = [job.job_id for job in trace.jobs if job.duration_s <= 0]
    if without:
        raise BadTrace(
            str(path),
            [
                Problem(
                    0, "", f"truth constant needs run times; format {trace.format} has none: {without[0]}, …"
                )
            ],
        )
    return SteadyWork(Constant())


def _muri(trace: Trace, path: Path, settings: PlacerSettings, run: Run) -> Work:
    """Stage times from the trace, start-up times from `stage_profiles.csv` beside it, above it or in the data."""
    without = [job.job_id for job in trace.jobs if job.stages is None]
    if without:
        raise BadTrace(str(path), [Problem(0, "", "truth muri needs stage times: a trace of format muri")])
    start_up_s = _start_up(path)
    unknown = sorted({(job.model, job.gpus) for job in trace.jobs} - start_up_s.keys())
    if unknown:
        raise BadTrace(
            str(path),
            [
                Problem(0, "model_name", f"{STAGE_PROFILES} has no start-up time of {model} on {gpus} GPUs")
                for model, gpus in unknown
            ],
        )
    policy = policy_for(settings)
    limits: Sequence[float] = policy.limits_gpu_s if isinstance(policy, Tiresias) else ()
    return MuriWork(start_up_s, limits)


def _start_up(path: Path) -> dict[tuple[str, int], float]:
    """(model, GPUs) → seconds."""
    root = data_root()
    places = [path.parent / STAGE_PROFILES, path.parent.parent / STAGE_PROFILES]
    if root is not None:
        places.append(root / "muri" / STAGE_PROFILES)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise BadTrace(str(path), [Problem(0, "", f"truth muri needs {STAGE_PROFILES} beside the trace")])
    text = text_of(found)
    columns = header_of(found, text)
    missing = sorted({"model", "num_gpu", "startup_overhead_s"} - set(columns))
    if missing:
        raise BadTrace(str(found), [Problem(1, column, "missing") for column in missing])
    problems: list[Problem] = []

    def read(row: Row) -> tuple[tuple[str, int], float]:
        return (row.name("model"), row.whole("num_gpu", least=1)), row.number("startup_overhead_s")

    start_up_s = dict(entry for _, entry in rows(text, columns, read, problems))
    if problems:
        raise BadTrace(str(found), problems)
    return start_up_s


def _table(trace: Trace, path: Path, settings: PlacerSettings, run: Run) -> Work:
    """Pollux's measurements, from the data sets."""
    root = data_root()
    if root is None or not (root / MEASURED).is_dir():
        raise BadTrace(
            str(path), [Problem(0, "", f"truth placement-table needs {MEASURED} in {DATA_VARIABLE}")]
        )
    without = [job.job_id for job in trace.jobs if not job.model or job.batch_size is None]
    if without:
        raise BadTrace(
            str(path),
            [Problem(0, "", f"truth placement-table needs models and batch sizes: {without[0]}, …")],
        )
    known = {place.name for place in (root / MEASURED).iterdir() if place.is_dir()}
    unknown = sorted({job.model for job in trace.jobs} - known)
    if unknown:
        raise BadTrace(
            str(path), [Problem(0, "application", f"{model} was not measured") for model in unknown]
        )
    models = {name: read_model(root / MEASURED / name) for name in sorted({job.model for job in trace.jobs})}
    return TableWork(models, run.gpus_per_node, run.tick_s)


Make = Callable[[Trace, Path, PlacerSettings, Run], Work]
TRUTHS: Mapping[str, Make] = MappingProxyType(
    {"constant": _constant, "muri": _muri, "placement-table": _table}
)


def work_for(truth: str, trace: Trace, path: Path, settings: PlacerSettings, run: Run = Run()) -> Work:  # noqa: B008
    """The work of a run. Raises `UnknownTruth`, or `BadTrace` where the trace lacks what the truth rests on."""
    make = TRUTHS.get(truth)
    if make is None:
        raise UnknownTruth(f"{truth!r} is no truth model; there are {', '.join(sorted(TRUTHS))}")
    return make(trace, path, settings, run)
