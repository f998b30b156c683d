"""What must hold of probes: a node's silence proves something after its lease and a margin, by one term's
clock."""

from typing import Any

from tests.faults.rules.ledger_book import Book

DEFAULT_LEASE_MS = 600_000
LEASE_MARGIN = 1.25


class ProbeRules:
    """Each method is asked before its fact is booked, and says what is wrong with it; None: nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.latest: dict[str, tuple[int, int, int]] = {}
        """Node → token of its latest probe, ledger time and term at which that was first known to be in the
        log."""

    def wrong(self, kind: str, fact: dict[str, Any]) -> str | None:
        match kind:
            case "penstock.node.probed":
                return self._probed(fact)
            case "penstock.node.probe_sent":
                self._sent(fact)
            case "penstock.node.probe_expired":
                return self._expired(fact)
        return None

    def _probed(self, fact: dict[str, Any]) -> str | None:
        self.latest[fact["node_id"]] = (self._book.token, 0, 0)
        suspect = self._book.nodes[fact["node_id"]].status == "suspect"
        return None if suspect else f"{fact['node_id']} is probed, and not suspect"

    def _sent(self, fact: dict[str, Any]) -> None:
        token, _, term = self.latest.get(fact["node_id"], (0, 0, 0))
        if token == fact["probe"] and term != self._book.term:
            self.latest[fact["node_id"]] = (token, self._book.now_ms, self._book.term)

    def _expired(self, fact: dict[str, Any]) -> str | None:
        """By one term's clock, for the lease and the margin."""
        token, sent_ms, term = self.latest[fact["node_id"]]
        waited_ms, lease_ms = (
            self._book.now_ms - sent_ms,
            self._book.settings.get("lease_ms", DEFAULT_LEASE_MS),
        )
        if (token, term) != (fact["probe"], self._book.term) or waited_ms < LEASE_MARGIN * lease_ms - 1:
            return f"{fact} after {waited_ms} ms, in term {term}"
        return None
