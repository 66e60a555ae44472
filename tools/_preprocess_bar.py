"""What a person sees of a preprocess that runs: parts, machines, documents, tokens, bytes a second, time left."""

from __future__ import annotations

from tqdm import tqdm

from binidx.prepare.preprocess.progress import Progress

from ._bar import Bar


class PreprocessBar(Bar):
    """A Watcher that draws one bar for all parts, on stderr when it is a terminal; and one for what comes after."""

    def __init__(self) -> None:
        super().__init__("preprocess")
        self._shown: Progress | None = None

    def __enter__(self) -> PreprocessBar:
        return self

    def show(self, progress: Progress) -> None:
        """All of it is told by parts that are done, so it moves by parts."""
        if self._shown is None:
            self._bar = tqdm(
                total=progress.total_bytes, initial=progress.done_bytes, unit="B", unit_scale=True, disable=None
            )
        assert self._bar is not None
        before = self._shown.done_bytes if self._shown else progress.done_bytes
        self._bar.set_description(_parts(progress), refresh=False)
        told = f"{progress.machines:,} machines, " if progress.machines > 1 else ""
        told += f"{progress.num_documents:,} documents, {progress.num_tokens / 1e6:,.1f} M tokens"
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update(progress.done_bytes - before)
        self._bar.refresh()
        self._shown = progress


def _parts(progress: Progress) -> str:
    """Of a shard: its share, and all."""
    told = f"part {progress.parts_done:,} of {progress.parts:,}"
    if progress.parts >= progress.all_parts:
        return told
    return f"{told} of this shard, {progress.all_parts_done:,} of {progress.all_parts:,} in all"
