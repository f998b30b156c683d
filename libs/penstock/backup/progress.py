"""Share of a copy that is done, for a progress bar."""

from penstock.screen import Bar


class Progress:
    """Counts records and rows against the number that is expected."""

    def __init__(self, show: Bar) -> None:
        self._show = show
        self._expected = 0
        self._done = 0

    def expect(self, count: int) -> None:
        self._expected += count

    def __call__(self, count: int) -> None:
        self._done += count
        if self._expected:
            self._show(self._done / self._expected, f"{self._done:,} of {self._expected:,}")
