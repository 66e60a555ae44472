"""Executor of threads whose tasks are pickled as for other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class PicklingExecutor(ThreadPoolExecutor):
    """Threads that get a copy of each task, as a process does."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        copied, arguments = pickle.loads(pickle.dumps((fn, args)))
        return super().submit(copied, *arguments, **kwargs)
