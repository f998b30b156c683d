"""How the gateway's routes run: on the event loop, all of each."""

from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from penstock_services.gateway.shell.app import PARTS, build_app


def called(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    """What FastAPI calls for one request."""
    if dependant.call is not None:
        yield dependant.call
    for needed in dependant.dependencies:
        yield from called(needed)


def test_no_request_waits_for_a_thread() -> None:
    """FastAPI gives each plain function to a thread: a millisecond for a look at a few parameters, and more under load."""
    guard = build_app(SimpleNamespace(options=SimpleNamespace(tokens=None)))  # type: ignore[arg-type]
    found = [*guard._app.routes, *(route for part in PARTS for route in part.router.routes)]
    routes = [route for route in found if isinstance(route, APIRoute)]
    assert len(routes) > 30
    threaded = {
        f"{route.path}: {call}"
        for route in routes
        for call in called(route.dependant)
        if not iscoroutinefunction(call) and not iscoroutinefunction(type(call).__call__)
    }
    assert threaded == set()
