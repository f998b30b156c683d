"""Lint of references to decision records: each record that code, a test or a page names is there.

Records that are merged into another one leave; a reference to one of them would lead nowhere. Two forms
count: "decision 40" with its plural ("decisions 39, 40 and 42"), and a file's name below `decisions/`.

The records themselves are checked, too: a number occurs once, and the parts of a record stand in their order.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = "libs/penstock/decisions"
FOLDERS = ("infra", "libs", "schemas", "services", "tests", "tilt")
SUFFIXES = frozenset({".json", ".md", ".properties", ".py", ".sql", ".toml", ".yaml"})
FOREIGN = frozenset({"__pycache__", "build", "dist", "node_modules"})
RECORD = re.compile(r"(\d{4})-[a-z0-9-]+\.md")
NAMED = re.compile(
    r"\b[Dd]ecisions?(?: records?)?\s+(\d{1,4}(?:(?:,\s+and|,|\s+and)\s+\d{1,4})*)\b(?![.,:]\d| %)"
)
PATH = re.compile(r"\bdecisions/(\d{4}-[a-z0-9-]+\.md)")
PARTS = ("Context", "Decision", "Status", "Consequences")


def records(folder: Path) -> dict[int, str]:
    """Number → file name of each record. Raises `ValueError` for a number that occurs twice."""
    found: dict[int, str] = {}
    for path in sorted(folder.glob("*.md")):
        if match := RECORD.fullmatch(path.name):
            if int(match[1]) in found:
                raise ValueError(f"{path.name} and {found[int(match[1])]} have the same number")
            found[int(match[1])] = path.name
    return found


def references(text: str) -> Iterator[tuple[int, str]]:
    """(line, a number without leading zeros or a file's name) of each reference to a record."""
    for match in NAMED.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield from ((line, str(int(number))) for number in re.findall(r"\d+", match[1]))
    for match in PATH.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1]


def misshapen(record: str) -> str:
    """What is wrong with the parts of a record; "" where nothing is."""
    parts = tuple(re.findall(r"^## (.+)$", record, re.MULTILINE))
    return "" if parts == PARTS else f"its parts are {', '.join(parts) or 'none'}, not {', '.join(PARTS)}"


def files(root: Path) -> Iterator[Path]:
    """Every text file that may name a record, sorted."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and not FOREIGN.intersection(path.parts):
                yield path
    yield from sorted(path for path in root.glob("*") if path.suffix in SUFFIXES)


def violations(root: Path) -> Iterator[str]:
    """A line of text for each reference without a record, and each record without its parts."""
    known = records(root / DECISIONS)
    names = {*map(str, known), *known.values()}
    for path in files(root):
        for line, name in references(path.read_text()):
            if name not in names:
                yield f"{path.relative_to(root)}:{line}: there is no decision {name}"
    for name in known.values():
        if wrong := misshapen((root / DECISIONS / name).read_text()):
            yield f"{DECISIONS}/{name}: {wrong}"


def main() -> int:
    """Prints each violation; 1 where there is one."""
    found = list(violations(ROOT))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
