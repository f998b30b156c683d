"""Golden hashes of what Penstock decides and answers: `python -m tests.replay.behaviour`, or `make golden`.

    --only PATTERN    names that match, with `*` and `?`; may be repeated
    --quick           only names of the CI run
    --jobs N          processes (default 1)
    --write           writes these names into the store; a run of all names leaves no other one there
    --former COMMIT   shows the first text that differs from those of a former commit, of each name that has
                      moved; that commit's own code computes them, and must have this module
    --keep FOLDER     writes the texts of each name into a file

A hash covers all texts of a name in order: records of a ledger as they are in the log, or answers of the
gateway as canonical JSON. `golden/behaviour.json` holds the SHA-256 of these texts, a line each, and their
number.
Exit codes: 0 as in the store, or written; 1 a hash differs, or was never written; 2 bad command line.
"""

import penstock.runtime.single_thread  # noqa: F401, I001 - first: before anything imports numpy
import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import NamedTuple

from penstock.scheduling import profiles
from tests.replay import answers, embedded, published, workloads

ROOT = Path(__file__).parents[2]
STORE = Path(__file__).with_name("golden") / "behaviour.json"
SHOWN_CHARS = 600
"""Of a text, around its first difference."""
FOLDERS = ("libs", "services", "tests", "infra")
"""Of a former commit: what its own code needs."""


class Behaviour(NamedTuple):
    """One name. `texts` computes its texts anew."""

    texts: Callable[[], Iterable[bytes]]
    group: str = ""
    """Names of one group are computed by one process, since they share what is cached; empty: by itself."""
    slow: bool = False
    """Left out of the CI run."""
    missing: str = ""
    """What it needs and is not here; empty: nothing."""


class Golden(NamedTuple):
    """What the store holds of one name."""

    sha256: str
    texts: int


def behaviours() -> Mapping[str, Behaviour]:
    """All names. Those of one profile stand together: its answers are about its ledgers, which are cached."""
    found: dict[str, Behaviour] = {}
    for profile in profiles.names():
        for name in workloads.names_of(profile):
            texts = partial(workloads.ledger, name, profile)
            slow = workloads.is_slow(name, profile)
            found[f"ledger/{name}/{profile}"] = Behaviour(texts, profile, slow)
        for kind in answers.KINDS if profile in answers.PROFILES else ():
            found[f"{kind}/{profile}"] = Behaviour(partial(_answers, kind, profile), profile)
    found["embedded/decided-again"] = Behaviour(embedded.decided_again)
    for name, run in published.runs().items():
        found[f"ledger/{name}"] = Behaviour(run.ledger, slow=True, missing=run.missing())
    return found


def _answers(kind: str, profile: str) -> Sequence[bytes]:
    return answers.answers(profile)[kind]


def golden_of(texts: Iterable[bytes]) -> Golden:
    """Hash and number of these texts."""
    digest, number = sha256(), 0
    for text in texts:
        digest.update(text + b"\n")
        number += 1
    return Golden(digest.hexdigest(), number)


def stored() -> dict[str, Golden]:
    """The store: name → what its texts were; empty: nothing was written yet."""
    if not STORE.exists():
        return {}
    return {name: Golden(**entry) for name, entry in json.loads(STORE.read_text()).items()}


def difference(name: str, expected: Golden | None, got: Golden) -> str:
    """A line for each of both; empty: they are the same."""
    if expected == got:
        return ""
    before = "nothing" if expected is None else f"{expected.sha256}, {expected.texts} texts"
    return f"{name} has moved\n  expected {before}\n  got      {got.sha256}, {got.texts} texts"


def compute(name: str, keep: Path | None = None) -> tuple[Golden, float]:
    """What a name's texts are now, and the processor time, s. `keep`: the folder for its file."""
    began_s = process_time()
    try:
        texts = list(behaviours()[name].texts())
    except Exception as error:
        error.add_note(f"while computing {name}")
        raise
    if keep is not None:
        kept_in(keep, name).write_bytes(b"".join(text + b"\n" for text in texts))
    return golden_of(texts), process_time() - began_s


def kept_in(folder: Path, name: str) -> Path:
    """The file of a name's texts, a line each."""
    return folder / name.replace("/", "--")


def _each(names: Sequence[str], jobs: int, keep: Path | None) -> Iterator[tuple[str, Golden, float]]:
    """(name, its texts now, processor seconds) of each, as they come."""
    if jobs == 1:
        for name in names:
            yield (name, *compute(name, keep))
        return
    together: dict[str, list[str]] = {}
    for name in names:
        together.setdefault(behaviours()[name].group or name, []).append(name)
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_compute_all, group, keep) for group in together.values()]):
            yield from done.result()


def _compute_all(names: Sequence[str], keep: Path | None) -> list[tuple[str, Golden, float]]:
    return [(name, *compute(name, keep)) for name in names]


def _write(found: Mapping[str, Golden], *, whole: bool) -> None:
    """These entries, and unless they are the whole the others as they were."""
    kept = {} if whole else stored()
    entries = {name: entry._asdict() for name, entry in sorted({**kept, **found}.items())}
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def first_difference(before: Path, after: Path) -> str:
    """The first text in which two kept files differ, of both around where they do; empty: in none."""
    old, new = (path.read_bytes().split(b"\n")[:-1] for path in (before, after))
    if old == new:
        return ""
    at = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    texts = [lines[at].decode() if at < len(lines) else "(none)" for lines in (old, new)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    shown = [text[max(0, same - SHOWN_CHARS // 3) :][:SHOWN_CHARS] for text in texts]
    where = f"text {at + 1} of {len(old)}, now {len(new)}; from character {same + 1} on"
    return f"  {where}:\n    was {shown[0]}\n    is  {shown[1]}"


def _keep_former(commit: str, names: Sequence[str], folder: Path) -> None:
    """Computes these names' texts with the code of a former commit, whatever its own store says."""
    with TemporaryDirectory(prefix="former-") as place:
        archive = subprocess.run(
            ["git", "archive", commit, *FOLDERS], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
        path = os.pathsep.join((f"{place}/libs", f"{place}/services", place))
        chosen = [word for name in names for word in ("--only", name)]
        subprocess.run(
            [sys.executable, "-m", __spec__.name, "--keep", str(folder), *chosen],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path},
            check=False,
            stdout=subprocess.DEVNULL,
        )


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.replay.behaviour", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names that match")
    parser.add_argument("--quick", action="store_true", help="those of the CI run alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--write", action="store_true", help="write the hashes into the store")
    parser.add_argument(
        "--former", metavar="COMMIT", help="show the first text that differs, of names that have moved"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the texts there")
    return parser.parse_args(given)


def _chosen(asked: argparse.Namespace) -> list[str]:
    """The names that are asked for, whether or not all that they need is here."""
    return [
        name
        for name, one in behaviours().items()
        if not (asked.quick and one.slow)
        and (not asked.only or any(fnmatchcase(name, pattern) for pattern in asked.only))
    ]


def _compare(names: Sequence[str], jobs: int, keep: Path | None) -> tuple[dict[str, Golden], list[str]]:
    """What these names' texts are now, and which of them have moved; prints a line for each."""
    expected, found, moved = stored(), {}, []
    for number, (name, golden, cpu_s) in enumerate(_each(names, jobs, keep), 1):
        found[name] = golden
        text = difference(name, expected.get(name), golden)
        moved += [name] if text else []
        print(f"{number}/{len(names)} {cpu_s:6.1f} s  {text or name}", flush=True)
    return found, moved


def _show_differences(commit: str, names: Sequence[str], now: Path) -> None:
    """Prints each name's first text that differs from the commit's. `now`: folder of the present texts."""
    with TemporaryDirectory(prefix="behaviour-") as folder:
        _keep_former(commit, names, Path(folder))
        for name in names:
            before = kept_in(Path(folder), name)
            text = "  it computes no texts of this name"
            if before.exists():
                text = first_difference(before, kept_in(now, name)) or "  the same texts"
            print(f"{name}, {commit} and now:\n{text}")


def main(given: Sequence[str] | None = None) -> int:
    asked = _arguments(given)
    chosen = _chosen(asked)
    if not chosen:
        print(f"no name matches {', '.join(asked.only)}", file=sys.stderr)
        return 2
    missing = {name: text for name in chosen if (text := behaviours()[name].missing)}
    for name, text in missing.items():
        print(f"{name}: left out, {text}")
    names = [name for name in chosen if name not in missing]
    with TemporaryDirectory(prefix="behaviour-") as folder:
        keep = asked.keep or (Path(folder) if asked.former else None)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
        found, moved = _compare(names, asked.jobs, keep)
        if asked.former and moved:
            _show_differences(asked.former, moved, keep or Path(folder))
    if asked.write:
        _write(found, whole=not asked.only and not asked.quick and not missing)
        print(f"{len(found)} hashes written, {len(moved)} of them moved")
        return 0
    print(f"{len(found)} hashes, {len(moved)} moved{': ' if moved else ''}{', '.join(moved)}")
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
