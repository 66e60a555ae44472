"""As much of Megatron-LM's handler of signals as a loader's worker begins with."""

from __future__ import annotations

ENTERED: list[object] = []


class DistributedSignalHandler:
    def __init__(self, sig: object) -> None:
        self.sig = sig

    def __enter__(self) -> DistributedSignalHandler:
        ENTERED.append(self.sig)
        return self
