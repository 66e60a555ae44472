"""A process that ends, however it does, does not wait for what it reads ahead."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading, time
from helpers.readahead_loaders import Numbers, loader

class Stuck(Numbers):
    stuck, woken = True, threading.Event()
    def __getitems__(self, idxs):
        if self.stuck and max(idxs) >= 20:
            {hang}
        return super().__getitems__(idxs)

batches = iter(loader(Stuck(1000), 8, num_workers={workers}))
for _ in range(3):
    next(batches)
print("ready", flush=True)
{then}
"""
UNCANCELLABLE = "time.sleep(600)"
CANCELLABLE = "from helpers.readahead_loaders import hang; hang(self.woken)"


def start(hang: str, then: str, workers: int = 0) -> subprocess.Popen[str]:
    script = SCRIPT.format(hang=hang, then=then, workers=workers)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process: subprocess.Popen[str], seconds: float) -> str:
    """What it wrote to stderr; it has ended in time."""
    with process:
        try:
            return process.communicate(timeout=seconds)[1]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("hang", "then"),
    [(CANCELLABLE, ""), (UNCANCELLABLE, ""), (CANCELLABLE, "del batches"), (CANCELLABLE, "sys.exit(0)")],
)
def test_the_end_of_a_script_is_its_end(hang: str, then: str) -> None:
    process = start(hang, then)
    assert finish(process, 300) == ""
    assert process.returncode == 0


def test_an_exception_ends_it_too() -> None:
    process = start(UNCANCELLABLE, "raise ValueError('training failed')")
    assert "ValueError: training failed" in finish(process, 300)
    assert process.returncode == 1


@pytest.mark.parametrize("hang", [CANCELLABLE, UNCANCELLABLE])
def test_ctrl_c_interrupts_a_trainer_that_waits(hang: str) -> None:
    process = start(hang, "[*batches]")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in finish(process, 300)
    assert process.returncode == -signal.SIGINT


def test_after_ctrl_c_the_batches_go_on() -> None:
    then = """
import os, signal
begun = threading.Event()
def interrupt():
    begun.wait()  # until `Thread.start`, which waits, too, is over
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "wait":
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
next(batches), next(batches)
threading.Thread(target=interrupt).start()
begun.set()
try:
    next(batches)
    sys.exit("nothing hung")
except KeyboardInterrupt:
    Stuck.stuck = False
    Stuck.woken.set()
# The sampler has gone on: what follows is the batch after the one that was waited for.
assert next(batches).tolist() == [72, 75, 78, 81], "another batch"
assert len([*batches]) == 243
"""
    process = start(CANCELLABLE, then)
    assert finish(process, 300) == ""
    assert process.returncode == 0


def test_workers_end_with_their_loader() -> None:
    process = start(CANCELLABLE, "", workers=2)
    finish(process, 300)
    assert process.returncode == 0


INTERRUPTED = """
import os, signal, binidx
def interrupt(*_):
    signal.raise_signal(signal.SIGINT)
{before}
loader = binidx.load_dataset({path!r}, 4).loader(1, num_workers=2, {options})
num_batches = 0
for batch in loader:
    num_batches += 1
assert num_batches == len(loader)
"""


@pytest.mark.parametrize("hook", ["before", "after_in_parent"])
def test_ctrl_c_while_workers_start_ends_at_the_users_line(hook: str) -> None:
    done = run_interrupted(before=f"os.register_at_fork({hook}=interrupt)")
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert len(done.stderr.splitlines()) <= 4, done.stderr
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_workers_leave_ctrl_c_to_the_trainer(look_ahead: int) -> None:
    done = run_interrupted(options=f"look_ahead={look_ahead}, worker_init_fn=interrupt")
    assert (done.stderr, done.returncode) == ("", 0)


def run_interrupted(before: str = "", options: str = "") -> subprocess.CompletedProcess[str]:
    script = INTERRUPTED.format(before=before, path=str(ROOT / "tests/golden/int32"), options=options)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
