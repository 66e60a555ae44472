"""Mutants of the machines, killed by their simulation alone: python -m simulation.mutants [SEED] [COUNT]

Draws lines of all modules in MACHINES of `tests/structure.py`, changes one at a time in a copy of the tree, and runs
the simulation of that machine until a test fails: `tests/mutants.py` says which changes there are. A simulation that
does not end in `CPU_SECONDS` has found its mutant. Prints each with its outcome, then what survived.
`make mutants-worlds` runs it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from fast import ROOT, module_name
from mutants import Mutant, Outcome, Scratch, draw, files_of
from structure import MACHINES

AT_ONCE = 2
"""Mutants that are tested at a time."""
SECONDS, CPU_SECONDS = 3_600.0, 240
"""Time for the simulation of a machine, which needs 3 to 50 s of CPU: a mutant may never end. The wall clock would
kill all on a busy machine."""
TESTS = {
    "binidx.jobs": ("jobs",),
    "binidx.dataset": ("agreement",),
    "binidx.index": ("build",),
    "binidx.loader.incidents": ("incidents",),
    "binidx.loader": ("readahead",),
    "binidx.storage.cache": ("cache",),
    "binidx.storage.requests.rate_limiter": ("requests", "rates"),
    "binidx.storage.requests.request_rate": ("rates", "requests"),
    "binidx.storage.requests": ("requests",),
    "binidx.storage.task_schedule": ("writing",),
}
"""Module or package -> names of the tests that concern it; the first one that fits holds."""
EQUIVALENT = {
    (
        "binidx.index.cache.lease",
        "record: LeaseRecord = field(default=NO_LEASE, init=False)",
        "record: LeaseRecord = field(default=NO_LEASE, init=True)",
    ): "nothing passes it",
    (
        "binidx.index.cache.lease",
        "_at_work: set[str] = field(default_factory=set, init=False)",
        "_at_work: set[str] = field(default_factory=set, init=True)",
    ): "nothing passes it",
    (
        "binidx.index.cache.lease",
        "_tried: set[LeaseRecord] = field(default_factory=set, init=False)",
        "_tried: set[LeaseRecord] = field(default_factory=set, init=True)",
    ): "nothing passes it",
    (
        "binidx.loader.readahead_window",
        "_num_batches = _num_local = 0",
        "_num_batches = _num_local = -1",
    ): "the first request sets both: it has other fetches than -1, and finds no group",
    (
        "binidx.storage.cache.eviction",
        "counted_at: float = 0.0",
        "counted_at: float = 1.0",
    ): "of a record that is not there: either time is more than an hour ago, so all is counted",
    (
        "binidx.storage.cache.fill_plan",
        "self._probes, self._room = 0, 0.0",
        "self._probes, self._room = 0, -1.0",
    ): "choose sets the room before any round reads it",
    (
        "binidx.storage.cache.fill_plan",
        "worth = uses.used / np.maximum(uses.sizes, 1)",
        "worth = uses.used / np.maximum(1, uses.sizes)",
    ): "the maximum of two numbers has no order",
    (
        "binidx.storage.requests.rate_limiter",
        "self._evidence, self._refused_share = 0.0, 0.0",
        "self._evidence, self._refused_share = 0.0, -1.0",
    ): "the share is read of a limited bucket, whose exchange has set both",
    (
        "binidx.storage.requests.request_rate",
        "known_served: float = 0.0",
        "known_served: float = 1.0",
    ): "only a test reads it, whose begin sets it",
    (
        "binidx.storage.requests.request_rate",
        "known_refused: float = 0.0",
        "known_refused: float = 1.0",
    ): "only a test reads it, whose begin sets it",
    (
        "binidx.storage.requests.request_rate",
        "together_served: float = 0.0",
        "together_served: float = 1.0",
    ): "the end of the first time in which all send less sets it to 0; no rate is indifferent that early",
    (
        "binidx.storage.requests.request_schedule",
        "self.began = self.answered_at = self.ended = 0.0",
        "self.began = self.answered_at = self.ended = 1.0",
    ): "the first request and the end of the read set them before anything reads them",
    (
        "binidx.storage.requests.request_schedule",
        "return age > self.unknown + seconds_in_flight",
        "return (age >= self.unknown + seconds_in_flight)",
    ): "an age is a difference of two clocks, the bound a sum of measured times: equal by chance only, a tick earlier",
    (
        "binidx.storage.requests.retries",
        "self.is_hedged, self.num_hedges = False, 0",
        "self.is_hedged, self.num_hedges = True, 0",
    ): "a failure makes the history, and the end of its pause sets it; or a hedge does, and sets it",
    (
        "binidx.storage.requests.request_schedule",
        "if read.limiter.answered_at > self._times.answered.get(read.store, -math.inf):",
        "if (read.limiter.answered_at >= self._times.answered.get(read.store, -math.inf)):",
    ): "an equal time is stored in its own place",
    (
        "binidx.storage.requests.retries",
        "def __init__(self, error: Exception, retry_after: float = 0.0) -> None:",
        "def __init__(self, error: Exception, retry_after: float = 1.0) -> None:",
    ): "given to all errors of a store; the others are no outage, and their pause does not ask for it",
    (
        "binidx.storage.requests.request_schedule",
        "break # and all that follow are younger",
        "pass # and all that follow are younger",
    ): "a request younger than the floor is neither late nor stalled: both take at least the floor",
    (
        "binidx.storage.requests.request_schedule",
        "return False",
        "return None",
    ): "only asked for its truth",
}
"""(module, line, changed line) -> why no event can tell the two programs apart."""


def tests_of(module: str) -> list[str]:
    """Return the test files that concern a machine, and options of pytest."""
    names = next(names for part, names in TESTS.items() if module.startswith(part))
    folders = {"incidents": "loader"}  # in virtual time, too
    return [*(f"tests/{folders.get(name, 'simulation')}/test_{name}.py" for name in names), "--numprocesses=0"]


def main(arguments: Sequence[str]) -> int:
    """Draw mutants, test each, and print what became of it; return 1 if one survived that has no proof."""
    seed, count = [*map(int, arguments), 1, 120][:2] if len(arguments) < 2 else map(int, arguments)
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))  # of each process, and this one waits
    files = [path for module in MACHINES for path in files_of(ROOT, module)]
    counts, survivors = Counter[str](), list[str]()
    with TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        scratches = SimpleQueue[Scratch]()
        for number in range(AT_ONCE):
            (own := Path(folder, str(number))).mkdir()
            scratches.put(Scratch(ROOT, own, SECONDS))

        def test(mutant: Mutant) -> Outcome:
            module = module_name(mutant.path)
            if (module, mutant.before, mutant.after) in EQUIVALENT:
                return Outcome("equivalent", "", 0.0)
            scratch = scratches.get()
            try:
                return scratch.test(mutant, tests_of(module))
            finally:
                scratches.put(scratch)

        drawn = draw(files, seed, count)
        for mutant, outcome in zip(drawn, pool.map(test, drawn), strict=True):
            word = "killed" if outcome.word == "out of time" else outcome.word
            counts[module_name(mutant.path), word] += 1
            shown = f"{mutant.path.relative_to(ROOT)}:{mutant.line}\n  - {mutant.before}\n  + {mutant.after}"
            print(f"{shown}\n  {outcome.word} after {outcome.seconds:.0f} s {outcome.killer}", flush=True)
            if word == "survived":
                survivors.append(shown)
    words = ("killed", "equivalent", "survived")
    for module in MACHINES:
        print(f"{module:42}" + "".join(f"{counts[module, word]:4} {word}" for word in words))
    num = {word: sum(counts[module, word] for module in MACHINES) for word in words}
    share = num["killed"] / max(1, num["killed"] + num["survived"])
    print(f"seed {seed}, {counts.total()} mutants: {num}, {share:.1%} of those that are not equivalent are killed")
    print(*survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
