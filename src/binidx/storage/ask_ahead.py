"""Whether to ask the disk ahead: it gives ten times the bytes while pages are cold, and doubles the work when warm.

reads      cold cold cold warm warm .. warm | warm warm warm warm cold | cold ..
ask ahead   yes  yes  yes  yes  yes ..  yes |  no   no   no   no   no  |  yes ..
                           `patience` reads    the one that had to wait
"""

from __future__ import annotations

PATIENCE = 8
MOST_PATIENCE = 4096


class AskAhead:
    """Asks until some reads in a row did not move the disk, and again as soon as one does.

    Where the system does not count what was asked ahead (some filesystems in user space) each read looks warm while
    asking helps. So patience doubles each time it ended too early: 1 read in 8, 16, 32, ... goes without.
    """

    def __init__(self) -> None:
        self.warm_reads = 0
        self.patience = PATIENCE

    @property
    def wanted(self) -> bool:
        return self.warm_reads < self.patience

    def saw(self, disk_moved: bool) -> None:
        """One more read, and whether the disk was read for it."""
        if not disk_moved:
            self.warm_reads += 1
            return
        if not self.wanted:
            too_early = self.warm_reads < 2 * self.patience
            self.patience = min(2 * self.patience, MOST_PATIENCE) if too_early else PATIENCE
        self.warm_reads = 0
