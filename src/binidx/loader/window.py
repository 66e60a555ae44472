"""How far to look ahead, and whether at all: as far as the trainer waits for it."""

from __future__ import annotations

from binidx.storage.stats import remote_requests

FIRST_WINDOW = 8
LEAST_WINDOW = 2
# A batch that takes no request, and no longer than this, is not worth a thread: a disk of this machine answers 40 reads
# in 4 ms; a shared file system may take longer.
QUICK_SECONDS = 0.01
# So many in a row, and looking ahead ends; two slow ones among them, and it begins again. What comes unforeseen is 30
# ms of waiting: in this way 0.6 ms a batch at most.
QUICK_BATCHES = 64
SLOW_COUNTS = 48


class Window:
    """How many batches are read ahead; grows with the waiting.

    Args:
        fixed: so many, whatever happens.
        budget_bytes: the most that they may take, but for LEAST_WINDOW batches.
    """

    def __init__(self, fixed: int | None, budget_bytes: int) -> None:
        self.is_fixed, self._budget_bytes, self._most = fixed is not None, budget_bytes, 0
        self._served_since = 0
        self.batches = fixed or 1  # the first batch goes first: a second one would share its requests in flight

    @property
    def is_measured(self) -> bool:
        return self.is_fixed or self._most > 0

    def measure(self, batch_bytes: int) -> None:
        """The first batch is here: from now on we know what one takes."""
        self._most = max(LEAST_WINDOW, self._budget_bytes // max(1, batch_bytes))
        if not self.is_fixed:
            self.batches = min(FIRST_WINDOW, self._most)

    def serve(self, waiting: bool) -> None:
        """A batch is asked for. Waiting for what was asked of the store under a smaller window proves nothing."""
        self._served_since += 1
        if waiting and not self.is_fixed and self._served_since > self.batches and self.batches < self._most:
            self.batches, self._served_since = min(2 * self.batches, self._most), 0


class Pace:
    """Whether batches come so quickly that reading them ahead is not worth its threads: out of a warm disk cache.

    Args:
        always_ahead: whatever it costs, and where we do not know what a read costs.
    """

    def __init__(self, *, always_ahead: bool) -> None:
        self.is_quick = False
        self._always_ahead, self._score, self._sent = always_ahead, 0, remote_requests()

    def took(self, seconds: float) -> None:
        """A batch was read in this time."""
        was, self._sent = self._sent, remote_requests()
        if seconds < QUICK_SECONDS and self._sent == was and not self._always_ahead:
            self._score = min(QUICK_BATCHES, self._score + 1)
        else:
            self._score = max(0, self._score - SLOW_COUNTS)
        self.is_quick = self._score > 0 if self.is_quick else self._score == QUICK_BATCHES
