"""The worker process of the batcher: a plan must not wait for imports, since the window may be over by
then."""

from penstock_services.batcher.shell.worker import Worker
from tests.support.batching.small_batcher import solve_small

LOADED = "set(__import__('sys').modules)"
"""As an expression: a function of this module would bring its imports along."""


async def test_a_warm_worker_has_imported_what_its_function_needs() -> None:
    """A busy machine: the first burst after a start has three seconds, and importing takes longer."""
    worker = Worker(solve_small)
    try:
        await worker.warm_up()
        found = await worker._pool.run(eval, LOADED)
    finally:
        worker.close()
    assert {solve_small.__module__, "scipy.optimize"} <= found
