"""`penstock estimator report` on a ledger and on the gateway's events: both tell the same."""

from pathlib import Path

import orjson
import pytest

from penstock.cluster.nouns import Usage
from penstock.estimator.evaluate.command import main
from penstock.events.doors import TaskExited
from penstock.ledger.record import GENESIS, read_valid
from penstock.testing.driver import CellDriver, estimate, node_spec


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Three jobs of one cell, each promised 1,024 MiB of GPU memory; the last used twice as much."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for number, used_mib in enumerate((512, 1_000, 2_048)):
        job_id = f"job-{number}"
        cell.submit(job_id, need=estimate().model_copy(update={"tier": "default"}))
        cell.start(job_id)
        job = cell.job(job_id)
        usage = Usage(gpu_memory_mib=used_mib, cpu_ms=60_000)
        cell.feed(
            TaskExited(
                node_id="n1", task_id=f"{job_id}.1.w0", token=job.token, cause="exited", exit_code=0,
                started_ms=cell.now_ms, exited_ms=cell.now_ms + 60_000, usage=usage,
            )
        )  # fmt: skip
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(cell.values) + b"\n")
    return path


def told(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> dict[str, object]:
    assert main(["report", *arguments, "-o", "json"]) == 0
    found: dict[str, object] = orjson.loads(capfdbinary.readouterr().out)
    return found


def test_a_ledger_and_its_events_tell_the_same(
    ledger: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """An operator asks the running cell; a colleague asks the file that was saved: one answer."""
    found = told(capfdbinary, "--ledger", str(ledger))
    memory = found["tiers"]["default"]["gpu_memory_mib"]  # type: ignore[index]
    assert (memory["runs"], memory["median_ratio"], memory["broken"]) == (3, 1.024, pytest.approx(1 / 3))
    assert found["worst"][0]["job_id"] in ("job-0", "job-2")  # type: ignore[index]
    events, head = ledger.with_name("events.jsonl"), GENESIS
    with events.open("wb") as file:
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
                file.write(orjson.dumps(row) + b"\n")
    assert told(capfdbinary, "--events", str(events)) == found


def test_the_table_is_for_people(ledger: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--ledger", str(ledger)]) == 0
    text = capfd.readouterr().out
    assert "3 finished runs, 0 of them set aside" in text
    assert "gpu_memory_mib 2,048 used, 1,024 said by default" in text


@pytest.mark.parametrize(
    ("name", "content", "option", "problem"),
    [
        ("none", None, "--ledger", "No such file"),
        ("empty", b"", "--ledger", "no line is a first record"),
        ("text", b"hello\n", "--ledger", "no line is a first record"),
        ("events", b'{"seq": 1}\n', "--events", "line 1: no event"),
    ],
)
def test_what_is_no_ledger_is_refused(
    tmp_path: Path,
    name: str,
    content: bytes | None,
    option: str,
    problem: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["report", option, str(path)]) == 2
    assert problem in capfd.readouterr().err
