"""Reader of a foreign job file's keys: each one is taken, or named with its path and a remedy. No key is
lost without a word."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.model.jobs.job_parts import MAX_ATTEMPTS

MAX_NOTES = 200  # of one file; more would not be read


class Note(NamedTuple):
    """A key without an equivalent, or with one that differs."""

    path: str
    """Such as `resources.use_spot` or `#SBATCH --signal`."""
    text: str
    """What becomes of it, and the remedy."""
    needed: bool = False
    """Without it the job would do something else: it is not submitted as it is."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


NO_EQUIVALENT = "has no equivalent; left out"
Notes = list[Note]


class Keys:
    """A mapping of the file, with the keys that were taken from it. `path`: its place in the file; empty:
    the top."""

    def __init__(self, found: object, path: str, notes: Notes) -> None:
        self.found: Mapping[str, Any] = {}
        self.path, self.notes = path, notes
        self._taken: set[str] = set()
        if isinstance(found, Mapping):
            self.found = {str(name): value for name, value in found.items()}
        elif found is not None:
            self.note("", "is not a mapping; left out", needed=True)

    def __contains__(self, name: str) -> bool:
        return self.found.get(name) is not None

    def at(self, name: str) -> str:
        """The path of a key."""
        return ".".join(part for part in (self.path, name) if part) or "file"

    def note(self, name: str, text: str, *, needed: bool = False) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(Note(self.at(name), text, needed))

    def take(self, name: str) -> Any:
        """The value as it stands; None where there is none."""
        self._taken.add(name)
        return self.found.get(name)

    def text(self, name: str) -> str | None:
        """A text, or a number as one."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return str(value).lower() if isinstance(value, bool) else str(value)
        self.note(name, "is not a text; left out", needed=True)
        return None

    def whole(self, name: str) -> int | None:
        """A whole number, also as a text."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            self.note(name, f"{text[:32]!r} is not a whole number; left out", needed=True)
            return None

    def part(self, name: str) -> "Keys":
        """A section; empty where there is none."""
        return Keys(self.take(name), self.at(name), self.notes)

    def parts(self, name: str) -> "Iterator[Keys]":
        """The mappings of a list, or the one that stands in its place."""
        value = self.take(name)
        if isinstance(value, Mapping):
            yield Keys(value, self.at(name), self.notes)
        elif isinstance(value, list):
            for number, one in enumerate(value):
                yield Keys(one, f"{self.at(name)}[{number}]", self.notes)
        elif value is not None:
            self.note(name, "is not a list; left out", needed=True)

    def texts(self, name: str) -> list[str]:
        """A list of texts, or the one that stands in its place."""
        value = self.take(name)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | int | float) for one in items):
            self.note(name, "is not a list of texts; left out", needed=True)
            return []
        return [str(one).lower() if isinstance(one, bool) else str(one) for one in items]

    def strings(self, name: str, field: str) -> dict[str, Any]:
        """A mapping of names to texts, as this field of a job file; empty where there is none."""
        found = self.part(name).found
        return {field: {key: str(value) for key, value in found.items()}} if found else {}

    def same(self, name: str, field: str) -> dict[str, Any]:
        """A text, as this field of a job file; empty where there is none."""
        return {} if (text := self.text(name)) is None else {field: text}

    def retries(self, name: str) -> dict[str, Any]:
        """A number of further attempts, as `retry` of a job file; empty where there is none."""
        number = self.whole(name)
        return {} if number is None else {"retry": {"max_attempts": min(MAX_ATTEMPTS, number + 1)}}

    def seconds(self, name: str, field: str) -> dict[str, Any]:
        """A number of seconds, as this field of a job file; empty where there is none."""
        return {} if (number := self.whole(name)) is None else {field: f"{number}s"}

    def assignments(self, name: str) -> dict[str, Any]:
        """`env` of a list of `NAME=VALUE`; a NAME alone is of the submitter's environment, and noted."""
        env = {}
        for entry in self.texts(name):
            variable, mark, value = entry.partition("=")
            if mark:
                env[variable] = value
            else:
                self.note(name, f"{variable} has no value; give it by -e at the submission", needed=True)
        return {"env": env} if env else {}

    def own_priority(self) -> None:
        """Notes a `priority` of other numbers than ours."""
        if (priority := self.take("priority")) is not None:
            self.note(
                "priority", f"{priority}: `priority` goes from -10 to 10, among your own jobs; left out"
            )

    def ignore(self, *names: str) -> None:
        """Keys without effect here, whatever their value."""
        self._taken.update(names)

    def rest(self, remedies: Mapping[str, str], *, needed: frozenset[str] = frozenset()) -> None:
        """Names every key that was not taken. `remedies`: key → what to do instead."""
        for name, value in self.found.items():
            if name in self._taken:
                continue
            if value is None or value == {} or value == []:
                continue
            remedy = remedies.get(name)
            self.note(
                name, f"has no equivalent; {remedy}" if remedy else NO_EQUIVALENT, needed=name in needed
            )


class Imported(NamedTuple):
    """What became of a file: the fields of a job file for each of its jobs."""

    kind: str
    """Such as `a SkyPilot file`."""
    jobs: list[dict[str, Any]]
    notes: Notes
