"""Supply chain of the locked packages: a bill of materials (SBOM, CycloneDX 1.6), and an audit.

    python -m infra.supply_chain sbom OUT.json
    python -m infra.supply_chain audit [--said FILE]

The bill is made offline, from requirements.lock and the environment. The audit asks an advisory service for
known vulnerabilities, through pip-audit, and ends with 1 where a package has one. Where no service answers it
says that it has not run, and ends with 0.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import typer
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import __version__

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
SHIPPED = "penstock[local,s3]"
"""What users install; the other locked packages are tools of this repository."""
LOCKED = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)[^\n]*\n((?:    --hash=[^\n]*\n)*)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
ANSWER_WITHIN_S = 15  # of one request to the advisory service
MAX_REASON_CHARS = 160  # one line of a CI run
AUDIT_WITHIN_S = 300  # a service that answers needs 0.2 s a package
ACCEPTED: Mapping[str, str] = MappingProxyType({})
"""Id of a vulnerability → why it does not concern Penstock."""

app = typer.Typer(add_completion=False)


class Locked(NamedTuple):
    """A package of the lock. `name`: normalised; `hashes`: SHA-256 of the files that may be installed."""

    name: str
    version: str
    hashes: tuple[str, ...]


class Audit(NamedTuple):
    """What pip-audit found. `problem`: why it did not answer; empty: it did."""

    audited: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    problem: str = ""


def read_lock(text: str) -> list[Locked]:
    return [
        Locked(canonicalize_name(name), version, tuple(HASH.findall(hashes)))
        for name, version, hashes in LOCKED.findall(text)
    ]


# ------------------------------------------------------------------------------------------ bill of materials


def bill(locked: list[Locked]) -> Bom:
    """Of the locked packages. `scope`: `required` for those that users install, else `excluded`."""
    bom, root = Bom(), Component(name="penstock", version=__version__, type=ComponentType.APPLICATION)
    bom.metadata.component = root
    shipped, needs = _needed(SHIPPED), {each.name: _needed(each.name, deep=False) for each in locked}
    components = {each.name: _component(each, each.name in shipped) for each in locked}
    bom.components.update(components.values())
    for name, component in components.items():
        bom.register_dependency(component, [components[need] for need in needs[name] if need in components])
    direct = _needed(SHIPPED, deep=False) - {"penstock"}
    bom.register_dependency(root, [components[name] for name in direct if name in components])
    return bom


def _component(locked: Locked, shipped: bool) -> Component:
    license_name = _license(locked.name)
    return Component(
        name=locked.name,
        version=locked.version,
        type=ComponentType.LIBRARY,
        scope=ComponentScope.REQUIRED if shipped else ComponentScope.EXCLUDED,
        purl=PackageURL("pypi", None, locked.name, locked.version),
        bom_ref=f"{locked.name}=={locked.version}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in locked.hashes],
        licenses=[DisjunctiveLicense(name=license_name)] if license_name else [],
    )


def _license(name: str) -> str:
    """As an installed package states it: its expression, else its classifiers; else empty."""
    try:
        stated = distribution(name).metadata
    except PackageNotFoundError:
        return ""
    classifiers = [
        text.rpartition(" :: ")[2] for text in stated.get_all("Classifier") or () if "License ::" in text
    ]
    expressions = stated.get_all("License-Expression") or classifiers
    return " AND ".join(expressions)


def _needed(name: str, *, deep: bool = True) -> set[str]:
    """Installed packages that a requirement such as `penstock[s3]` needs here; with `deep` theirs, too."""
    found: set[str] = set()
    todo, seen = [Requirement(name)], set()
    while todo:
        asked = todo.pop()
        for need in _requirements(asked):
            key = (canonicalize_name(need.name), frozenset(need.extras))
            found.add(key[0])
            if key not in seen and (deep or key[0] == "penstock"):  # an extra may name other extras
                seen.add(key)
                todo.append(need)
    return found


def _requirements(of: Requirement) -> Iterator[Requirement]:
    try:
        stated = distribution(of.name).requires or ()
    except PackageNotFoundError:
        return
    for text in stated:
        need = Requirement(text)
        if need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in (of.extras or {""})
        ):
            yield need


# ------------------------------------------------------------------------------------------------------ audit


def audit_of(requirements: str) -> Audit:
    """Asks pip-audit for these pinned requirements."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "asked.txt", Path(folder) / "answer.json"
        asked.write_text(requirements)
        argv = [
            sys.executable,
            "-P",
            "-m",
            "pip_audit",
            "-r",
            str(asked),
            "--disable-pip",
            "--require-hashes",
        ]
        argv += ["--progress-spinner", "off", "--timeout", str(ANSWER_WITHIN_S)]
        argv += ["--format", "json", "--output", str(answer)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=AUDIT_WITHIN_S)
        except subprocess.TimeoutExpired:
            return Audit(problem=f"no answer within {AUDIT_WITHIN_S} s")
        if not answer.exists():
            return Audit(problem=(done.stderr.strip().splitlines() or ["no answer"])[-1][:MAX_REASON_CHARS])
        return read_audit(json.loads(answer.read_text()))


def read_audit(answer: Mapping[str, Any]) -> Audit:
    """Packages that the service does not know are `left_out`: pip-audit itself would count them as well."""
    audited, left_out, found = [], [], []
    for package in answer["dependencies"]:
        if "skip_reason" in package:
            left_out.append(package["name"])
            continue
        audited.append(package["name"])
        for each in package["vulns"]:
            if not ACCEPTED.keys() & {each["id"], *each["aliases"]}:
                mended = ", ".join(each["fix_versions"]) or "no version yet"
                found.append(f"{package['name']} {package['version']}: {each['id']}, mended in {mended}")
    problem = "" if audited else "no advisory service knows any of these packages"
    return Audit(tuple(audited), tuple(left_out), tuple(found), problem)


def said(audit: Audit) -> list[str]:
    """The result in lines for a reader of a CI run."""
    if audit.problem:
        return [f"audit for known vulnerabilities: NOT RUN: {audit.problem}"]
    lines = [
        f"audit for known vulnerabilities: {len(audit.audited)} packages, {len(audit.found)} vulnerabilities"
    ]
    if audit.left_out:
        lines.append(f"NOT AUDITED, unknown to the service: {', '.join(audit.left_out)}")
    return [*lines, *audit.found]


@app.command("sbom")
def write_bill(out: Annotated[Path, typer.Argument(help="File to write, CycloneDX 1.6 as JSON.")]) -> None:
    """Write the bill of materials of requirements.lock."""
    found = bill(read_lock(LOCK.read_text()))
    out.write_text(
        make_outputter(found, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"
    )
    print(f"{out}: {len(found.components)} packages")


@app.command("audit")
def audit_lock(
    said_in: Annotated[
        Path | None, typer.Option("--said", help="File for the result, one line or more.")
    ] = None,
) -> None:
    """Audit requirements.lock; ends with 1 where a package has a known vulnerability."""
    text = LOCK.read_text()
    first = LOCKED.search(text)
    assert first is not None, f"{LOCK} names no package"
    audit = audit_of(first[0])  # one package shows whether a service answers
    if not audit.problem:
        audit = audit_of(text)
    if said_in is not None:
        said_in.write_text("\n".join(said(audit)) + "\n")
    print("\n".join(said(audit)))
    raise typer.Exit(1 if audit.found else 0)


if __name__ == "__main__":
    app()
