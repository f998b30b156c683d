"""Matcher of ignore files with git's rules: `.gitignore` and `.penstockignore`, in the folder to pack and in
those below it.

Rules: `#` comments, `!` includes a file again, a slash at the end means folders only, one elsewhere binds the
pattern to the ignore file's folder; `*`, `?` and `[…]` match within a name, `**` over folders. The last
matching rule counts; no file in an ignored folder is included again. Not read: git's global excludes and
`.git/info/exclude`; a backslash only escapes `#`, `!` and a blank.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FILES = (".gitignore", ".penstockignore")
"""The second file's rules come later, and take precedence."""
ALWAYS = frozenset({".git", ".hg", ".svn", ".penstock", "__pycache__"})
"""Names that are never packed."""


class Rule(NamedTuple):
    """One line. `pattern` matches paths relative to the ignore file's folder, `base`; `file` is the ignore
    file's path."""

    base: str
    file: str
    pattern: "re.Pattern[str]"
    takes_back: bool
    folders_only: bool


def rules_of(folder: Path, base: str) -> list[Rule]:
    """Rules of a folder's ignore files, in their order. `base`: the folder's path in the archive, with a
    slash at its end; "" for the top."""
    found = []
    for name in FILES:
        file = folder / name
        if file.is_file() and not file.is_symlink():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [rule for line in lines if (rule := _rule(line, base, f"{base}{name}")) is not None]
    return found


def ignored_by(path: str, rules: Sequence[Rule], *, is_folder: bool) -> str:
    """The ignore file whose rule leaves a path out, or `always`; empty: it is not ignored. `path`:
    relative to the top, with slashes."""
    if path.rpartition("/")[2] in ALWAYS:
        return "always"
    for rule in reversed(rules):
        if rule.folders_only and not is_folder:
            continue
        if path.startswith(rule.base) and rule.pattern.fullmatch(path[len(rule.base) :]):
            return "" if rule.takes_back else rule.file
    return ""


def _rule(line: str, base: str, file: str) -> Rule | None:
    text = line if line.endswith("\\ ") else line.rstrip()
    if not text or text.startswith("#"):
        return None
    takes_back = text.startswith("!")
    text = text[takes_back:].replace("\\#", "#").replace("\\!", "!").replace("\\ ", " ")
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    text = text.lstrip("/")
    if not text:
        return None
    try:
        pattern = re.compile(("" if anchored else "(?:.*/)?") + _expression(text), re.DOTALL)
    except re.error:  # a reversed range: in git such a pattern matches nothing
        return None
    return Rule(base, file, pattern, takes_back, folders_only)


def _expression(glob: str) -> str:
    """A git pattern as a regular expression."""
    found, index = [], 0
    while index < len(glob):
        rest = glob[index:]
        if rest.startswith("**/") and (index == 0 or glob[index - 1] == "/"):
            found.append("(?:.*/)?")
            index += 3
        elif rest == "**" and glob[index - 1 : index] == "/":
            found.append(".+")
            index += 2
        elif (group := re.match(r"\[([!^]?)(\]?[^]]*)\]", rest)) is not None:
            inside = group[2].replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            found.append(f"(?!/)[{'^' if group[1] else ''}{inside}]")
            index += group.end()
        else:
            found.append({"*": "[^/]*", "?": "[^/]"}.get(glob[index], re.escape(glob[index])))
            index += 1
    return "".join(found)
