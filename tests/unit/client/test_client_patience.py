"""How long the client waits for an answer: as long as the gateway may need for it."""

import pytest

from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S, Connection
from penstock.client.steps import Calls, Request


@pytest.mark.parametrize(
    ("at", "at_ms", "bound_s"),
    [(None, None, TIMEOUT_S), (7, None, WORKER_TIMEOUT_S), (None, 7, WORKER_TIMEOUT_S)],
)
def test_a_question_about_the_past_waits_for_the_worker_that_answers_it(
    at: int | None, at_ms: int | None, bound_s: float
) -> None:
    """A busy machine needs eleven seconds to start the worker: `penstock why --at` said that there is no
    gateway."""
    step = next(Calls(Connection("http://127.0.0.1:9"), tries=1).why("job-1", at, at_ms))
    assert isinstance(step, Request)
    assert (step.path, step.timeout_s) == ("/v1/jobs/job-1/why", bound_s)
