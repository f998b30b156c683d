"""Commands as people bring them: scripts for a shell, and slips in the words of a command that no shell
reads.

A job executes its command as it stands, like `docker run`. `sbatch --wrap`, `sky exec` and dstack hand a text
to a shell, so that newcomers write assignments, `cd`, `&&` and variables. Pure: no look at any file system.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SHELL = ("bash", "-ec")
"""Interpreter of a script without a first line `#!`:
it ends at the first command that fails, as in CI systems."""
TAKES_TEXT = re.compile(r"(?:ba|da|k|z|a)?sh|python[0-9.]*")
"""Interpreters that take a program's text after `-c`."""
_BUILTINS = (
    "! ( . [[ alias case cd declare eval exec exit export for function if let local module popd pushd "
    "readonly return select set shopt source trap ulimit umask unset until while {"
)
BUILTINS = frozenset(_BUILTINS.split())
"""Words that only a shell knows.
`command` and `type` are left out: some systems have programs of these names."""
OPERATOR = re.compile(r"&&|\|\|?|\|&|;|&|(?:[0-9]|&)?(?:>>?|<)(?:&[0-9]|[\w./~$-]*)")
"""A word that is an operator, such as `&&`, `2>&1` or `>log.txt`."""
JOINED = re.compile(r"&&|\|\||;|\|")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")
VARIABLE = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Z_][A-Z0-9_]*\}|\()|`[^`]+`")
"""In braces upper case alone: `${now:%Y}` and `${model.lr}` are hydra's own."""
PATTERN = re.compile(r"[\w./-]*\*[\w./*-]*|~\w*(?:/.*)?")
READS_TEXT = frozenset({"awk", "gawk", "mawk", "perl", "sed", "ruby", "jq", "find", "expr", "test", "["})
"""Programs whose arguments have `$`, `*` or operators of their own."""
SHELL_FORM = "bash -c '…' (in a job file: `command: |`)"
IN_A_SHELL = f"for a shell: {SHELL_FORM}"


class Slip(NamedTuple):
    """One probable mistake in a command."""

    message: str
    remedy: str
    certain: bool
    """Such a program exists nowhere."""


def script_command(text: str, name: str = "script", arguments: Sequence[str] = ()) -> list[str]:
    """The command that runs a script's text. Line ends become those of Unix. Raises `ValueError` with the
    remedy.

    A first line such as `#!/bin/bash -l` names the interpreter; else it is `bash -e`. `name`: the script's
    own `$0`.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text.strip():
        raise ValueError("is empty; write the lines that a shell shall run")
    interpreter = list(SHELL)
    if text.startswith("#!"):
        try:
            words = shlex.split(text.partition("\n")[0][2:])
        except ValueError:
            words = []
        if words and words[0].endswith("/env"):
            words = words[2:] if words[1:2] == ["-S"] else words[1:]
        program = words[0].rpartition("/")[2] if words else ""
        if not TAKES_TEXT.fullmatch(program):
            raise ValueError(
                f"begins with `#!` and {program or 'no program'}, which takes no text; put the script into a "
                "file, and name the file"
            )
        interpreter = [*words, "-c"]
    own_name = [name] if interpreter[0].endswith("sh") else []
    return [*interpreter, text, *own_name, *arguments]


def with_script(fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A job file's fields with the command of its `script`, or of a `command` that is a text; and (field,
    problem) where there is none.

    `script`: a text, or a list of lines.
    """
    found = dict(fields)
    name = "script" if "script" in found else "command"
    given = found.pop("script", None) if name == "script" else found.get("command")
    if name == "script" and "command" in fields:
        return found, [("script", "stands beside command; remove one of them")]
    if name == "script" and isinstance(given, list) and all(isinstance(line, str) for line in given):
        given = "\n".join(given)
    if not isinstance(given, str):
        wrong = [
            ("script", "is neither a text nor a list of lines; write `script: |`, and the lines below it")
        ]
        return found, wrong if name == "script" else []
    try:
        found["command"] = script_command(given)
    except ValueError as error:
        return {key: value for key, value in found.items() if key != "command"}, [(name, str(error))]
    return found, []


def slips(command: Sequence[str]) -> Iterator[Slip]:
    """Probable mistakes; none in the usual command."""
    program = command[0]
    if (wrong := _not_a_program(program, command[1:])) is not None:
        yield wrong
        return
    if (literal := _literal(command)) is not None:
        yield Slip(
            f"no shell reads it: the program gets {literal} as it stands",
            f"write the whole {IN_A_SHELL}",
            False,
        )


def _not_a_program(program: str, arguments: Sequence[str]) -> Slip | None:
    """Why no such program exists."""
    if program.endswith("\r"):
        return Slip(
            "ends with a carriage return (CRLF): it comes from a file with line ends of Windows",
            "convert that file: sed -i 's/\\r$//' FILE",
            True,
        )
    if (assigned := ASSIGNMENT.match(program)) is not None:
        name = assigned[1]
        text = f"begins with an assignment, {name}=…, which only a shell reads"
        return Slip(
            text, f"give the variable by -e {name}=… (`env` in a job file) and begin with the program", True
        )
    if OPERATOR.fullmatch(program):
        return Slip(f"begins with {program}, which only a shell reads", f"write the whole {IN_A_SHELL}", True)
    if program in BUILTINS or (program == "conda" and "activate" in arguments[:1]):
        return Slip(f"{program} is a word of the shell, not a program", _instead(program, arguments), True)
    if re.search(r"\s", program.strip()):
        first = program.split()[0]
        text = f"the program is one word with blanks, {first} …: the whole command in one string"
        remedy = f"leave out the quotes around the whole: -- {first} …, or write it {IN_A_SHELL}"
        return Slip(text, remedy, not first.startswith((".", "/", "~")))
    return None


def _instead(builtin: str, arguments: Sequence[str]) -> str:
    """The remedy for a word of the shell."""
    target = arguments[0] if arguments else "DIR"
    if builtin == "cd":
        return (
            f"run in a folder by --workdir {target} (`workdir` in a job file), or write the whole "
            f"{IN_A_SHELL}"
        )
    if builtin in ("source", ".") and target.endswith("/bin/activate"):
        venv = target.removesuffix("/bin/activate")
        return f"name the environment by --venv {venv} (`environment: {{venv: {venv}}}` in a job file)"
    if builtin == "conda":
        name = arguments[1] if len(arguments) > 1 else "NAME"
        return f"name the environment by --conda {name} (`environment: {{conda: {name}}}` in a job file)"
    if builtin == "module":
        return (
            "begin a script with it: bash -lc '…' (in a job file: `command: |` and a first line "
            "#!/bin/bash -l)"
        )
    if builtin == "export" and (named := ASSIGNMENT.match(target)) is not None:
        return f"give the variable by -e {named[1]}=… (`env` in a job file)"
    return f"write the whole {IN_A_SHELL}"


def _literal(command: Sequence[str]) -> str | None:
    """The first argument that a shell would have changed; None: there is none."""
    if command[0].rpartition("/")[2] in READS_TEXT:
        return None
    if (found := _unread(command[0]) or JOINED.search(command[0])) is not None:
        return found if isinstance(found, str) else found[0]
    before = ""
    for word in command[1:]:
        value = word.partition("=")[2] if word.startswith("--") else word
        if re.fullmatch(r"-[a-z]*c|-e", before):
            return None  # a program's text, and what follows are its own arguments
        if OPERATOR.fullmatch(word) and (not before.startswith("-") or word == "&&"):
            return word
        if (literal := _unread(value)) is not None:
            return literal
        before = word
    return None


def _unread(word: str) -> str | None:
    """A variable, a command or a pattern of file names, which a shell would have replaced."""
    if (found := VARIABLE.search(word)) is not None:
        return f"{found[0]}…)" if found[0].endswith("(") else found[0]
    if PATTERN.fullmatch(word):
        return word if len(word) <= 32 else "a pattern of file names"
    return None
