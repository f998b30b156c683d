"""What nobody needs is found: events without maker or reader, settings without test, verbs without a line."""

from typing import ClassVar

import pytest

from infra.lints.budgets import Source
from infra.lints.unused import (
    Uses,
    idle_events,
    options,
    unsaid,
    untested,
    uses,
    variables,
    verbs,
    without_source,
)
from penstock.commandline import Entry
from penstock.model.schema.event import Event


class Sent(Event, frozen=True):
    TYPE: ClassVar[str] = "penstock.test.sent"


class Kept(Event, frozen=True):
    TYPE: ClassVar[str] = "penstock.test.kept"


EVENTS = (Sent, Kept)
MAKER = "def send() -> Sent:\n    return Sent()\n"
READER = "HANDLERS = {facts.Sent: on_sent}\n"


def found(*texts: str, path: str = "services/a.py") -> Uses:
    return uses([Source(path, text) for text in texts], EVENTS)


def test_an_event_that_is_made_and_read_by_nobody_is_found() -> None:
    """A service published a plan once; then both its maker and its reader were deleted, and the event
    stayed."""
    lines = list(idle_events(EVENTS, found(MAKER, READER), silent=()))
    assert [line.partition(";")[0] for line in lines] == [
        "Kept: nothing makes this event",
        "Kept: nothing reads this event",
    ]
    assert list(idle_events(EVENTS, found(MAKER, READER), silent=(Kept,))) == [], (
        "it was published, and stays readable"
    )


def test_a_maker_is_no_reader() -> None:
    """The annotation of what a function returns, and the call that constructs it, are its maker's."""
    assert found(MAKER) == Uses({"Sent"}, set())
    assert found("event = checked(facts.Sent, fields)\n") == Uses({"Sent"}, set())
    assert found("NAME = f'{Sent.TYPE}.v1'\n") == Uses({"Sent"}, set())


@pytest.mark.parametrize(
    "reader",
    [
        READER,
        "match event:\n    case facts.Sent():\n        pass\n",
        "ok = isinstance(event, Sent)\n",
        "def fold(state: State, fact: Sent) -> None: ...\n",
        'LINES = {"penstock.test.sent": str}\n',
    ],
)
def test_readers_have_many_forms(reader: str) -> None:
    """A table, a match, a check, a handler's argument; the command line has only the type's text."""
    assert found(reader) == Uses(set(), {"Sent"})
    assert found(reader, path="libs/penstock/model/wire/speakers.py") == Uses(set(), set()), (
        "the model only knows it"
    )


def test_an_option_that_no_test_names_is_found_under_each_of_its_names() -> None:
    """A flag may have another name than its argument; a test may use either, or its variable."""
    text = (
        "import typer\n"
        "class Options:\n"
        "    limit_mib: Annotated[int, typer.Option('--limit')] = 1\n"
        "    dry_run: Annotated[bool, typer.Option(help='…')] = False\n"
        '    rack: Annotated[str, typer.Option(envvar="PENSTOCK_RACK")] = ""\n'
    )
    services = [Source("services/options.py", text)]
    assert options(services) == {"--limit": "limit_mib", "--dry-run": "dry_run", "--rack": "rack"}
    assert variables(services) == {"PENSTOCK_RACK"}
    assert options([Source("libs/options.py", text)]) == {}
    lines = list(untested(options(services), "Options(limit_mib=3); run('--rack')"))
    assert lines == ["--dry-run: no test names this setting; test it, or delete it"]


def test_a_verb_without_a_line_in_a_page_is_found() -> None:
    """Pages name verbs of a group in one cell: `penstock get jobs|nodes`."""
    entries = {
        "up": Entry("Start."),
        "get": Entry("List.", entries={"jobs": Entry("Jobs."), "gpus": Entry("GPUs.")}),
    }
    commands = list(verbs(entries))
    assert commands == ["penstock up", "penstock get jobs", "penstock get gpus"]
    assert list(unsaid(commands, r"| `penstock get jobs\|gpus` | lists |")) == [
        "penstock up: no page has a line about this verb"
    ]


def test_a_number_without_its_source_is_found_with_its_line() -> None:
    """Beside one with a comment, one with a docstring, and one below a comment of its own."""
    text = (
        'MAX = 3\n"""Measured: a fourth changes nothing."""\nHALF = 0.5  # Source: §3\n# Bound of the wire '
        "type\n"
        "TOP = 9\nAGEING = 0.25\n"
    )
    assert list(without_source(Source("libs/penstock/cluster/a.py", text))) == [
        "libs/penstock/cluster/a.py:6: AGEING: a number without its source, measurement or bound"
    ]
