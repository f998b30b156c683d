"""What must hold of jobs that launch before their GPUs are free, by the judge's own bookkeeping: only those
that wait for them, and not for ever."""

from typing import Any

from tests.faults.rules.ledger_book import Book, Job

TIMER = ":predecessor_timeout"
STOP = "penstock.stop.decided"


class PrelaunchRules:
    """`wrong` is asked before each fact is booked."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._overdue = ""
        """The job whose stop must be the next fact."""
        self.launched = self.given_back = 0

    def wrong(self, kind: str, fact: dict[str, Any]) -> str | None:
        """What is wrong with this fact; None: nothing."""
        overdue, self._overdue = self._overdue, ""
        if overdue and (kind, fact.get("job_id")) != (STOP, overdue):
            return f"{overdue} has waited long enough and is not stopped; {kind} follows"
        match kind:
            case "penstock.placement.decided" if fact.get("prelaunch"):
                self.launched += 1
                if not self._book.jobs[fact["job_id"]].spec.get("prelaunch"):
                    return f"{fact['job_id']} launches early, and does not wait for its GPUs"
            case "penstock.stop.decided" if fact["reason"] == "predecessor_late":
                self.given_back += 1
                if not self._waits(self._book.jobs[fact["job_id"]]):
                    return f"{fact['job_id']} is given back, and waits for nobody"
            case "penstock.timer.fired" if fact["timer_id"].endswith(TIMER):
                job_id = fact["timer_id"].removesuffix(TIMER)
                job = self._book.jobs.get(job_id)
                if job is not None and job.living and job.stop_reason is None and self._waits(job):
                    self._overdue = job_id
        return None

    def _waits(self, job: Job) -> bool:
        """For a job that runs on, on a GPU of its own places."""
        for job_id in job.after:
            other = self._book.jobs.get(job_id)
            if other is None or other.token > job.token or other.stop_reason is not None:
                continue
            for place in (other.places[task_id] for task_id in other.living):
                for own in job.places.values():
                    if own["node_id"] == place["node_id"] and set(own["gpus"]) & set(place["gpus"]):
                        return True
        return False
