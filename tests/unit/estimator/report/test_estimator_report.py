"""`penstock estimator report` gives the same figures from a ledger and from the gateway's events."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from penstock.ledger.record.record import GENESIS, read_valid
from penstock.model.inputs.external_events import TaskExited
from penstock.model.nouns.types import Usage
from tests.support.cli.command_line import penstock
from tests.support.cluster.driver import CellDriver, estimate, node_spec
from tests.unit.estimator.month import month as month_of


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Three jobs of one cell, each promised 1,024 MiB of GPU memory; the last used twice as much."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for number, used_mib in enumerate((512, 1_000, 2_048)):
        job_id = f"job-{number}"
        cell.submit(job_id, need=msgspec.structs.replace(estimate(), tier="default"))
        cell.start(job_id)
        job = cell.job(job_id)
        usage = Usage(gpu_memory_mib=used_mib, cpu_ms=60_000)
        cell.feed(
            TaskExited(
                node_id="n1",
                task_id=f"{job_id}.1.w0",
                token=job.token,
                cause="exited",
                exit_code=0,
                started_ms=cell.now_ms,
                exited_ms=cell.now_ms + 60_000,
                usage=usage,
            )
        )
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(cell.values) + b"\n")
    return path


def report(
    capfdbinary: pytest.CaptureFixture[bytes], *arguments: str, events: Iterable[bytes] = ()
) -> dict[str, object]:
    assert penstock("estimator", "report", *arguments, "-o", "json", events=events) == 0
    found: dict[str, object] = orjson.loads(capfdbinary.readouterr().out)
    return found


def test_a_ledger_and_its_events_predict_the_same(
    ledger: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """An operator asks the running cell; a colleague asks the file that was saved: one answer."""
    found = report(capfdbinary, "--ledger", str(ledger))
    memory = found["tiers"]["default"]["gpu_memory_mib"]  # type: ignore[index]
    assert (memory["runs"], memory["median_ratio"], memory["broken"]) == (3, 1.024, pytest.approx(1 / 3))
    assert found["worst"][0]["job_id"] in ("job-0", "job-2")  # type: ignore[index]
    events, head = list[bytes](), GENESIS
    for line in ledger.read_bytes().splitlines():
        valid = read_valid(head, line)
        assert valid is not None
        head, record = valid
        for fact in record.facts:
            kind = fact.type.rpartition(".v")[0]
            row = {
                "seq": record.seq,
                "at_ms": record.now_ms,
                "type": kind,
                "data": orjson.Fragment(bytes(fact.data)),
            }
            events.append(orjson.dumps(row))
    assert report(capfdbinary, events=events) == found


def test_the_table_is_for_people(ledger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert penstock("estimator", "report", "--ledger", str(ledger)) == 0
    text = capfd.readouterr().out
    assert "3 finished runs, 0 of them rejected" in text
    assert re.search(r"job-0 +\S+ +default +GPU memory +1,024 MiB +512 MiB +2\n", text)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none", None, "No such file"),
        ("empty", b"", "empty: a ledger was expected"),
        ("text", b"hello\n", "none of its 1 lines begins one"),
    ],
)
def test_what_is_no_ledger_is_refused(
    tmp_path: Path, name: str, content: bytes | None, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert penstock("estimator", "report", "--ledger", str(path)) == 2
    assert problem in capfd.readouterr().err


def test_an_event_that_cannot_be_read_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert penstock("estimator", "report", events=[b'{"seq": 1}']) == 2
    assert "line 1: no event" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------ drawings


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 jobs of a small cell; see `tests.unit.estimator.month`."""
    path = tmp_path_factory.mktemp("month") / "ledger.jsonl"
    path.write_bytes(b"\n".join(month_of(120).values) + b"\n")
    return path


def charts_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page.read_text())
    assert found is not None
    charts: dict[str, Any] = orjson.loads(found[1])
    return charts


def test_a_month_is_drawn_on_a_page_and_as_pictures(
    month: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The operator looks at the month: one page to send round, pictures for the slides; their numbers are the
    table's."""
    page, folder = tmp_path / "month.html", tmp_path / "pictures"
    asked = ["estimator", "report", "--ledger", str(month), "--report", str(page), "--png", str(folder)]
    assert penstock(*asked, "-o", "json") == 0
    answered = orjson.loads(capfd.readouterr().out)
    charts, text = charts_of(page), page.read_text()
    assert "http://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S), "nothing is fetched"
    memory = charts["pairs-0-0"]
    tables = list(memory["datasets"].values())
    points = Counter(next(columns for columns in tables if "tier" in columns)["tier"])
    runs = {
        tier: fields["gpu_memory_mib"]["runs"]
        for tier, fields in answered["tiers"].items()
        if "gpu_memory_mib" in fields
    }
    assert points.total() == sum(runs.values())
    assert points["learned model"] == runs["model"], "after 60 runs a model answered"
    assert memory["layer"][0]["mark"] == {
        "type": "area",
        "clip": True,
        "color": "#D55E00",
        "opacity": 0.12,
    }, "above the bound is shaded"
    utilisation = charts["pairs-0-3"]
    assert "area" not in {layer["mark"]["type"] for layer in utilisation["layer"]}, "its estimate is a mean"
    assert {name.partition("-")[0] for name in charts} == {"pairs", "drift", "remaining"}
    assert answered["over_asking"][0]["owner"] == "dan"
    assert re.search(r"<th[^>]*>dan</th>", text), "the page names him too"
    assert answered["worst"][0]["job_id"] in text
    pictures = sorted(path.name for path in folder.iterdir())
    assert pictures == ["drift.png", "pairs.png", "remaining.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_intervals_of_remaining_time_are_computed(month: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each run was answered at its half: with a tenth to either side and a spread of 6 %, nine of ten
    intervals hold."""
    assert penstock("estimator", "report", "--ledger", str(month), "-o", "json") == 0
    answered = orjson.loads(capfd.readouterr().out)["remaining"]
    assert (answered["runs"], answered["level"]) == (120, 0.9)
    assert 0.82 < answered["held"]["value"] < 0.98
    assert answered["held"]["low"] < answered["held"]["value"] < answered["held"]["high"]
    assert answered["held"]["value"] + answered["early"] + answered["late"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--report", "{here}"), "is a folder; name a file"),
        (("--report", "{here}/nowhere/page.html"), "there is no folder"),
        (("--png", "{here}/ledger.jsonl"), "name a folder"),
    ],
)
def test_where_nothing_can_be_written_it_is_published_before_the_work(
    ledger: Path, arguments: tuple[str, str], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    where = arguments[1].format(here=ledger.parent)
    assert penstock("estimator", "report", "--ledger", str(ledger), arguments[0], where) == 2
    answered = capfd.readouterr()
    assert problem in answered.err
    assert arguments[0] in answered.err
    assert answered.out == ""


def test_a_cell_without_a_finished_job_has_nothing_to_draw(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cell = CellDriver()
    cell.join(node_spec("n1"))
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(cell.values) + b"\n")
    assert (
        penstock("estimator", "report", "--ledger", str(path), "--report", str(tmp_path / "page.html")) == 2
    )
    assert "nothing to draw: no job has succeeded yet" in capfd.readouterr().err
    assert penstock("estimator", "report", "--ledger", str(path)) == 0
