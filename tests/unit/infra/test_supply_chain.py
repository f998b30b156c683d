"""Bill of materials and audit of the locked packages, without a network: a service's answers are played."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from infra import supply_chain
from infra.supply_chain import LOCK, Audit, audit_lock, audit_of, bill, read_audit, read_lock, said

LOCKED = read_lock(LOCK.read_text())


def test_every_locked_package_is_in_the_lock_as_it_is_read() -> None:
    """A package that the pattern misses would be in no bill and in no audit."""
    lines = [line for line in LOCK.read_text().splitlines() if line[:1].isalnum()]
    assert len(LOCKED) == len(lines) > 100
    assert all(each.hashes for each in LOCKED), "what is installed is what was locked"


def test_the_bill_names_all_packages_and_which_of_them_users_get() -> None:
    """A vulnerability is published: is the package among what was deployed, or a tool of developers?"""
    text = make_outputter(bill(LOCKED), OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found = {each["name"]: each for each in json.loads(text)["components"]}
    assert found.keys() == {each.name for each in LOCKED}
    assert found["aiokafka"]["scope"] == found["uvicorn"]["scope"] == found["s3fs"]["scope"] == "required"
    assert found["yarl"]["scope"] == "required", "a dependency of a dependency"
    assert found["pytest"]["scope"] == found["pip-audit"]["scope"] == "excluded"
    assert found["uvicorn"]["purl"].startswith("pkg:pypi/uvicorn@")
    assert found["uvicorn"]["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    needs = {each["ref"]: each.get("dependsOn", []) for each in json.loads(text)["dependencies"]}
    assert any(ref.startswith("h11==") for ref in needs[found["uvicorn"]["bom-ref"]])


def package(name: str, *ids: str) -> dict[str, Any]:
    vulns = [{"id": each, "aliases": [f"CVE-{each}"], "fix_versions": ["2.0"]} for each in ids]
    return {"name": name, "version": "1.0", "vulns": vulns}


def unknown(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": f"Dependency not found: {name}"}


@pytest.mark.parametrize(
    ("packages", "lines", "problem"),
    [
        (
            [package("a"), package("b")],
            ["audit for known vulnerabilities: 2 packages, 0 vulnerabilities"],
            False,
        ),
        (
            [package("a", "X-1"), package("b")],
            ["audit for known vulnerabilities: 2 packages, 1 vulnerabilities", "a 1.0: X-1, mended in 2.0"],
            True,
        ),
        (
            [package("a"), unknown("b")],
            [
                "audit for known vulnerabilities: 1 packages, 0 vulnerabilities",
                "NOT AUDITED, unknown to the service: b",
            ],
            False,
        ),
        (
            [unknown("a"), unknown("b")],
            ["audit for known vulnerabilities: NOT RUN: no advisory service knows any of these packages"],
            False,
        ),
    ],
)
def test_an_audit_says_what_it_did_not_look_at(
    packages: list[dict[str, Any]], lines: list[str], problem: bool
) -> None:
    """A mirror without advisories answers "no vulnerabilities" to every question: that is not an audit."""
    audit = read_audit({"dependencies": packages})
    assert said(audit) == lines
    assert bool(audit.found) == problem


def test_an_accepted_vulnerability_is_named_by_any_of_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_chain, "ACCEPTED", {"CVE-X-1": "its function is not called"})
    assert read_audit({"dependencies": [package("a", "X-1", "X-2")]}).found == ("a 1.0: X-2, mended in 2.0",)


def test_an_audit_without_a_network_has_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of a machine without a way out must not look like one in which nothing was found."""
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # taken, and nobody listens
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.getsockname()[1]}")
    monkeypatch.setenv("NO_PROXY", "")
    first = LOCKED[0]
    hashes = " ".join(f"--hash=sha256:{digest}" for digest in first.hashes)
    [line] = said(audit_of(f"{first.name}=={first.version} {hashes}\n"))
    assert line.startswith("audit for known vulnerabilities: NOT RUN: ")
    nobody.close()


@pytest.mark.parametrize(
    ("audit", "status"),
    [(Audit(("a",), found=("a 1.0: X-1",)), 1), (Audit(("a",)), 0), (Audit(problem="no answer"), 0)],
)
def test_a_known_vulnerability_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, audit: Audit, status: int
) -> None:
    """The audit's result is the CI run's, and stands in the file that its last lines repeat."""
    monkeypatch.setattr(supply_chain, "audit_of", lambda _: audit)
    with pytest.raises(typer.Exit) as ended:
        audit_lock(tmp_path / "said")
    assert ended.value.exit_code == status
    assert (tmp_path / "said").read_text().splitlines() == said(audit)
