"""Incidents: unusually slow stores and disks, and a rank that waits while others do not. It decides; a thread looks.

    every 5 s   counters of the process ─► means of the last 10 s ─► a line for each unusual one, again after 10 minutes
                its share of waiting ─► an addition to a counter of the group, whose answer is the sum of all ranks

Store: the mean time of requests for at most 256 KiB is 8 times the usual one, and 0.25 s, and most of them took twice
the usual one. That is a mean of logarithms with a memory of 10 minutes; an unusual time becomes usual in an hour. Until
one is known it is 0.1 s.

Disk: the process waited 3 of 10 s for it, summed over its threads, at less than 0.5 MB/s.

Rank: it waits 30 % of the time, and four times as much as others in the mean. When it begins to wait, for a fifth of
the time, it adds its share, and when it ends its usual one, a mean of 10 minutes. If it still waits 15 s later it asks
whether others do, too: then the store is slow, and not the rank; it asks again after a minute. A rank that waits from
its start on adds its share after 20 s, when the others have begun, and the answer decides. It sends at most 2 requests
a minute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from binidx.storage.stats import BOUNDS, Histogram, Histograms, Usage, find_histograms

TICK_SECONDS, WINDOW_SECONDS, LOG_SECONDS = 5.0, 10.0, 600.0
"""Time between two looks, time of which means are, and time between two lines of one incident."""

FEW_REQUESTS = 4
UNUSUAL_TIMES, LEAST_SECONDS, FIRST_USUAL = 8.0, 0.25, 0.1
USUAL_MEMORY, UNUSUAL_MEMORY = 600.0, 3600.0
"""Seconds in which a usual time follows usual ones and unusual ones."""

DISKS = {"the disk of cache_dir": ("cache_read", "cache_write"), "the disk of local data": ("local_read",)}
"""Disk -> its histograms."""

SLOW_DISK, BUSY_SHARE = 0.5e6, 0.3
"""Bytes a second below which a disk is slow, and the share of the time for which a process waits for it then."""

WAITING, ODD, OTHERS_TIMES = 200, 300, 4
"""Thousandths of its time for which a rank waits, and an odd one when it asks, and by how many times others wait less:
200 to 260 are two waits of 2.5 s, of 1 of 10,000 ranks at each short wait of all."""

CHANGED, CHANGED_SECONDS, RANK_BITS = 10, 600.0, 40
"""Change of a usual share that is added, in thousandths, and time between two of them, as it takes one of the requests
of an incident; bits of the sum of shares, above which the number of ranks stands."""

NUM_REQUESTS, REQUEST_SECONDS = 2, 60.0
"""Most requests of a rank in a time."""

START_SECONDS, CONFIRM_SECONDS = 20.0, 15.0
"""Time of a start, after which a rank that waits has waited for longer than others; and of a wait, after which it asks
whether others wait, too: they look every 5 s, and after a wait of 8 s its share of 10 s is low again."""


@dataclass
class UsualTime:
    """Usual time of the requests to a store.

    Attributes:
        seconds: the usual time; 0: not known.
        num: means it was learned from.
    """

    seconds: float = 0.0
    num: int = 0

    def note(self, recent: Histogram) -> bool:
        """Learn from recent requests; return whether they took unusually long: in the mean, and most of them."""
        usual, mean = self.seconds or FIRST_USUAL, recent.seconds / recent.count
        num_usual = recent.counts[bisect_left(BOUNDS, 2 * usual)]
        is_unusual = mean >= max(LEAST_SECONDS, UNUSUAL_TIMES * usual) and num_usual < recent.count / 2
        if self.seconds or not is_unusual:
            weight = TICK_SECONDS / (UNUSUAL_MEMORY if is_unusual else min(USUAL_MEMORY, TICK_SECONDS * (self.num + 1)))
            self.seconds = (self.seconds or mean) ** (1 - weight) * mean**weight
            self.num += not is_unusual
        return is_unusual


@dataclass
class SlowReads:
    """Incidents of the stores and disks of a process."""

    _looks: deque[tuple[float, Usage]] = field(default_factory=deque)
    _usual: dict[str, UsualTime] = field(default_factory=dict)
    _logged: dict[str, float] = field(default_factory=dict)

    def look(self, used: Usage, now: float) -> tuple[list[str], float]:
        """Return lines of the incidents that begin, and the share of the last seconds that the process waited.

        Args:
            used: counters of `usage`. Those of the first look are of the start, in which a process waits.
        """
        self._looks.append((now, used))
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()
        began, before = self._looks[0]
        if now == began:
            return [], 1.0
        recent = {name: count - before.get(name, 0.0) for name, count in used.items()}
        histograms = find_histograms(recent)
        lines = [*self._stores(histograms), *self._disks(histograms, now - began)]
        new = [(subject, text) for subject, text in lines if now - self._logged.get(subject, -inf) >= LOG_SECONDS]
        self._logged.update((subject, now) for subject, _ in new)
        return [f"{subject} {text}" for subject, text in new], min(1.0, recent["wait_seconds"] / (now - began))

    def _stores(self, histograms: Histograms) -> Iterator[tuple[str, str]]:
        for (kind, bucket), found in histograms.items():
            if kind == "request" and found.count >= FEW_REQUESTS:
                usual = self._usual.setdefault(bucket, UsualTime())
                known = seconds_text(usual.seconds) if usual.seconds else f"less than {seconds_text(FIRST_USUAL)}"
                if usual.note(found):
                    yield f"reads of {bucket}", f"take {seconds_text(found.seconds / found.count)} (usual {known})"

    def _disks(self, histograms: Histograms, passed: float) -> Iterator[tuple[str, str]]:
        for disk, kinds in DISKS.items():
            found = [histograms[kind, ""] for kind in kinds]
            seconds, num_bytes = sum(each.seconds for each in found), sum(each.bytes for each in found)
            if seconds >= BUSY_SHARE * passed and num_bytes < SLOW_DISK * seconds and passed >= TICK_SECONDS:
                rate = num_bytes / min(seconds, passed)  # several threads wait at once
                yield disk, f"gives {rate / 1e6:.1f} MB/s (waited {seconds:.0f} s of {passed:.0f} s)"


def seconds_text(seconds: float) -> str:
    """Format seconds: 2.1 s, 31 ms."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class OddRank:
    """Share of its time for which a rank waits, beside that of the others of its group.

    A rank adds to one counter of the group; the answer is its new value: `num_ranks << RANK_BITS | sum of thousandths`.
    """

    def __init__(self, now: float) -> None:
        self._added, self._waits, self._ask_at = 0, True, now + START_SECONDS
        self._usual = deque[int](maxlen=round(USUAL_MEMORY / TICK_SECONDS))
        self._sent = deque[float]([-inf] * NUM_REQUESTS, NUM_REQUESTS)

    def look(self, share: float, now: float) -> int | None:
        """Return what to add to the counter now; None: nothing."""
        own, last = round(1000 * share), self._sent[-1]
        if not (waits := own >= WAITING):
            self._usual.append(own)
            own = round(sum(self._usual) / len(self._usual))
        has_changed = abs(own - self._added) >= CHANGED and now - last >= CHANGED_SECONDS
        is_due = waits != self._waits or (now >= self._ask_at if waits else has_changed)
        if not is_due or now - self._sent[0] < REQUEST_SECONDS:
            return None
        if waits and not self._waits:
            self._ask_at = max(now + CONFIRM_SECONDS, self._ask_at)
        addition, self._added, self._waits = own - self._added + ((last == -inf) << RANK_BITS), own, waits
        self._sent.append(now)
        return addition

    def answered(self, value: int, now: float) -> str | None:
        """Return the line of an incident that the new value of the counter confirms."""
        if not self._waits or now < self._ask_at:
            return None
        self._ask_at = now + REQUEST_SECONDS
        num_others, total = (value >> RANK_BITS) - 1, value % (1 << RANK_BITS)
        # Fewer than none: the group is a new one, whose counter lacks the ranks that were added to the old one's.
        others = (total - self._added) / num_others if num_others > 0 else inf
        if self._added < max(ODD, OTHERS_TIMES * others):
            return None
        self._ask_at = now + LOG_SECONDS
        return f"waits {self._added / 10:.0f} %, others {others / 10:.1f} %"
