"""Simulations of the tables, on all cores.

A table asks for its simulations one after the other. So a module is gone through twice: first with placeholders for results, to learn which simulations it takes; these
are given to processes, in the order in which they are needed; then with their results. A simulation is its function and its arguments, and runs once.
"""

import functools
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, ParamSpec, TypeVar

from tests.support.background import give_way

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

_wanted: dict[Hashable, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] | None = None
"""None: results are needed."""
_found: dict[Hashable, Future[Any]] = {}
_parallel_modules: set[str] = set()


def simulated(placeholder: Answer) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Of a function of this module that simulates; its arguments are hashable. `placeholder`: a result that a table can be made of."""

    def around(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
        made_of_simulations(function.__module__)

        @functools.wraps(function)
        def found(*asked: Asked.args, **named: Asked.kwargs) -> Answer:
            key = (function.__module__, function.__name__, asked, tuple(sorted(named.items())))
            if _wanted is not None:
                _wanted[key] = (found, asked, named)
                return placeholder
            if key not in _found:
                done: Future[Any] = Future()
                _found[key] = done
                done.set_result(function(*asked, **named))
            result: Answer = _found[key].result()
            return result

        return found

    return around


def made_of_simulations(module: str) -> None:
    """Tables of this module take simulations, its own or those of other modules."""
    _parallel_modules.add(module)


def begin(module: str, learn: Callable[[], Iterable[object]], pool: ProcessPoolExecutor) -> int:
    """Starts what `learn`, all tables of this module, takes; how many simulations that is."""
    global _wanted
    if module not in _parallel_modules:
        return 0
    _wanted = {}
    try:
        for _ in learn():
            pass
        new = {key: call for key, call in _wanted.items() if key not in _found}
    finally:
        _wanted = None
    for key, (function, asked, named) in new.items():
        _found[key] = pool.submit(function, *asked, **named)
    return len(new)


def workers() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(os.cpu_count(), initializer=give_way)
