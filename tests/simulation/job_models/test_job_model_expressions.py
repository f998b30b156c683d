"""The text that names a job model, and what is reported where it or the trace does not hold what it needs."""

import ast
import importlib
from pathlib import Path

import pytest

from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.catalogue import checked_job_model, job_models, work_for
from penstock.simulator.job_models.expression import UnknownJobModel, Wanted, parse
from penstock.simulator.job_models.measurements.convergence import Convergence, LossCurve
from penstock.simulator.job_models.model import Constant, End
from penstock.simulator.job_models.sharing import Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.services.port import Attached
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import Trace
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import Listener, ends, job

SETTINGS = PlacerSettings()


def trace_of(*jobs: TraceJob) -> Trace:
    return Trace("t", "csv", jobs, (), {one.job_id: line for line, one in enumerate(jobs, start=2)})


def test_job_models_stand_around_each_other() -> None:
    """From inside to outside, with options: white space does not matter."""
    inner = Wanted("colocation", None, {"gpu": "k80", "unmeasured": "split"})
    links = Wanted("links", inner, {})
    text = " phases( links(colocation(gpu=k80,unmeasured = split)) , launch_s=20.5,save_s=0 ) "
    assert parse(text) == Wanted("phases", links, {"launch_s": "20.5", "save_s": "0"})
    assert parse("constant") == parse("constant()") == Wanted("constant", None, {})
    for name in job_models():
        assert checked_job_model(name).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a name was expected, not its end"),
        ("links(", "a name was expected, not its end"),
        ("links(cpu", "',' or ')' is missing after 'cpu'"),
        ("links(cpu))", "')' was not expected"),
        ("links(cpu,,)", "links needs OPTION=VALUE in this place"),
        ("phases(save_s=1,save_s=2)", "save_s stands twice in phases"),
        ("phases(save_s=-1)", "can stand in no job model"),
        ("phases(save_s=)", "',' or ')' is missing"),
        ("a(b(c(d(e(f(g(h(i))))))))", "more than 8 job models around each other"),
        ("links(muri)", "job model muri brings its own work: nothing can stand around it"),
        ("muri(constant)", "job model muri stands around no other: leave out constant"),
        ("cpu(constant)", "job model cpu stands around no other: leave out constant"),
        ("magic", "'magic' is not a job model; there are bandwidth, colocation, constant"),
        ("phases(speed=2)", "job model phases: no option speed; there are launch_s, save_s"),
        ("cpu(speed=2)", "job model cpu: no option speed; there are parallel"),
        ("stages(speed=2)", "job model stages: no option speed; it has none"),
    ],
)
def test_a_text_that_names_no_job_model_is_refused(text: str, message: str) -> None:
    """Typed in a hurry, on a command line: one line states what is wrong and what would be right."""
    with pytest.raises(UnknownJobModel) as caught:
        checked_job_model(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_have_ranges() -> None:
    for text in ("phases(launch_s=long)", "phases(launch_s=1e9)"):
        with pytest.raises(UnknownJobModel, match=r"launch_s=.*: between 0 and 86,400 seconds"):
            work_for(text, trace_of(job("a", 0, 1)), Path("t.csv"), SETTINGS)


def test_every_job_without_a_measurement_is_reported_with_its_line() -> None:
    """A trace without stage times for `links`, which needs some: each line, before anything runs."""
    trace = trace_of(job("a", 0, 1), job("b", 0, 1))
    with pytest.raises(BadFile) as caught:
        work_for("links", trace, Path("t.csv"), SETTINGS)
    assert str(caught.value).splitlines() == [
        "t.csv: line 2, column model: stages: job a has no stage times, or nothing beside its network",
        "t.csv: line 3, column model: stages: job b has no stage times, or nothing beside its network",
    ]
    with pytest.raises(BadFile, match=r"line 2, column duration_s: job model shared-node needs run times"):
        work_for("shared-node", trace_of(job("a", 0, 0)), Path("t.csv"), SETTINGS)


def test_a_job_model_without_its_table_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    for text, where in (("colocation", "gavel"), ("cpu", "synergy"), ("convergence", "charrnn")):
        with pytest.raises(BadFile, match=f"job model {text} needs {where}; set PENSTOCK_DATA"):
            work_for(text, trace_of(job("a", 0, 1)), Path("t.csv"), SETTINGS)


def test_phases_and_losses_reach_those_who_listen() -> None:
    """One job of 100 s on two nodes: each of its two tasks reports its phases to the placer, the chief its
    loss to a service, and the job holds its GPUs from the first launch to the last save."""
    listener = Listener()
    curve = LossCurve([(0.0, 2.0), (1.0, 0.0)])
    work = SteadyWork(Phases(Convergence(Constant(), {"m": curve}), 18.0, 5.0), loss_every_s=25.0)
    values: list[bytes] = []
    found = Simulation(
        nodes_of("2x4"),
        PlacerSettings(profile="fifo"),
        work,
        [TraceJob("a", 0, 100.0, 8, "m")],
        Options(check_every_step=True, services=(Attached(listener),)),
        values.append,
    )
    assert ends(found) == {"a": 123.0}
    inputs = [value for batch in listener.batches for value in batch]
    samples = [value for value in inputs if isinstance(value, TelemetrySampled)]
    assert [(sample.at_ms, sample.loss) for sample in samples] == [
        (43_000, 1.5),
        (68_000, 1.0),
        (93_000, 0.5),
    ]
    assert {sample.task_id for sample in samples} == {"a.1.w0"}
    phases = [value for value in values if b"penstock.task.phase_changed" in value]
    assert [b'"train"' in value for value in phases] == [True, True, False, False]
    assert found.figures(1, 1).gpu_allocation == pytest.approx(1)
    assert found.figures(1, 1).gpu_utilisation == pytest.approx(100 / 123)


def test_a_work_of_its_own_stands_alone() -> None:
    """`constant` through the table gives the plain work: it ends as in the trace."""
    work = work_for("constant", trace_of(job("a", 0, 12.5)), Path("t.csv"), SETTINGS)
    work.admit(job("a", 0, 12.5), 0.0)
    work.started("a", {}, 0.0)
    assert work.advance(12.5).ended == [End("a", 12.5)]


PURE = (
    "penstock.simulator.job_models.measurements.interpolation",
    "penstock.simulator.job_models.model",
    "penstock.simulator.job_models.steady",
    "penstock.simulator.job_models.measurements.colocation",
    "penstock.simulator.job_models.measurements.cores",
    "penstock.simulator.job_models.measurements.convergence",
    "penstock.simulator.job_models.sharing",
    "penstock.simulator.job_models.measurements.steps",
    "penstock_papers.job_models.muri",
    "penstock_papers.job_models.muri_period",
    "penstock.simulator.job_models.turns",
    "penstock.simulator.job_models.measurements.placement_table",
)


@pytest.mark.parametrize("module", PURE)
def test_no_job_model_rests_on_what_penstock_decides_with(module: str) -> None:
    """Whoever judged a policy by that policy's own model would find it perfect: job models import types,
    events and each other, and neither files nor random numbers."""
    found = importlib.import_module(module)
    assert found.__file__ is not None
    tree = ast.parse(Path(found.__file__).read_text())
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    allowed = {"penstock.simulator.traces.jobs", *PURE}
    allowed |= {"penstock.model.nouns.types", "penstock.model.inputs.external_events"}
    ours = {name for name in names if name.startswith("penstock")}
    assert ours <= allowed
    assert not names & {
        "random",
        "numpy",
        "os",
        "io",
        "pathlib",
        "time",
        "datetime",
        "asyncio",
        "sklearn",
        "scipy",
    }
