"""Truth models by name, made for one trace. Source data is read here, so that the models stay pure."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from penstock.events.facts import PlacerSettings
from penstock.policies.profiles import policy_for
from penstock.policies.tiresias import Tiresias
from penstock.simulator.muri import MuriWork
from penstock.simulator.reading import BadTrace, Problem, Row, header_of, rows, text_of
from penstock.simulator.traces import Trace, data_root
from penstock.simulator.truth import Constant, SteadyWork, Work

STAGE_PROFILES = "stage_profiles.csv"


class UnknownTruth(LookupError):
    """No truth model has this name; the message lists those that exist."""


def _constant(trace: Trace, path: Path, settings: PlacerSettings) -> Work:
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


def _muri(trace: Trace, path: Path, settings: PlacerSettings) -> Work:
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


TRUTHS: Mapping[str, Callable[[Trace, Path, PlacerSettings], Work]] = MappingProxyType(
    {"constant": _constant, "muri": _muri}
)


def work_for(truth: str, trace: Trace, path: Path, settings: PlacerSettings) -> Work:
    """The work of a run. Raises `UnknownTruth`, or `BadTrace` where the trace lacks what the truth rests on."""
    make = TRUTHS.get(truth)
    if make is None:
        raise UnknownTruth(f"{truth!r} is no truth model; there are {', '.join(sorted(TRUTHS))}")
    return make(trace, path, settings)
