"""Authorisation of routes: the roles of which a route requires one, as a dependency of the route; and the
caller of a request."""

from typing import Any

from fastapi import Depends, Request

from penstock_services.gateway.core.access import Caller, Role

CALLER = "penstock.caller"
"""Key in a request's scope: its `Caller`, set before routing."""


class Demand:
    """Refuses callers that have none of the roles."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles

    async def __call__(self, request: Request) -> None:
        caller_of(request).demand(f"{request.method} {request.url.path}", *self.roles)


def needs(*roles: Role) -> Any:
    """For a route's `dependencies`: one of these roles."""
    return Depends(Demand(*roles))


def caller_of(request: Request) -> Caller:
    found: Caller = request.scope[CALLER]
    return found
