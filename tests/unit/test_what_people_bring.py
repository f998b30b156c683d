"""Inputs on which days of users went wrong elsewhere: each has a test, and the table in tests/README.md names
it."""

import ast
import re

from tests.support.cli.command_process import ROOT

ROW = re.compile(r"^\| ([a-z][^|]*) \| `([\w/.]+\.py)::(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "tests/README.md").read_text().partition("## What people bring")[2])


def in_the_ci_run(path: str) -> set[str]:
    """Tests of a file that are not marked as slow."""
    text = (ROOT / "tests" / path).read_text()
    assert not re.search(r"^pytestmark = .*\bslow\b", text, re.MULTILINE), path
    return {
        one.name
        for one in ast.parse(text).body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("slow" in ast.unparse(mark) for mark in one.decorator_list)
    }


def test_what_people_bring_has_a_test_in_the_ci_run() -> None:
    """A test is renamed or becomes slow, and nobody remembers why it was there."""
    known = {path: in_the_ci_run(path) for _, path, _ in ROWS}
    assert [f"{brought}: {path}::{name}" for brought, path, name in ROWS if name not in known[path]] == []


def test_the_table_is_read() -> None:
    """A row of another form would be looked at by nobody."""
    table = (ROOT / "tests/README.md").read_text().partition("## What people bring")[2].partition("\n## ")[0]
    assert len(ROWS) == len(re.findall(r"^\| ", table, re.MULTILINE)) - 1 >= 30


def test_nodes_let_tasks_lock_memory() -> None:
    """NCCL over InfiniBand registers gigabytes: a service has 8 MiB by default, and its tasks inherit
    that."""
    unit = (ROOT / "infra/deploy/penstock-node-reporter.service").read_text()
    assert "\nLimitMEMLOCK=infinity\n" in unit
