"""Stories of cells that run for years: what the state holds is bounded by what is live."""

from tests.support.driver import CellDriver, job_spec, node_spec


def test_timers_of_ended_jobs_leave_nothing_behind() -> None:
    """Jobs with both time-outs come and go; each sets two or three timers and ends long before they are due."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for number in range(300):
        cell.submit(f"j{number}", job_spec(queue_timeout_ms=3_600_000, run_timeout_ms=3_600_000))
        cell.start(f"j{number}")
        cell.exit(f"j{number}.1.w0")
    assert not cell.state.timers
    assert len(cell.state.timer_heap) <= 64
