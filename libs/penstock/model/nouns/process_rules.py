"""What a process can be started with: its words, its variables and its folder."""

from collections.abc import Mapping

from penstock.model.nouns.commands import MAX_ARGV_BYTES, command_problem


def command_can_run(command: tuple[str, ...]) -> None:
    """Raises `ValueError` for words that no process can be started with."""
    if problem := command_problem(command, MAX_ARGV_BYTES):
        raise ValueError(problem)


def env_can_be_passed(env: Mapping[str, str]) -> None:
    """Raises `ValueError` for variables that are too long, or that no process can be given."""
    if not env:
        return
    env_bytes = len("".join([*env, *env.values()]).encode())
    if env_bytes > MAX_ARGV_BYTES:
        raise ValueError(f"{env_bytes} bytes exceed {MAX_ARGV_BYTES}; put long values into a file")
    if any(not key or "=" in key for key in env):
        raise ValueError("a variable's name is empty or contains '='; rename it")
    refuse_nul(*env, *env.values())


def workdir_can_be_entered(workdir: str | None) -> None:
    """Raises `ValueError` for a folder with a NUL in its name."""
    if workdir is not None:
        refuse_nul(workdir)


def leads_out(path: str) -> bool:
    """Whether a path may lead out of the folder that it is relative to."""
    return path.startswith("/") or ".." in path.split("/")


def labels_are_short(labels: Mapping[str, str]) -> None:
    """Raises `ValueError` for labels that are too long together."""
    if labels and len("".join([*labels, *labels.values()])) > MAX_ARGV_BYTES:
        raise ValueError(f"they exceed {MAX_ARGV_BYTES} characters; shorten them")


def refuse_nul(*texts: str) -> None:
    """Raises `ValueError`: an argument, a variable or a path with a NUL cannot be given to a process."""
    if "\0" in "".join(texts):
        raise ValueError("a NUL character cannot be passed to a process; remove it")
