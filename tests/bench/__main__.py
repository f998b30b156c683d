"""`python -m tests.bench`: measures, writes bench.json and prints it as a table. `make bench` calls it.

Each bench runs in a fresh process on two cores. Progress goes to stderr. The exit status is whether all
benches ran (0) or one failed (1); whether the goals were met is in the table.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.figures import BENCHES, GOALS
from tests.bench.machine import CORES, calibrate_ms, keep_to_two_cores

BUSY_RATIO = 1.3  # a calibration whose median lies so far above its best: somebody else uses the cores
BENCH_TIMEOUT_S = 900
CALIBRATION = "machine_calibration_ms"
"""A fixed piece of pure Python: compare it before comparing times of different machines or moments."""
README = Path(__file__).with_name("README.md")
TABLE_HEAD = ("| name | value | unit | reach | |", "|---|---:|---|---:|---|")
MARK_BEGIN, MARK_END = "<!-- measured -->", "<!-- end -->"


def main() -> int:
    arguments = _arguments()
    keep_to_two_cores()
    if arguments.here is not None:
        return _here(arguments.here, arguments)
    progress = Console(stderr=True, highlight=False)
    wanted = [bench for bench in BENCHES if not arguments.only or _matches(bench, arguments.only)]
    if not wanted:
        progress.print(f"nothing matches {' '.join(arguments.only)}; there are: {', '.join(BENCHES)}")
        return 2
    rows, failed = [], []
    for bench in wanted:
        best_ms, median_ms = calibrate_ms()
        busy = median_ms > BUSY_RATIO * best_ms
        progress.print(f"{bench} … (calibration {best_ms:.1f} ms{', [red]busy machine[/]' if busy else ''})")
        began = time.perf_counter()
        values = _elsewhere(bench, arguments)
        if values is None:
            failed.append(bench)
            continue
        progress.print(f"{bench}: {time.perf_counter() - began:.0f} s")
        rows += [_row(name, value, best_ms) for name, value in values.items()]
        rows.append(
            {"name": f"{CALIBRATION}_{bench}", "value": round(best_ms, 3), "unit": "ms", "reach": None}
        )
    Path(arguments.out).write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    _show(rows)
    if arguments.readme:
        README.write_text(into_readme(README.read_text(), rows))
    for bench in failed:
        progress.print(f"[red]{bench} failed[/]; its error is above")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="benches or figures, or how their names begin"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="of each run that lasts (default: 60)")
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes in all; the goals are for full runs"
    )
    parser.add_argument("--out", default="bench.json", metavar="PATH")
    parser.add_argument(
        "--readme", action="store_true", help="also put the rows into the table of tests/bench/README.md"
    )
    parser.add_argument(
        "--here", metavar="BENCH", help=argparse.SUPPRESS
    )  # in this process, values on stdout
    return parser.parse_args()


def _matches(bench: str, wanted: list[str]) -> bool:
    names = [bench, *(name for name, goal in GOALS.items() if goal.bench == bench)]
    return any(name.startswith(word) for word in wanted for name in names)


def _here(bench: str, arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    from tests.bench.benches import QUICK, RUNS, Size

    size = QUICK if arguments.quick else Size()
    if arguments.seconds:
        size = replace(size, seconds=arguments.seconds)
    print(json.dumps(RUNS[bench](size)))
    return 0


def _elsewhere(bench: str, arguments: argparse.Namespace) -> dict[str, float] | None:
    """The bench's values from a process of its own; None if it failed."""
    argv = [sys.executable, "-m", "tests.bench", "--here", bench]
    argv += ["--quick"] if arguments.quick else []
    argv += ["--seconds", str(arguments.seconds)] if arguments.seconds else []
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=BENCH_TIMEOUT_S, check=False)
    if done.returncode != 0:
        return None
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def into_readme(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with the rows of these benches put in place of their old ones; all others stay as they were
    measured.

    In the order in which benches run. Figures that a bench no longer reports go with its old rows.
    """
    head, rest = text.split(MARK_BEGIN)
    table, tail = rest.split(MARK_END)
    lines: dict[str, list[str]] = {}
    for line in table.strip().splitlines()[2:]:
        lines.setdefault(_bench_of(line.split("`")[1]), []).append(line)
    measured: dict[str, list[str]] = {}
    for row in rows:
        measured.setdefault(_bench_of(row["name"]), []).append(
            f"| `{row['name']}` | {_shown(row)} | {row['unit']} | {row['reach'] or ''} | {_verdict(row)} |"
        )
    merged = {**lines, **measured}
    body = "\n".join([*TABLE_HEAD, *(line for bench in BENCHES for line in merged.get(bench, ()))])
    return f"{head}{MARK_BEGIN}\n{body}\n{MARK_END}{tail}"


def _bench_of(name: str) -> str:
    """That reports this figure; empty: none does any more."""
    if name.startswith(CALIBRATION):
        return name.removeprefix(f"{CALIBRATION}_")
    goal = GOALS.get(name)
    return "" if goal is None else goal.bench


def _shown(row: dict[str, Any]) -> str:
    value = row["value"]
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _verdict(row: dict[str, Any]) -> str:
    goal = GOALS.get(row["name"])
    return "" if goal is None else {True: "met", False: "not met", None: ""}[goal.met(row["value"])]


def _row(name: str, value: float, calibration_ms: float) -> dict[str, Any]:
    """`calibrated`: a time as a multiple of the calibration loop's, for comparing machines."""
    goal = GOALS[name]
    row: dict[str, Any] = {"name": name, "value": round(value, 3), "unit": goal.unit, "reach": goal.reach}
    times_ms = {"ms": value, "s": value * 1_000, "µs": value / 1_000}.get(goal.unit)
    if times_ms is not None:
        row["calibrated"] = round(times_ms / calibration_ms, 4)
    return row


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Penstock on {CORES} cores", title_justify="left")
    for heading, justify in (
        ("name", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("reach", "right"),
        ("", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        verdict = _verdict(row)
        style = {"met": "green", "not met": "red"}.get(verdict, "")
        table.add_row(row["name"], _shown(row), row["unit"], row["reach"] or "", verdict, style=style)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


if __name__ == "__main__":
    sys.exit(main())
