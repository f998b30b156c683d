"""How long the client waits for an answer: as long as the gateway may need for it."""

import httpx
import pytest

from penstock.client import Client, Unreachable
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S


@pytest.mark.parametrize(
    ("at", "at_ms", "bound_s"),
    [(None, None, TIMEOUT_S), (7, None, WORKER_TIMEOUT_S), (None, 7, WORKER_TIMEOUT_S)],
)
def test_a_question_about_the_past_waits_for_the_worker_that_answers_it(
    at: int | None, at_ms: int | None, bound_s: float
) -> None:
    """A busy machine needs eleven seconds to start the worker: `penstock why --at` said that there is no
    gateway."""
    asked = []

    def away(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, request.extensions["timeout"]["read"]))
        raise httpx.ReadTimeout("too late", request=request)

    with Client("http://127.0.0.1:9", tries=1) as client:
        client._http = httpx.Client(transport=httpx.MockTransport(away), base_url=client.server)
        with pytest.raises(Unreachable):
            client.why("job-1", at, at_ms=at_ms)
    assert asked == [("/v1/jobs/job-1/why", bound_s)]
