"""Fixtures of the tests of provenance."""

import logging
import re
from collections import Counter
from typing import Any

import pytest


@pytest.fixture
def requests(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that returns the names of the objects of the requests since its last call, and counts them."""
    caplog.set_level(logging.DEBUG, "binidx.requests")

    def take() -> Counter[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "binidx.requests"]
        caplog.clear()
        names = [re.match(r"\S+://\S*/([^/:]+)", line) for line in lines]
        return Counter(name[1] for name in names if name)

    return take
