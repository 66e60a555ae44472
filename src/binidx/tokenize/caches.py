"""Where tiktoken and Hugging Face keep what they have fetched: names are looked up there and never fetched by us.

Source: tiktoken 0.14, load.py; huggingface_hub, "Understand caching".
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.tokenize.patterns import ENCODINGS


def cached_encoding(name: str) -> str:
    """The file of ranks of an encoding, where tiktoken keeps it.

    Raises:
        ConfigError: tiktoken has not fetched it.
    """
    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(named) if named else Path(tempfile.gettempdir()) / "data-gym-cache"
    path = cache / hashlib.sha1(ENCODINGS[name].address.encode()).hexdigest()
    if not path.exists():
        raise ConfigError(
            f"{name}: not in {cache}; python -c \"import tiktoken; tiktoken.get_encoding('{name}')\" fetches it"
        )
    return str(path)


def cached_snapshot(name: str) -> str | None:
    """The folder of `org/name` in Hugging Face's cache, as of its branch main; None of what is a URI or a path.

    Raises:
        ObjectNotFoundError: it is nowhere.
    """
    if "://" in name or Path(name).exists():
        return None
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        return str(model / "snapshots" / (model / "refs" / "main").read_text().strip())
    except OSError as error:
        raise ObjectNotFoundError(
            f"{name}: no file, no folder, and not in {hub}; hf download {name} fetches it"
        ) from error
