"""Python children for a twentieth of the CPU: forked from a process that has imported numpy, s3fs and binidx.

    with Child("import sys; print(sys.argv[1])", "text") as child:
        assert child.communicate()[0] == "text\n"

For what `python -c CODE` must do in a Python of its own, such as imports, exits and signals, take `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from typing import IO, Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["helpers.forked_imports"])


class Inherited:
    """A file descriptor that is pickled while a process is started, as the descriptor there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return detach, (DupFd(self.number),)  # type: ignore[no-untyped-call]


def detach(found: Any) -> int:
    number: int = found.detach()
    return number


def run(code: str, arguments: list[str], environment: dict[str, str], out: int, errors: int) -> None:
    """The work of the child: as `python -c`, with these variables and streams."""
    for number, stream in ((out, 1), (errors, 2)):
        os.dup2(number, stream)
        os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


class Child:
    """A running child, used as a `subprocess.Popen` whose standard output is a pipe of text.

    Args:
        code, arguments: as in `python -c CODE ARGUMENTS`.
        environment: variables besides those of this process.
        errors: a file for its standard error; None: that of this process.
    """

    def __init__(
        self, code: str, *arguments: object, environment: Mapping[str, str] | None = None, errors: IO[Any] | None = None
    ) -> None:
        ours, theirs = os.pipe()
        streams = Inherited(theirs), Inherited(errors.fileno() if errors else 2)
        variables = {**os.environ, **(environment or {})}
        self._process = CONTEXT.Process(target=run, args=(code, [*map(str, arguments)], variables, *streams))
        self._process.start()
        os.close(theirs)
        assert self._process.pid is not None
        self.pid, self.stdout = self._process.pid, os.fdopen(ours)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str, None]:
        """What it wrote, once it has ended."""
        text = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        self._process.join()
        return text, None
