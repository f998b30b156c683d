"""How the gateway's routes run: on the event loop, all of each."""

from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from penstock_services.gateway.shell.app import PARTS, build_app
from penstock_services.gateway.shell.parameters import query_parameters


def called(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    """What FastAPI calls for one request."""
    if dependant.call is not None:
        yield dependant.call
    for needed in dependant.dependencies:
        yield from called(needed)


def routes_of(guard: Any) -> list[APIRoute]:
    found = [*guard._app.routes, *(route for part in PARTS for route in part.router.routes)]
    return [route for route in found if isinstance(route, APIRoute)]


@pytest.fixture(scope="module")
def guard() -> Any:
    """The application; only a request would ask the gateway."""
    return build_app(SimpleNamespace(options=SimpleNamespace(tokens=None)))  # type: ignore[arg-type]


def test_no_request_waits_for_a_thread(guard: Any) -> None:
    """FastAPI gives each plain function to a thread: a millisecond for a look at a few parameters, and more
    under load."""
    routes = routes_of(guard)
    assert len(routes) > 30
    threaded = {
        f"{route.path}: {call}"
        for route in routes
        for call in called(route.dependant)
        if not iscoroutinefunction(call) and not iscoroutinefunction(type(call).__call__)
    }
    assert threaded == set()


def test_the_parameters_that_are_known_are_those_of_the_document(guard: Any) -> None:
    """The document is not made for a request: that takes a third of a second, in which no other is
    answered."""
    document = guard._app.openapi()["paths"]
    for route in routes_of(guard):
        if route.include_in_schema:
            [operation] = [document[route.path_format][method.lower()] for method in route.methods or ()]
            named = [part["name"] for part in operation.get("parameters", ()) if part["in"] == "query"]
            assert sorted(query_parameters(route.dependant)) == sorted(named), route.path
