"""An asynchronous test that runs in virtual time: the service under test reads no clock but the loop's and
`penstock.clock`."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from tests.support.virtual_time import run_virtually

Fixtures = ParamSpec("Fixtures")


def virtually(test: Callable[Fixtures, Coroutine[Any, Any, None]]) -> Callable[Fixtures, None]:
    """Decorator. Where all wait and no timer is left, the test fails at once."""

    @wraps(test)
    def run(*fixtures: Fixtures.args, **named: Fixtures.kwargs) -> None:
        run_virtually(test(*fixtures, **named))

    return run
