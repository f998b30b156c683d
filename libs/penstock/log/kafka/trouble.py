"""Filter of aiokafka's log messages while its broker is away."""

import logging
import time

logger = logging.getLogger(__name__)

TROUBLE_EVERY_S = 60.0


class _OnceAMinute(logging.Handler):
    """Log filter: without a broker aiokafka logs every try of every client, a hundred lines a second; one a
    minute is passed on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._logged_s = -TROUBLE_EVERY_S

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._logged_s >= TROUBLE_EVERY_S:
            self._logged_s = time.monotonic()
            logger.warning("Kafka: %s; trying again (logged once a minute)", record.getMessage())


def pass_on_trouble() -> None:
    """aiokafka's errors go through this filter from now on."""
    found = logging.getLogger("aiokafka")
    if not any(isinstance(handler, _OnceAMinute) for handler in found.handlers):
        found.addHandler(_OnceAMinute())
        found.propagate = False
