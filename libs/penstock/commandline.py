"""Command line: a tree of typer commands whose modules are imported on demand, and errors as one line and an
exit code.

Help is plain text: typer's rich help imports a Markdown and a syntax highlighter, which doubles the time of
`--help`.
"""

import errno
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from types import MappingProxyType
from typing import Any, Self, TypeAlias, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from penstock.errors import ConfigurationError, PenstockError
from penstock.exits import Exit, Stop
from penstock.text.installing import installing
from penstock.text.texts import is_utf8

T = TypeVar("T")
R = TypeVar("R")
Command: TypeAlias = Any  # typer exports no base of TyperCommand and TyperGroup
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # of a disk, a quota, or a bound on files
_VALUE = re.compile(r"'.*' is not a valid", re.DOTALL)
"""A value in a refusal: it may be a secret that stands in the wrong place."""
LOST = frozenset({errno.EBADF, errno.EIO, errno.EPIPE})
"""Of a stream that is open for reading only, and of a terminal or reader that is gone."""
LONGEST_NAME = 24  # columns of the names in a list of commands


@dataclass(frozen=True, slots=True)
class Entry:
    """One command, or a group of commands. `help`: the first paragraph of the function's docstring."""

    help: str
    target: str = ""
    """`module:function`; empty: a group."""
    entries: Mapping[str, "Entry"] = field(default_factory=dict)
    extra: str = ""
    """The extra to install for it, as in `pip install '.[extra]'` of a checkout."""
    interspersed: bool = True
    """Whether options may follow arguments."""
    examples: tuple[str, ...] = ()
    """Command lines that end the command's help."""


def new_app(**options: Any) -> typer.Typer:
    """A typer application with our settings: plain help, no tracebacks in boxes."""
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **{"add_completion": False, **options},
    )


class LazyGroup(TyperGroup):
    """A group of commands whose modules are imported when a command is asked for."""

    panels: Mapping[str, Mapping[str, Entry]] = MappingProxyType({})
    entries: Mapping[str, Entry] = MappingProxyType({})

    def fill(self, panels: Mapping[str, Mapping[str, Entry]]) -> Self:
        """Gives the group its commands by heading;
        to list, complete and suggest them, names and help are enough."""
        self.panels = panels
        self.entries = {name: entry for entries in panels.values() for name, entry in entries.items()}
        self.commands = {name: TyperCommand(name, help=entry.help) for name, entry in self.entries.items()}
        return self

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Prints the help if no command is given, except for the shell's completion."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            print(ctx.get_help())
            raise typer.Exit(Exit.BAD_SPEC)
        return super().parse_args(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Command:
        """Raises `Stop` where a library for this command is not installed."""
        entry = self.entries.get(cmd_name)
        if entry is None:
            return None
        if entry.entries:
            return LazyGroup(name=cmd_name, help=entry.help, rich_markup_mode=None).fill(
                {"Commands": entry.entries}
            )
        module, _, function = entry.target.partition(":")
        try:
            callback = getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            if not entry.extra or str(error.name).startswith("penstock"):
                raise
            text = f"`{ctx.command_path} {cmd_name}` needs {error.name}; {installing(entry.extra)}"
            raise Stop(Exit.PROBLEM, text) from error
        app = new_app()
        examples = "\n".join(("\b\nExamples:", *(f"  {line}" for line in entry.examples)))
        app.command(
            cmd_name,
            context_settings={"allow_interspersed_args": entry.interspersed},
            epilog=examples if entry.examples else None,
        )(callback)
        return get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands under their headings; imports none of them."""
        for panel, entries in self.panels.items():
            with formatter.section(panel):
                rows = [(name, entry.help) for name, entry in entries.items()]
                formatter.write_dl(rows, col_max=LONGEST_NAME)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Completes names by the table; imports no command."""
        plain = TyperGroup(name=self.name, commands=dict(self.commands), params=self.params)
        return plain.shell_complete(typer.Context(plain, info_name=self.name), incomplete)


def takes(kind: type[T]) -> Callable[[Callable[[typer.Context, T], R]], Callable[..., R]]:
    """Decorator: the fields of a dataclass become the command's options; the command gets one instance.

    A field is declared as typer wants it: `cores: Annotated[int, typer.Option(help="…")] = 8`.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]  # a dataclass; the type does not show it
        if field.init
    ]
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    def decorate(command: Callable[[typer.Context, T], R]) -> Callable[..., R]:
        @functools.wraps(command)
        def run(ctx: typer.Context, **values: Any) -> R:
            return command(ctx, kind(**values))

        run.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        return run

    return decorate


def parsed(kind: type[T], words: Sequence[str], prog: str) -> T:
    """The instance that a command whose options are these fields would get. Raises TyperException."""
    app = new_app()
    app.command()(takes(kind)(lambda _, options: options))
    found: T = get_command(app).main(list(words), prog_name=prog, standalone_mode=False)
    return found


def run(
    command: Command,
    arguments: Sequence[str],
    prog: str,
    obj: object = None,
    remedy: Callable[[str], str] = lambda option: "",
) -> int:
    """Runs one command line; returns its exit code (`penstock.exits`). Errors go to stderr, a line each.
    `remedy`: for an unknown option."""
    try:
        code = command.main(list(arguments), prog_name=prog, standalone_mode=False, obj=obj)
        sys.stdout.flush()
    except Stop as stop:
        return _report(prog, str(stop), stop.code)
    except ConfigurationError as error:
        return _report(prog, str(error), Exit.BAD_SPEC)
    except PenstockError as error:
        return _report(prog, str(error), Exit.PROBLEM)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else prog
        message = _VALUE.sub("the value is not a valid", error.format_message().rstrip("."))
        hint = remedy(getattr(error, "option_name", None) or "")
        message = f"{message.partition(' (Possible')[0]}: {hint}" if hint else message
        return _report(prog, f"{message}; see `{where} --help`" if message else "", error.exit_code)
    except typer.Abort:
        return Exit.INTERRUPTED
    except UnicodeEncodeError:
        wrong = next((word for word in arguments if not is_utf8(word)), None)
        if wrong is None:
            raise
        return _report(prog, f"{wrong!a} is not UTF-8 text; write it in UTF-8", Exit.BAD_SPEC)
    except OSError as error:
        lost = error.errno in LOST and error.filename is None
        if error.errno not in FULL and not lost:
            raise
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        text = (
            f"{where}what was to be written does not fit: {error.strerror}; free space there, or write "
            "elsewhere"
        )
        if lost:
            text = f"stdout cannot be written: {error.strerror}; redirect stdout elsewhere"
        return _report(prog, text, Exit.PROBLEM)
    return code if isinstance(code, int) else Exit.OK


def _drop_output() -> None:
    """Discards what stdout still buffers: the interpreter would write it again at its end, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(prog: str, text: str, code: int) -> int:
    with suppress(OSError):  # the terminal may be gone
        for line in text.splitlines():
            print(f"{prog}: {line}", file=sys.stderr)
    return int(code)


def start(app: typer.Typer, prog: str) -> None:
    """The entry of a console script: runs `sys.argv`; never returns."""
    sys.exit(run(get_command(app), sys.argv[1:], prog))
