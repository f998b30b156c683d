"""Authentication of running tasks by the tokens
that their nodes sign (`penstock.runtime.keys.job_tokens`)."""

import asyncio

from penstock.model.nouns.token import seq_of
from penstock.runtime.keys.job_tokens import parsed
from penstock.runtime.race import first_of
from penstock_services.gateway.core.access import Caller
from penstock_services.gateway.core.job_callers import task_caller
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.replica.follower import Follower

FOLDED_WITHIN_S = 5.0  # its placement; a task that has started may be quicker than this gateway's reader


async def caller_of_token(follower: Follower, text: str) -> Caller:
    """The task whose token this is.
    Raises `Problem` 401 for one that no node has signed, else as `task_caller`."""
    token = parsed(text)
    node = None if token is None else follower.state.nodes.get(token.claim.node_id)
    if token is None or node is None or node.public_key is None or not token.proven(node.public_key):
        detail = (
            "this is not a job's token, whole and signed by its node; send what the file "
            "PENSTOCK_TOKEN_FILE of the task holds"
        )
        raise Problem(401, "job_token_forged", detail)
    await _folded(follower, seq_of(token.claim.token))
    return task_caller(follower.state, *token.claim)


async def _folded(follower: Follower, seq: int) -> None:
    """Waits until this record is folded, or `FOLDED_WITHIN_S` are over."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + FOLDED_WITHIN_S
    while (
        (change := follower.next_change())
        and follower.state.seq < seq
        and (left_s := ends_s - loop.time()) > 0
    ):
        await first_of(change.wait(), timeout_s=left_s)
