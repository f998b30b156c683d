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


def one_environment(venv: str | None, conda: str | None, container: str | None) -> None:
    """A task's environment. Raises ValueError unless exactly one is named, in a form that a node can use."""
    given = [text for text in (venv, conda, container) if text is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of venv, conda and container; leave it out for the node's PATH")
    if venv is not None and not venv.startswith("/"):
        raise ValueError("venv is a folder on the node; give its absolute path")
    if not given[0] or given[0].startswith("-"):
        raise ValueError("it is empty or begins with '-'; correct it")
    refuse_nul(*given)


def workdir_is_in_code(workdir: str | None) -> None:
    """The working folder of a job whose code travels with it. Raises ValueError."""
    if workdir is not None and leads_out(workdir):
        raise ValueError(
            "workdir is in the folder of `code`; give a path that is relative to it, without '..'"
        )


def has_terminal(container: str | None) -> None:
    """The container of an interactive job. Raises ValueError."""
    if container is not None:
        raise ValueError(
            "interactive: a job in a container has no terminal; leave it out, or name a venv or conda "
            "environment"
        )


def secrets_can_be_passed(secrets: Mapping[str, str], env: Mapping[str, str]) -> None:
    """Secrets, by the variables that hold them, beside the other variables. Raises ValueError."""
    env_can_be_passed(secrets)
    if twice := sorted(env.keys() & secrets.keys()):
        raise ValueError(f"{twice[0]} stands in env and in secrets; remove one")
