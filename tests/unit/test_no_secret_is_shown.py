"""A password, token or key given wrongly: no message, log line, report or dump shows it. A canary of its own
for each door."""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.codegen.examples import EXAMPLES, example_bytes
from penstock.cli.app import run as penstock
from penstock.cli.session import Session
from penstock.errors import PenstockError
from penstock.local.lock import same_log
from penstock.log.dead_letters import dead_letter
from penstock.log.open import open_log
from penstock.log.port import Headers, Partition, Record
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.schema.errors import EventError
from penstock.model.schema.outline import outline
from penstock.model.wire.envelope import from_wire
from penstock.runtime.database.postgres import check_dsn
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock.text.redaction import without_password, without_passwords
from penstock_services.gateway.core.access import parse_tokens
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.cloudevents import structured
from penstock_services.gateway.core.requests.submission import spec_from_json, spec_from_yaml
from penstock_services.node_reporter.shell.link import connection
from penstock_services.node_reporter.shell.link.connection import Connection
from tests.support.gateway.canaries import found_in, new_canary

BAD_RECORDS: tuple[tuple[str, bytes | None], ...] = (
    ('{{"job_id": "j", "spec": {{"command": ["x"], "env": {{"PASSWORD": ["{}"]}}}}}}', None),
    ('{{"job_id": "j", "spec": {{"command": ["x"]}}, "unknown": {{"deep": ["{}"]}}}}', None),
    ('{{"job_id": "{} or so", "spec": {{}}}}', None),
    ('{{"node_id": "n1", "token": "{} 7", "reason": "{}"}}', None),
    ('{{"job_id": "j", "spec": "{}"', None),
    ("PASSWORD={}", None),
    ("{{}}", b"Bearer {}"),
)
"""Value and a header's text of records that cannot be read."""

Door = Callable[[str], str]
"""What is shown to whoever gives this canary."""

LOGS = (
    "kafka://u:{}@127.0.0.1",
    "kafka://u:{}",
    "kafka://u:{}:127.0.0.1:9",
    "kafka://u:{}@",
    "u:{}@127.0.0.1:9092",
    "kafka:u:{}@127.0.0.1:9092",
    "kafka://{}@127.0.0.1:9092",
    "kafka://127.0.0.1:9092?password={}",
    "kafka://127.0.0.1:9092?{}",
    "kafka://u:{}@127.0.0.1:9092?sasl=plain",
    "host=127.0.0.1 password={}",
)
DATABASES = (
    "postgresql://u:{}@127.0.0.1:1/d",
    "postgresql://u:{}/x@127.0.0.1:1/d",
    "postgresql://u:{}#x@127.0.0.1:1/d",
    "postgresql://u:{}?x@127.0.0.1:1/d",
    "postgresql://u:x@{}@127.0.0.1:1/d",
    "postgresql://u:x[{}@127.0.0.1:1/d",
    "postgresql://u:{}",
    "postgres:u:{}@127.0.0.1/d",
    "u:{}@127.0.0.1:1/d",
    "mysql://u:{}@127.0.0.1/d",
    "host=127.0.0.1 port=1 password={}",
    "postgresql://127.0.0.1:1/d?password={}",
    "postgresql://127.0.0.1:1/d?sslpassword={}",
    "postgresql://127.0.0.1:1/d?PASSWORD={}",
    "postgresql://127.0.0.1:1/d?pass={}",
)
SERVERS = (
    "http://u:{}@127.0.0.1:1",
    "http://{}@127.0.0.1:1",
    "http://u:{}/x@127.0.0.1:1",
    "http://127.0.0.1:1/?token={}",
    "htp://u:{}@127.0.0.1:1",
    "u:{}@127.0.0.1:1",
)
JOBS = (
    "command: [x]\nenv: PASSWORD={}",
    "command: [x]\nenv: [PASSWORD={}]",
    "command: [x]\nenv: {{PASSWORD: [{}]}}",
    "command: [x]\nenv: {{PASSWORD: {{secret: {} is it}}}}",
    "command: [x]\nsecrets: {{PASSWORD: /{}}}",
    "command: [x]\nsecrets: {}",
    "command: {{run: python train.py --token={}}}",
    "command: [x]\npassword: {}",
    "command: [x]\nname: {} or so",
    "command: [x]\nlabels: {}",
    "command: [x]\nowner: {} or so",
    "command: [x]\nresources: {}",
    "command: [x]\nresources: {{gpus: {}}}",
    "command: [x]\nresources: {{host_memory: {}}}",
    "command: [x]\nrun_timeout: {}",
    "command: [x]\ntraits: [{}]",
    "command: [x]\nenv: {{PASSWORD: *{}}}",
    "command: [x]\nenv: {{PASSWORD: !{} x}}",
    "command: [x\nenv: {{PASSWORD: '{}'}}",
    "command: [x]\nenv: {{PASSWORD: '{}}}",
    "command: [x]\n  PASSWORD: {}",
    "{}",
)
BODIES = (
    '{{"command": ["x"], "password": "{}"}}',
    '{{"command": ["x"], "env": {{"PASSWORD": ["{}"]}}}}',
    '{{"command": "x {}"}}',
    '{{"command": ["x"], "secrets": {{"PASSWORD": "/{}"}}}}',
    '{{"command": ["x"], "resources": {{"gpus": "{}"}}}}',
    '{{"command": ["x"], "category": "{}"}}',
    '{{"command": ["x"], "env": {{"PASSWORD": "{}"',
    '"{}"',
)
TOKENS = (
    "{}",
    "{} roles=read",
    f"sha256:{'0' * 64} {{}}",
    f"sha256:{'0' * 64} roles=read token={{}}",
    f"sha256:{'0' * 64} roles=read {{}}=1",
    f"sha256:{'0' * 64} roles={{}}",
    f"sha256:{'0' * 64} roles=submit tenant=/{{}}",
)
EVENT = '{"specversion": "1.0", "id": "e", "source": "/t", "type": "penstock.job.submitted.v1", "data": %s}'
EVENTS = (
    '{{"job_id": "/{}", "spec": {{"command": ["x"]}}}}',
    '{{"job_id": "j", "spec": {{"command": ["x"], "env": "{}"}}}}',
    '{{"job_id": "j", "spec": {{"command": ["x"]}}, "password": "{}"}}',
)
HEADERS = (("ce_specversion", b"1.0"), ("ce_id", b"e"), ("ce_source", b"/t"))
RECORDS = (
    ("penstock.job.submitted.v1", '{{"job_id": "j", "spec": {{"command": ["x"], "env": {{"A": ["{}"]}}}}}}'),
    ("penstock.job.submitted.v1", '{{"job_id": "{}'),
    ("penstock.node.cordoned.v1", '{{"node_id": 1, "by": "{}", "reason": []}}'),
)
COMMANDS = (
    ("submit", "-e", "{}", "--", "true"),
    ("submit", "--secret", "{}", "--", "true"),
    ("submit", "--label", "{}", "--", "true"),
    ("submit", "--gpus", "{}", "--", "true"),
    ("submit", "--host-memory", "{}", "--", "true"),
    ("up", "--nodes", "{}"),
)


def refusal(call: Callable[[], object]) -> str:
    """The message of the error that this raises, and the whole of what a traceback of it would show."""
    try:
        call()
    except (PenstockError, Problem, EventError, ValueError) as error:
        body = error.body() if isinstance(error, Problem) else ""
        chain = "" if isinstance(error, Problem | EventError) else _chain(error)
        return f"{error} {body} {chain}"
    raise AssertionError("not refused")


def _chain(error: BaseException | None) -> str:
    return "" if error is None else f"{error}\n{_chain(error.__cause__)}"


def helped(*arguments: str, **env: str) -> str:
    return printed(*arguments, fails=False, **env)


def printed(*arguments: str, fails: bool = True, **env: str) -> str:
    """By a command of `penstock`."""
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in env.items():
            patch.setenv(name, value)
        assert (penstock(arguments) != 0) == fails
    assert output.getvalue()
    return output.getvalue()


def with_file(text: str, *words: str, **env: str) -> Door:
    """A command of which `FILE` is a file with this text."""

    def door(canary: str) -> str:
        path = Path(os.environ["PYTEST_FOLDER"]) / "given"
        path.write_text(text.format(canary))
        given = {name: value.format(canary) for name, value in env.items()}
        return printed(*(word.replace("FILE", str(path)) for word in words), **given)

    return door


def reported(*arguments: str) -> str:
    """The command line as a report shows it."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.app.Session", lambda line: lines.append(line) or Session(line))
        penstock(arguments)
    return str(lines[0])


def of_url(call: Callable[[str], object]) -> Callable[[str], Door]:
    return lambda url: lambda canary: refusal(lambda: call(url.format(canary)))


async def standing(url: str) -> None:
    """Until its first attempt has failed and was logged."""
    failed = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection.logger, "filters", [lambda record: failed.set() or True])
        await first_of(Connection(url, "n0", None).keep(), failed.wait())


def dsn_at_start(url: str) -> None:
    asyncio.run(
        check_dsn(Settings.from_env({"PENSTOCK_DSN": url, "PENSTOCK_LOG": "kafka://h:1"}).need_dsn("x"))
    )


def placer_at_start(url: str) -> None:
    """The embedded log of a service."""
    asyncio.run(_start(Settings.from_env({"PENSTOCK_LOG": url}).log_url))


async def _start(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.log.postgres.embedded.OUTAGE_LIMIT_S", 0.1)
        await open_log(url, "placer").start()


def of_command(*words: str, **env: str) -> Door:
    """A command that fails, in whose words or environment `{}` is the canary."""

    def door(canary: str) -> str:
        given = {name: value.format(canary) for name, value in env.items()}
        return printed(*(word.format(canary) for word in words), **given)

    return door


def of_record(kind: str, text: str) -> Door:
    headers = (*HEADERS, ("ce_type", kind.encode()))
    return lambda canary: refusal(lambda: from_wire(headers, text.format(canary).encode()))


def letter_about(value: bytes, headers: Headers) -> DeadLettered:
    """As a service writes and a reader reads it."""
    record = Record(Partition("penstock.jobs.v1", 0), 17, value, headers, None, 0)
    message = dead_letter(record, "placer", "invalid", "spec.env: Input should be a valid string")
    letter = from_wire(message.headers, message.value).data
    assert isinstance(letter, DeadLettered)
    assert letter.sha256 == hashlib.sha256(value).hexdigest()
    return letter


def of_letter(value: str, header: bytes | None) -> Door:
    def door(canary: str) -> str:
        given = (header or b"").replace(b"{}", canary.encode())
        return str(letter_about(value.format(canary, canary).encode(), (*HEADERS, ("authorization", given))))

    return door


def settings(canary: str) -> Settings:
    return Settings(
        log_url=f"kafka://u:{canary}@h:1", dsn=f"postgresql://u:{canary}@h/d", otlp=f"http://u:{canary}@h"
    )


def two_logs(canary: str) -> None:
    for user in "ab":
        same_log(Path(os.environ["PYTEST_FOLDER"]), f"kafka://{user}:{canary}@h:1")


AWAY = ("--server", "http://127.0.0.1:1", "get", "jobs")
DOORS: dict[str, Door] = {
    **{f"log {url}": of_url(lambda found: open_log(found, "placer"))(url) for url in LOGS},
    **{f"database {url}": of_url(dsn_at_start)(url) for url in DATABASES},
    **{f"embedded log {url}": of_url(placer_at_start)(url) for url in DATABASES[1:6]},
    **{f"up {url}": with_file("", "up", "--folder", "FILE.up", PENSTOCK_DSN=url) for url in DATABASES[:6]},
    **{f"server {url}": of_command("get", "jobs", PENSTOCK_SERVER=url) for url in SERVERS},
    **{f"doctor {url}": of_command("doctor", PENSTOCK_SERVER=url) for url in SERVERS},
    **{
        f"standing connection {url}": of_url(lambda found: asyncio.run(standing(found)))(url)
        for url in SERVERS[2:3]
    },
    **{f"job file {text}": with_file(text, "submit", "--dry-run", "-f", "FILE") for text in JOBS},
    **{f"job in YAML {text}": of_url(lambda found: spec_from_yaml(found.encode()))(text) for text in JOBS},
    **{f"job in JSON {text}": of_url(lambda found: spec_from_json(found.encode()))(text) for text in BODIES},
    **{f"event {text}": of_url(lambda found: structured((EVENT % found).encode()))(text) for text in EVENTS},
    **{f"record {kind} {text}": of_record(kind, text) for kind, text in RECORDS},
    **{f"dead letter {value} {header!r}": of_letter(value, header) for value, header in BAD_RECORDS},
    **{f"tokens {text}": of_url(parse_tokens)(text) for text in TOKENS},
    **{f"command {' '.join(words)}": of_command(*words) for words in COMMANDS},
    "record's time": lambda canary: refusal(
        lambda: from_wire((*HEADERS, ("ce_type", b"x.v1"), ("ce_time", canary.encode())), b"{}")
    ),
    "token of two lines": with_file("{}\nsecond", "--token-file", "FILE", *AWAY),
    "token with an accent": with_file("{}\u00e9", "--token-file", "FILE", *AWAY),
    "help": lambda canary: helped(
        "up", "--help", PENSTOCK_LOG=f"kafka://u:{canary}@h:1", PENSTOCK_OTLP=f"http://u:{canary}@h"
    ),
    "help of all": lambda canary: helped(
        "--help", PENSTOCK_SERVER=f"http://u:{canary}@h:1", PENSTOCK_DSN=f"postgresql://u:{canary}@h/d"
    ),
    "settings": lambda canary: repr(settings(canary)),
    "settings refused": of_url(lambda found: Settings(log_url=[found], cell_index=found))("{}"),
    "folder of another log": of_url(two_logs)("{}"),
    "report": lambda canary: reported("--server", f"https://u:{canary}@gateway", "version"),
}


@pytest.mark.parametrize("name", DOORS)
def test_what_is_refused_does_not_show_the_secret_in_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first line of a log goes to a ticket, a CI's output to everybody: a typing error must not publish a
    password."""
    monkeypatch.setenv("PYTEST_FOLDER", str(tmp_path))
    canary = new_canary()
    with caplog.at_level(logging.DEBUG):
        shown = DOORS[name](canary)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "given"]
    for where, text in {
        "message": shown.encode(),
        "log": caplog.text.encode(),
        "files": b"".join(files),
    }.items():
        assert found_in(text, [canary]) == [], where


def test_a_dead_letter_shows_where_the_record_is_and_what_is_wrong_with_it() -> None:
    """An operator looks for the record at its place, knows by its digest that it is the one, and sees which
    field to mend."""
    value = (
        b'{"job_id": "ci-7", "spec": {"command": ["python", "train.py"], "env": {"PASSWORD": ["x"]}, '
        b'"gpus": 4}}'
    )
    letter = letter_about(value, (*HEADERS, ("ce_type", b"penstock.job.submitted.v1"), ("mac", b"1234")))
    assert letter.subject() == "penstock.jobs.v1/0/17"
    assert (letter.reason, letter.size_bytes) == ("invalid", len(value))
    assert json.loads(letter.outline) == {
        "job_id": "ci-7",
        "spec": {
            "command": ["<text of 6>", "<text of 8>"],
            "env": {"PASSWORD": ["<text of 1>"]},
            "gpus": "<number>",
        },
    }
    shown = {"ce_specversion": "1.0", "ce_id": "e", "ce_source": "/t", "ce_type": "penstock.job.submitted.v1"}
    assert letter.headers == {**shown, "mac": "<text of 4>"}


@pytest.mark.parametrize(
    "value",
    [b"", b"[" * 100_000, b"1" * 6_000, b'"\\ud800"', b"\xff", b'{"a": NaN}', b"[" + b"1," * 30_000 + b"1]"],
)
def test_any_record_has_a_dead_letter(value: bytes) -> None:
    """What cannot be read may be anything, and its letter must be readable."""
    assert letter_about(value, (("caf\ufffd", b"\xff"),) if value == b"" else ()).size_bytes == len(value)


@pytest.mark.parametrize(
    "url", [*LOGS, *DATABASES, *SERVERS, "http://h/?a=b&{}", "postgresql://u:{}@[::1]:1,h:2/d?host=x"]
)
def test_a_url_is_shown_without_its_password(url: str) -> None:
    """However it is broken; and what was typed wrongly in it can still be seen where it is whole."""
    assert "s3cret" not in without_password(url.format("s3cret"))
    assert "s3cret" not in without_passwords(f"cannot reach '{url.format('s3cret')}'") or "://" not in url
    whole = "kafka://ana:pw@h1:9092,h2:9092?ca=/etc/ca.pem"
    assert without_password(whole) == "kafka://ana:***@h1:9092,h2:9092?ca=/etc/ca.pem"
    assert without_password("http://127.0.0.1:8742") == "http://127.0.0.1:8742"


def misplaced(found: object, canary: str) -> Iterator[object]:
    """The same JSON with the canary in the place of each part of it, in turn, as a text, a list and an
    object."""
    wrong = (canary, f"/{canary} x", f"{canary}\0", [canary], {"a": canary})
    if isinstance(found, dict):
        for name, inner in found.items():
            yield from ({**found, name: other} for other in (*wrong, *misplaced(inner, canary)))
    elif isinstance(found, list):
        for n, inner in enumerate(found[:2]):
            yield from ([*found[:n], other, *found[n + 1 :]] for other in (*wrong, *misplaced(inner, canary)))


def test_no_field_of_any_event_is_shown_when_it_is_refused() -> None:
    """A value slips by one field, in a client of another version or by hand: the ledger has the reason for
    ever."""
    canary, shown = new_canary(), []
    for name, example in EXAMPLES.items():
        for found in misplaced(json.loads(example_bytes(example)), canary):
            value = json.dumps(found).encode()
            try:
                from_wire((*HEADERS, ("ce_type", name.encode())), value)
            except EventError as error:
                shown.append(str(error))
            if f"/{canary} x".encode() in value:  # a text that is not an id
                shown.append(outline(value))
    assert len(shown) > 2_000
    assert [text for text in shown if canary in text] == []


def test_no_field_of_a_job_is_shown_when_it_is_refused() -> None:
    """The same in a job, in machine units and in a file."""
    canary, shown = new_canary(), []
    [example] = (event for event in EXAMPLES.values() if isinstance(event, JobSubmitted))
    spec = json.loads(example_bytes(example))["spec"]
    for found in misplaced(spec, canary):
        for read in (spec_from_json, spec_from_yaml):
            try:
                read(json.dumps(found).encode())
            except Problem as problem:
                shown.append(str(problem.body()))
    assert len(shown) > 200
    assert [text for text in shown if canary in text] == []
