"""A run and its pages on a real server, and a reader of HTML for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from helpers.lineage_data import build_with_lineage
from tokenizers import Tokenizer, models

import binidx
from binidx.explore.app import build_app, build_server, listen
from binidx.explore.explored import Explored

TOKEN = "token-of-the-tests"
HOSTILE = [
    "<script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "</div></details><a href='javascript:window.pwned=1'>click</a>",
    "{{ 7*7 }}{% raw %}",
    "\x00\x1b[31m\u202e",
    "&lt;b&gt;",
]
"""Words of the vocabulary, one a token."""


def write_run(folder: Path, **options: Any) -> str:
    """Write two sources with lineage, manifests and a tokenizer with hostile words, and a run; return its file."""
    words = {"<eod>": 0, **{word: number for number, word in enumerate(HOSTILE, 1)}}
    words |= {f"w{number}": number for number in range(len(words), 256)}
    Tokenizer(models.WordLevel(words, unk_token="<eod>")).save(f"{folder}/tokenizer.json")
    spec = binidx.describe_tokenizer(f"{folder}/tokenizer.json", eod="<eod>")
    sources = {"en": (400, 1), "code": (40, 2)}
    prefixes = [build_with_lineage(folder / name, *sizes, np.uint8) for name, sizes in sources.items()]
    for prefix in prefixes:
        job = {"tokenizer": asdict(spec)}
        Path(f"{prefix}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": job}))
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=32, blend=(prefixes, [0.7, 0.3]), split="1,0,0", tokenizer=spec,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=f"{folder}/cache",
    )  # fmt: skip
    sizes = {"global_batch_size": 8, "rampup_batch_size": (4, 4, 40), **options}
    run = binidx.Run(config, [300, 0, 0], 2, 2, **sizes)
    run.save(f"{folder}/run.json")
    (folder / "loss.csv").write_text("Step,loss\n" + "".join(f"{step},{5 - step / 20}\n" for step in range(40)))
    return f"{folder}/run.json"


@dataclass(frozen=True)
class PageServer:
    """Pages that are being served."""

    port: int
    explored: Explored

    @property
    def digest(self) -> str:
        return self.explored.digest

    @property
    def cookie(self) -> str:
        return f"binidx-{self.port}"

    def document_with(self, token: int) -> int:
        """The first document of the first source that has a token."""
        stored = self.explored.sources[0].dataset
        sequence = next(number for number in range(len(stored)) if token in stored.get(number))
        return int(np.searchsorted(stored.document_indices, sequence, "right")) - 1

    @property
    def first(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={TOKEN}"

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and text of a response; with the cookie unless `cookie` is given, to any path as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            given = {"cookie": f"{self.cookie}={TOKEN}", **headers}
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in given.items()})
            response = connection.getresponse()
            return (
                response.status,
                {name.lower(): text for name, text in response.getheaders()},
                response.read().decode(),
            )

    def page(self, path: str) -> str:
        """Text of a page of the run."""
        status, _, text = self.get(f"/{self.digest}/{path}")
        assert status == 200, text
        return text


@contextlib.contextmanager
def served(explored: Explored) -> Iterator[PageServer]:
    """Serve pages until the block ends."""
    socket = listen("127.0.0.1", 0)
    port = socket.getsockname()[1]
    server = build_server(build_app(explored, TOKEN, ["127.0.0.1", "proxy.example"], f"binidx-{port}"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield PageServer(port, explored)
    finally:
        server.should_exit = True
        thread.join()
        socket.close()


CELLS = ("td", "th", "dt", "dd")


class _Reader(HTMLParser):
    in_cell = False

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.texts, self.rows = list[tuple[str, dict[str, str | None]]](), list[str](), list[list[str]]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in CELLS:
            self.in_cell = True
            self.rows[-1:] = [[*(self.rows[-1] if self.rows else []), ""]]

    def handle_endtag(self, tag: str) -> None:
        self.in_cell &= tag not in CELLS

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.in_cell:
            self.rows[-1][-1] = f"{self.rows[-1][-1]} {data.strip()}".strip()


def read_html(text: str) -> _Reader:
    """Tags, texts and rows of tables of a page."""
    reader = _Reader()
    reader.feed(text)
    return reader


def number(text: str) -> int:
    """The number of a cell."""
    return int(re.sub(r"[^\d]", "", text))
