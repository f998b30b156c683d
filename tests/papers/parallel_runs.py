"""Simulations of the tables, on all cores.

A table asks for its simulations one after the other. So all tables are made twice: first with placeholders
for results, to learn which simulations they take; these are given to one pool of processes, in the order in
which they are needed; then with their results. A simulation is its function and its arguments, defaults
included, and runs once, however many tables take it.
"""

import functools
import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from time import process_time
from typing import Any, ParamSpec, TypeVar

from penstock.simulator.runs import no_collection
from tests.support.background import give_way

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Key = tuple[str, str, Hashable]
"""Module, function, arguments."""

_wanted: dict[Key, Call] | None = None
"""None: results are needed."""
_found: dict[Key, Future[tuple[Any, float]]] = {}
"""Results, each with its processor time in seconds."""


def simulated(placeholder: Answer) -> Callable[[Callable[Asked, Answer]], Callable[Asked, Answer]]:
    """Of a function of this module that simulates; its arguments are hashable. `placeholder`: a result that a
    table can be made of."""

    def around(function: Callable[Asked, Answer]) -> Callable[Asked, Answer]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def found(*asked: Asked.args, **named: Asked.kwargs) -> Answer:
            bound = signature.bind(*asked, **named)
            bound.apply_defaults()
            key = (function.__module__, function.__name__, tuple(bound.arguments.items()))
            if _wanted is not None:
                _wanted[key] = (found, asked, named)
                return placeholder
            if key not in _found:
                done: Future[tuple[Any, float]] = Future()
                _found[key] = done
                done.set_result(_timed(found, asked, named))
            result: Answer = _found[key].result()[0]
            return result

        return found

    return around


def _timed(found: Callable[..., Any], asked: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, float]:
    began_s = process_time()
    with no_collection():
        answer = inspect.unwrap(found)(*asked, **named)
    return answer, process_time() - began_s


def begin(learn: Callable[[], Iterable[object]], pool: ProcessPoolExecutor) -> tuple[int, int]:
    """Starts what `learn`, all tables, takes; how many tables and further simulations that is."""
    global _wanted
    _wanted = {}
    try:
        tables = sum(1 for _ in learn())
        new = {key: call for key, call in _wanted.items() if key not in _found}
    finally:
        _wanted = None
    for key, call in new.items():
        _found[key] = pool.submit(_timed, *call)
    return tables, len(new)


def unfinished() -> int:
    """Simulations that have begun or wait."""
    return sum(not one.done() for one in _found.values())


def spent() -> Mapping[str, tuple[int, float]]:
    """Function → how many simulations have ended, and their processor time in seconds."""
    found: dict[str, tuple[int, float]] = {}
    for (module, function, _), one in _found.items():
        name = f"{module.rpartition('.')[2]}.{function}"
        count, time_s = found.get(name, (0, 0.0))
        found[name] = count + 1, time_s + one.result()[1]
    return found


@contextmanager
def workers() -> Iterator[ProcessPoolExecutor]:
    """On an error those that have not begun are dropped."""
    pool = ProcessPoolExecutor(os.cpu_count(), initializer=give_way)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
