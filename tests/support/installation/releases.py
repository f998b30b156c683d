"""Code of two versions beside each other: that of a commit, and a next version derived from the working tree.

No second release exists, so the next one is made here: the same code with each kind of addition that decision
127 allows, all of them in use. A place that is not there any more fails.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from infra.devservers.build_cache import REPOSITORY
from penstock import __version__
from penstock.ledger.fold.evolve import FOLD_VERSION

PARTS = ("libs", "services")
NEXT = "99.0.0"
TABLES = ("jobs", "tasks", "nodes", "gpus", "events", "decisions", "positions", "snapshots")
MODEL, PLACER = "libs/penstock/model", "services/penstock_services/placer"
NODE = "services/penstock_services/node_reporter"
MIGRATIONS = "services/penstock_services/projector/migrations"


class Release(NamedTuple):
    """A version's code. `name`: for display."""

    name: str
    root: Path

    @property
    def path(self) -> str:
        """`PYTHONPATH` of its processes."""
        return ":".join(str(self.root / part) for part in PARTS)


class Change(NamedTuple):
    """`old` stands once in the file."""

    file: str
    old: str
    new: str


NEW_DECISION = """@event
class ColourChosen(Event, frozen=True, kw_only=True):
    TYPE = "penstock.colour.chosen"

    job_id: Identifier
    colour: Literal["green"] = "green"


@event
class StopDecided("""
NEW_REPORT = """@event
class NodeGreeted(NodeEvent, frozen=True, kw_only=True):
    TYPE = "penstock.node.greeted"


@event
class GpuFaulted("""
ADDITIONS = "ADDITIONS: Mapping[type[Event], tuple[Addition, ...]] = MappingProxyType(\n    {\n"
NEW_ROWS = f"""from penstock.model.decisions import ledger_events
from penstock.model.inputs import estimates, external_events

{ADDITIONS}        ledger_events.ColourChosen: (Addition(ANY),),
        external_events.NodeGreeted: (Addition(ANY),),
        external_events.TaskExited: (Addition(ANY, "exhausted", frozenset({{"patience"}})),),
        estimates.JobEstimated: (Addition(ANY, "estimate.tier", frozenset({{"oracle"}})),),
"""
NEXT_VERSION = (
    Change("libs/penstock/__init__.py", f'"{__version__}"', f'"{NEXT}"'),
    Change(
        "libs/penstock/ledger/fold/evolve.py",
        f"FOLD_VERSION = {FOLD_VERSION}",
        f"FOLD_VERSION = {FOLD_VERSION + 1}",
    ),
    Change(
        f"{MODEL}/wire/additions.py",
        ADDITIONS,
        NEW_ROWS,
    ),
    # a decision of a new type, at each estimate
    Change(f"{MODEL}/decisions/ledger_events.py", "@event\nclass StopDecided(", NEW_DECISION),
    Change(
        f"{PLACER}/core/decide.py",
        "        job = state.jobs.get(event.job_id)\n        if job is not None and job.in_line:\n           "
        " yield from self._arrived",
        "        yield ledger_events.ColourChosen(job_id=event.job_id)\n"
        "        job = state.jobs.get(event.job_id)\n        if job is not None and job.in_line:\n           "
        " yield from self._arrived",
    ),
    # a report of a new type, before each joining
    Change(f"{MODEL}/inputs/external_events.py", "@event\nclass GpuFaulted(", NEW_REPORT),
    Change(
        f"{MODEL}/wire/speakers.py",
        "        external_events.GpuFaulted: _OF_ITSELF,\n",
        "        external_events.GpuFaulted: _OF_ITSELF,\n        external_events.NodeGreeted: _OF_ITSELF,\n",
    ),
    Change(
        f"{NODE}/shell/node.py",
        "        joined = joining(self.state",
        "        from penstock.model.inputs.external_events import NodeGreeted\n\n"
        '        greeted = self._envelope(f"greeted-{number}", NodeGreeted(node_id=self.spec.node_id))\n'
        "        self.feed([greeted], durable=True)\n"
        "        joined = joining(self.state",
    ),
    # new values, in each exit and each estimate
    Change(
        f"{MODEL}/inputs/external_events.py",
        'Literal["", "host_memory", "gpu_memory"]',
        'Literal["", "host_memory", "gpu_memory", "patience"]',
    ),
    Change(
        f"{NODE}/core/machine.py",
        '("host_memory" if cause == "out_of_memory" else "")',
        '("host_memory" if cause == "out_of_memory" else "patience")',
    ),
    Change(
        f"{MODEL}/nouns/types.py",
        'Literal["user", "history", "model", "nearest", "default"]',
        'Literal["user", "history", "model", "nearest", "default", "oracle"]',
    ),
    Change(
        "services/penstock_services/estimator/shell/publisher.py",
        "        headers, value = to_wire(envelope)\n",
        "        from msgspec.structs import replace\n\n"
        '        if hasattr(event, "estimate"):\n'
        '            event = replace(event, estimate=replace(event.estimate, tier="oracle"))\n'
        "        headers, value = to_wire(replace(envelope, data=event))\n",
    ),
    # new optional fields, in what nodes say of themselves and in orders to them
    Change(
        f"{MODEL}/nouns/nodes.py",
        '    rack: Identifier = "rack-0"\n',
        '    rack: Identifier = "rack-0"\n    colour: str = "green"\n',
    ),
    Change(
        f"{MODEL}/decisions/orders.py",
        '    prelaunch: bool = False\n    """It launches',
        '    colour: str = "green"\n    prelaunch: bool = False\n    """It launches',
    ),
)


def working_tree() -> Release:
    """The code under test, in place."""
    return Release(__version__, REPOSITORY)


def next_version(folder: Path) -> Release:
    """The next version, in a folder of its own."""
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for change in NEXT_VERSION:
        file = folder / change.file
        text = file.read_text()
        assert text.count(change.old) == 1, f"{change.file} has not once: {change.old}"
        file.write_text(text.replace(change.old, change.new))
    migrations = folder / MIGRATIONS
    number = len(list(migrations.glob("*.sql"))) + 1
    (migrations / f"{number:04}_colours.sql").write_text(
        "".join(f"ALTER TABLE {table} ADD COLUMN colour text NOT NULL DEFAULT 'green';\n" for table in TABLES)
        + "CREATE INDEX jobs_by_colour ON jobs (colour);\n"
    )
    return Release(NEXT, folder)


def of_commit(commit: str, folder: Path) -> Release | None:
    """The code of a commit; None: this clone does not have the commit."""
    known = subprocess.run(["git", "-C", REPOSITORY, "cat-file", "-e", f"{commit}^{{commit}}"], check=False)
    if known.returncode:
        return None
    archive = folder / "release.tar"
    subprocess.run(["git", "-C", REPOSITORY, "archive", "-o", archive, commit, *PARTS], check=True)
    subprocess.run(["tar", "-C", folder, "-xf", archive], check=True)
    return Release(commit, folder)
