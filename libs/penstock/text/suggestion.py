"""Spelling suggestion for a name that is not known: the nearest one that is."""

import difflib
from collections.abc import Iterable

NEAR = 0.6  # ratio of difflib: `runing` is near `running`, `jobs` is not near `nodes`


def near(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; None: no name is like it."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=NEAR)), None)


def choices(name: str, known: Iterable[str]) -> str:
    """Remedy for an unknown name: ``did you mean `running`? One of queued, running``."""
    names = list(known)
    meant = near(name, names)
    lead = f"did you mean `{meant}`? One of" if meant else "use one of"
    return f"{lead} {', '.join(names)}"
