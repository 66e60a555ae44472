"""A process that ends while it is looked at is gone, and no error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import processes


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_ends_between_the_opening_and_the_reading_of_its_file_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert processes.is_running(process.pid)

        def end_and_read(path: Path, **_: Any) -> str:
            with path.open() as file:
                process.kill()
                process.wait()
                return file.read()

        monkeypatch.setattr(Path, "read_text", end_and_read)
        assert not processes.is_running(process.pid)
        monkeypatch.undo()
        assert not processes.is_running(process.pid)
