"""Reads beside a read: of a small object that goes with a large one, while that is read.

Their own threads, because readers are themselves read in the threads of `vectored`: one that waited there for another
thread of the same pool could wait for ever.
"""

from __future__ import annotations

from binidx.storage.threads import Threads
from binidx.storage.vectored import THREADS

submit = Threads("binidx-side", lambda: THREADS).submit
"""Have a read done in a thread; it must not call this itself."""
