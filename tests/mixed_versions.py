"""Several versions of binidx on one node and one bucket, in every order: `make mixed-versions`. Minutes.

    python tests/mixed_versions.py [COMMIT ...]

The versions are commits, each installed into `build/versions` once, and HEAD, which is this tree as it is. They share
the dependencies of this Python. In each order, one version after the other takes the steps of
`helpers/version_steps.py` over the files that the ones before it left; then HEAD takes some of them beside each other
version at the same time. Every result must equal that of HEAD alone. No version may replace or remove a file of another
one, unless `KINDS` allows it for its kind; none may add files beside those of another one or leave its unfinished work,
unless `BESIDE` has that; and none may refuse to go on, unless `KNOWN` has the error.

Prints a table: by kind of file, version that wrote it, and version that came later, what became of the files. Exit
status 1: something else happened; 77: a commit is not in this clone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec
import numpy as np
import xxhash

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from golden.make_state import write_dataset  # noqa: E402
from helpers.version_steps import SOURCES  # noqa: E402
from servers.latency_proxy import Proxy, latency_proxy  # noqa: E402
from servers.seaweed import s3_server  # noqa: E402

FIRST, SECOND, HEAD = "c3b617c", "2e6bc1de", "HEAD"

STEPS: dict[str, set[str]] = {
    "tokens": set(), "run_files": set(), "train": set(), "prepare_cache": set(), "plan": set(), "resume": set(),
    "train_on_new_node": set(), "train_longer": set(),
    "prepare_read_plan": {FIRST}, "train_by_plan": {FIRST}, "read_plan": {FIRST}, "bake": set(),
    "plan_other": {FIRST}, "bake_other": set(), "order": set(),
    "warm": set(), "sums": set(), "compress": set(), "merge": set(), "preprocess_shard": set(),
    "preprocess_on": set(), "preprocess_killed": set(), "convert_on": set(), "convert_killed": set(),
    "parts_on": set(), "parts_killed": {FIRST}, "verify_on": {FIRST}, "verify_killed": {FIRST},
    "grep_on": {FIRST}, "grep_killed": {FIRST},
}  # fmt: skip
"""Steps of a version, in their order, and the versions without the command or option. The work of one that is killed
goes on in the next version's step."""

AT_ONCE = {
    "run_files": "unknown field library", "train": "", "prepare_cache": "unknown field library", "resume": "",
    "bake": "unknown field (options|library)|parts of another job, .*finish that job|another job has just begun",
    "warm": "",
}  # fmt: skip
"""Steps that two versions take at the same time, and errors by which one of them may refuse: run files of HEAD have a
field that is unknown to the first, and a bake belongs to the version that began it, as its chunks are others."""

CHANGES, WORK = {"replaced"}, {"replaced", "removed"}
KINDS: dict[str, tuple[str, set[str]]] = {
    "index arrays": (r"bucket/(cache|longer)/[^/]+\.npy", set()),
    "index descriptions": (r"bucket/(cache|longer)/[^/]+-description\.txt", set()),
    "index manifests": (r"bucket/(cache|longer)/[^/]+-binidx\.json", set()),
    "leases": (r"bucket/(cache|longer)/[^/]+-claim", WORK),
    "orders records": (r"bucket/(cache|longer)/[^/]+-binidx-orders\.json", CHANGES),
    "idx bundles": (r"bucket/(cache|longer)/[^/]+\.bundle", set()),
    "pinned files": (r"bucket/(cache|longer)/[^/]+-binidx-pinned\.json", set()),
    "read plans": (r"bucket/(cache/[^/]+-read-plan|plan)/.+", set()),
    "baked runs": (r"bucket/baked/.+", set()),
    "run files": (r"bucket/runs/.+", set()),
    "loader states": (r"node/state-.+", set()),
    "order tables": (r"node/order/.+", set()),
    "datasets": (r"(?!.*-parts/).+\.(bin|idx|bin\.zst)", set()),
    "sums": (r"(?!.*-parts/).+\.xxh3", set()),
    "lineage": (r"(?!.*-parts/).+\.lineage\.parquet", set()),
    "dataset manifests": (r".+\.manifest\.json", set()),
    "virtual merges": (r".+\.parts\.json", set()),
    "preprocess: jobs": (r".+/(text|shards)/.+-parts/job\.json", WORK),
    "preprocess: records": (r".+/(text|shards)/.+-parts/\w+\.json", WORK),
    "preprocess: parts": (r".+/(text|shards)/.+-parts/.+", WORK),
    "convert: journals": (r"node/copied/.+\.convert\.json", WORK),
    "convert: records": (r"node/copied/.+-parts/.+", WORK),
    "convert: partial files": (r"node/copied/.+\.partial", WORK),
    "convert: locks": (r"node/.+\.convert\.lock", WORK),
    "convert in parts": (r"node/parts/.+-parts/.+", WORK),
    "verify: records": (r"node/records/verify-.+", WORK),
    "grep: records": (r"node/records/grep-.+", WORK),
    "cache: meta": (r"node/(disk-cache|index-dir)/objects/\w+/meta\.json", set()),
    "cache: blocks": (r"node/(disk-cache|index-dir)/objects/.+\.block", CHANGES),
    "cache: seals": (r"node/(disk-cache|index-dir)/seals/.+", set()),
    "cache: usage, locks": (r"node/(disk-cache|index-dir)/(usage|objects/\w+/locks|filling-\w+)", WORK),
}
"""By kind of file: its paths, and what a version may do with those of another one. The first match counts."""

OF_EARLIER = {"pinned files": CHANGES}
"""By kind of file: what versions before HEAD may do, too, which write equal pins with their own name again."""

CACHES = ("bucket/cache/", "bucket/plan/", "bucket/baked/")
"""Folders to which the next version adds nothing, apart from `BESIDE`."""
UNFINISHED = ("preprocess", "convert", "verify", "grep")
"""Kinds of which the next version leaves nothing, apart from `BESIDE`."""

IN_PARTS = ("convert: locks", "convert in parts", "verify: records", "grep: records")
BESIDE = {
    # The first writes no complete.json, which later ones add; a read plan of HEAD has a name that the second lacks.
    **{("baked runs", FIRST, reader): "added" for reader in (SECOND, HEAD)},
    ("read plans", HEAD, SECOND): "added",
    # They convert again by a journal; the first has no work in parts, so it takes no step over that.
    **{("convert: records", HEAD, reader): "left" for reader in (FIRST, SECOND)},
    **{(kind, writer, FIRST): "left" for kind in IN_PARTS for writer in (SECOND, HEAD)},
}
"""By kind of file, its writer and the version that came later: "added", if that one adds files beside those of the
other, or "left", if it leaves what the other had begun. Each must occur."""


Known = dict[str, Any] | str
KNOWN: dict[tuple[str, str, str], Known] = {
    # The first builds of 0.1.0 refuse fields that came later, in files of HEAD, whoever had the turn before.
    **{("run_files", writer, FIRST): "unknown field library" for writer in (SECOND, HEAD)},
    **{("bake", writer, FIRST): "unknown field options" for writer in (SECOND, HEAD)},
}
"""What is not as HEAD alone would do it, by step, version that began and version that goes on: fields of the result; or
the pattern of an error, which refuses to go on and names the remedy: the version that began goes on, with the right
result. Each must occur."""

BUCKET = "mixed"
NOT_IN_CLONE = 77
"""Exit status if a commit is missing."""
WORDS = ["the", "sea", "wrote", "tokens", "quietly"]
Files = dict[str, str]


def install(version: str) -> Path:
    """Return the folder with the package of a version; the first call builds it."""
    if version == HEAD:
        return ROOT / "src"
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", f"{version}^{{commit}}"], capture_output=True, text=True, check=False)
    if found.returncode:
        print(f"{version}: the commit is not in this clone; git fetch --unshallow", file=sys.stderr)
        sys.exit(NOT_IN_CLONE)
    folder = ROOT / "build" / "versions" / found.stdout.strip()
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="binidx-version-") as source:
            archive = subprocess.run([*git, "archive", folder.name], stdout=subprocess.PIPE, check=True).stdout
            subprocess.run(["tar", "x", "-C", source], input=archive, check=True)
            target = folder.with_name(f"{folder.name}.{os.getpid()}")
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            pip += ["--no-build-isolation", "--target", str(target), source]
            done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            if done.returncode:
                sys.exit(f"{version}: cannot be installed\n{done.stdout}")
            target.replace(folder)
    return folder


class Version(contextlib.AbstractContextManager["Version"]):
    """Process that takes steps with the package of a version."""

    def __init__(self, name: str, node: Path, endpoint: str) -> None:
        self.name, package = name, install(name)
        environment = {each: value for each, value in os.environ.items() if not each.startswith("BINIDX")}
        environment |= {
            "PYTHONPATH": f"{package}{os.pathsep}{ROOT / 'tests'}", "AWS_ENDPOINT_URL": endpoint, "BINIDX_HEDGE": "0",
            "BINIDX_INDEX_DIR": f"{node}/index-dir", "BINIDX_DEADLINE_SECONDS": "600", "TMPDIR": f"{node}/tmp",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.version_steps", str(node), f"s3://{BUCKET}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        imported = self.answer()["package"]
        assert imported.startswith(str(package)), f"{name}: found {imported}, need the package in {package}"

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, step: str, turn: int, turns: int) -> None:
        assert self.process.stdin is not None
        print(json.dumps([step, turn, turns]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@cache
def kind_of(path: str) -> str:
    """Return the kind of a file; "" for the sources, and for files that a step keeps for itself."""
    if path.startswith(("bucket/corpus/", "bucket/source/", "node/tmp/")):
        return ""
    for kind, (pattern, _) in KINDS.items():
        if re.fullmatch(pattern, path):
            return kind
    raise AssertionError(f"{path}: is of no kind; add it to KINDS")


@cache
def purpose_of(path: str, node: Path) -> object:
    """Return the kind of a shared file, or the object that a cache has; "" of other files, which each version adds."""
    if path.endswith("/meta.json"):
        about = json.loads((node.parent / path).read_text())
        return path.split("/")[1], about["uri"], str(about["identity"]), about["codec"], about["chunk_bytes"]
    return kind_of(path) if path.startswith(CACHES) else ""


@dataclass
class World:
    """Node and bucket that versions share, and what was found there.

    Args:
        sources: objects that are there before the first version.
        expected: results of HEAD alone, by step and turn.
        seen: digests of files after the last step.
        owners: version that wrote a file last, and its turn, since the order began.
        cells: what became of files, by kind, writer and reader.
        met: what was seen of `KNOWN`.
    """

    node: Path
    proxy: Proxy
    store: Any
    versions: dict[str, Version]
    sources: Mapping[str, bytes]
    expected: dict[tuple[str, int], Any] = field(default_factory=dict)
    seen: Files = field(default_factory=dict)
    owners: dict[str, tuple[str, int]] = field(default_factory=dict)
    cells: dict[tuple[str, str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    met: dict[tuple[str, str, str], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def renew(self) -> None:
        """Remove everything but the sources."""
        shutil.rmtree(self.node)
        for name in ("tmp", "text", "copied", "parts", "records"):
            (self.node / name).mkdir(parents=True)
        for path in self.store.ls(BUCKET):
            self.store.rm(path, recursive=True)
        for name, data in self.sources.items():
            self.store.pipe_file(f"{BUCKET}/{name}", data)
        self.owners.clear()
        self.seen = self.files()

    def files(self) -> Files:
        """Return the digest of each file."""
        objects = self.store.find(BUCKET, detail=True)
        found = {path.replace(BUCKET, "bucket", 1): about["ETag"] for path, about in objects.items()}
        for path in filter(Path.is_file, self.node.rglob("*")):
            found[str(path.relative_to(self.node.parent))] = xxhash.xxh3_64_hexdigest(path.read_bytes())
        return {path: digest for path, digest in found.items() if kind_of(path)}

    def read_by(self, answer: Mapping[str, Any]) -> set[str]:
        """Return the files that a step read: opened ones, and those of requests since the last call."""
        paths = {str(Path(path).relative_to(self.node.parent)) for path in answer["opened"]}
        for request in self.proxy.log():
            if request.method == "GET" and (request.status or 500) < 300:
                paths.add(unquote(urlsplit(request.path).path).replace(f"/{BUCKET}/", "bucket/", 1))
        return paths

    def take(self, step: str, order: Sequence[str], turn: int, name: str) -> None:
        """Let a version take a step; note what became of the files of others, and judge the answer."""
        before = self.seen
        self.proxy.reset()
        self.versions[name].begin(step, turn, len(order))
        answer = self.versions[name].answer()
        read, after = self.read_by(answer), self.files()
        self.seen = after
        where = f"{' > '.join(order)}: {step} of {name}, turn {turn}"
        others = {path: writer for path, (writer, written) in self.owners.items() if path in before and written < turn}
        for path, writer in others.items():
            became = "removed" if path not in after else "replaced" if after[path] != before[path] else "used"
            found = {became, "used"} if path in read else {became} - {"used"}
            self.cells[kind_of(path), writer, name] |= found
            allowed = KINDS[kind_of(path)][1] | (OF_EARLIER.get(kind_of(path), set()) if name != HEAD else set())
            if became not in {"used", *allowed}:
                self.problems.append(f"{where}: {path} of {writer} was {became}")
        there = {purpose_of(path, self.node): writer for path, writer in others.items() if path in after}
        for path in after.keys() - before.keys():
            if writer := there.get(purpose_of(path, self.node) or None, ""):
                self.note_beside(kind_of(path), writer, name, "added", f"{where}: {path}")
        self.owners |= {path: (name, turn) for path, digest in after.items() if before.get(path) != digest}
        key = step, order[turn - 1], name
        known = KNOWN.get(key, {}) if turn else {}
        if isinstance(known, str) and re.search(known, answer.get("error", "")):
            self.met[key] = answer["error"]
            for path, writer in others.items():
                if path.partition("/")[2] in answer["error"]:
                    self.cells[kind_of(path), writer, name].add("refused")
            self.take(step, order, turn, order[turn - 1])
        else:
            self.met |= {key: str(known)} if known else {}
            self.judge(answer, step, turn, where, {} if isinstance(known, str) else known)

    def judge(
        self, answer: Mapping[str, Any], step: str, turn: int, where: str, known: Mapping[str, Any] | None = None
    ) -> None:
        """Note an answer that is not the one of HEAD alone, apart from the known fields."""
        if step.endswith("_killed"):
            found, needed = answer.get("killed", "no kill"), -9
        else:
            found = answer.get("result", answer.get("error", f"no answer: {answer}"))
            needed = self.expected.setdefault((step, turn), found if "result" in answer else None)
            needed = {**needed, **known} if known else needed
        if found != needed:
            self.problems.append(f"{where}: found {found}, need {needed}")

    def note_beside(self, kind: str, writer: str, name: str, became: str, where: str) -> None:
        """Note that a version added a file, or left one of unfinished work; a problem, unless `BESIDE` allows it."""
        self.cells[kind, writer, name].add(became)
        if BESIDE.get((kind, writer, name)) != became:
            self.problems.append(f"{where}, of kind {kind} that {writer} wrote first, was {became} by {name}")

    def run_in_turn(self, order: Sequence[str]) -> None:
        """Let one version after the other take all steps."""
        self.renew()
        for turn, name in enumerate(order):
            for step, lacking in STEPS.items():
                if name not in lacking and not (step.endswith("_on") and not turn):
                    self.take(step, order, turn, name)
        for path, (writer, turn) in self.owners.items():
            if turn < len(order) - 1 and kind_of(path).startswith(UNFINISHED) and path in self.seen:
                self.note_beside(kind_of(path), writer, order[turn + 1], "left", f"{' > '.join(order)}: {path}")

    def run_at_once(self, names: Sequence[str]) -> None:
        """Let versions take steps at the same time, from nothing and then again."""
        self.renew()
        for turn in range(2):
            for step in AT_ONCE:
                for name in names:
                    self.versions[name].begin(step, turn, 2)
                answers = {name: self.versions[name].answer() for name in names}
                refused = [name for name, answer in answers.items() if has_refused(answer, AT_ONCE[step])]
                for name in names if refused == [*names] else [name for name in names if name not in refused]:
                    self.judge(answers[name], step, turn, f"{' | '.join(names)}: {step} of {name}, turn {turn}")
        self.files()

    def table(self) -> str:
        """Return the table of cells; a column of HEAD after itself shows what any next start does."""
        letters = dict(zip(self.versions, "ABCDEFGH", strict=False))
        pairs = [(HEAD, HEAD), *permutations(self.versions, 2)]
        rows = [["", *(f"{letters[writer]} > {letters[reader]}" for writer, reader in pairs)]]
        rows += [[kind, *("+".join(sorted(self.cells[kind, *pair])) or "-" for pair in pairs)] for kind in KINDS]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*(f"{letter} = {name}" for name, letter in letters.items()), *lines])


def has_refused(answer: Mapping[str, Any], allowed: str) -> bool:
    """Return whether the answer of a step is an error that has a pattern."""
    return bool(allowed and re.search(allowed, answer.get("error", "")))


def make_sources(folder: Path) -> dict[str, bytes]:
    """Return the objects of the bucket that all versions begin with: datasets, text and a tokenizer."""
    rng, found = np.random.default_rng(0), dict[str, bytes]()
    for number in range(SOURCES):
        write_dataset(f"{folder}/{number}", number, 60)
        found |= {f"corpus/{path.name}": path.read_bytes() for path in folder.glob(f"{number}.*")}
    for number in range(2):
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(30)]
        rows = [json.dumps({"text": text, "id": f"row-{number}-{row}"}) + "\n" for row, text in enumerate(texts)]
        found[f"source/{number}.jsonl"] = "".join(rows).encode()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return found | {"source/vocab.txt": "".join(word + "\n" for word in vocabulary).encode()}


def main(*names: str) -> int:
    """Run all orders of HEAD and some commits, and print the table and the problems."""
    others = names or (FIRST, SECOND)
    chosen = (*others, HEAD)
    for name in others:
        install(name)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="binidx-versions-") as text,
        s3_server(Path(text) / "server") as server,
        server.in_environment(),
        latency_proxy(server.endpoint, delay_ms=0) as proxy,
        contextlib.ExitStack() as stack,
    ):
        (node := Path(text) / "node").mkdir()
        (folder := Path(text) / "sources").mkdir()
        server.make_bucket(BUCKET)
        versions = {name: stack.enter_context(Version(name, node, proxy.endpoint)) for name in chosen}
        store = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
        world = World(node, proxy, store, versions, make_sources(folder))
        world.run_in_turn([HEAD] * len(chosen))
        print(f"{time.monotonic() - began:.0f} s: HEAD alone", flush=True)
        for order in permutations(chosen):
            world.run_in_turn(order)
            print(f"{time.monotonic() - began:.0f} s: {' > '.join(order)}", flush=True)
        for name in others:
            world.run_at_once([HEAD, name])
            print(f"{time.monotonic() - began:.0f} s: HEAD | {name}", flush=True)
    missed = [key for key in KNOWN if {*key[1:]} <= {*chosen} and key not in world.met]
    world.problems += [f"{key}: is in KNOWN, and did not occur" for key in missed]
    missed = [key for key, became in BESIDE.items() if {*key[1:]} <= {*chosen} and became not in world.cells[key]]
    world.problems += [f"{key}: is in BESIDE, and did not occur" for key in missed]
    known = [
        f"{step}, begun by {writer}, goes on with {name}: {text}" for (step, writer, name), text in world.met.items()
    ]
    print("", world.table(), "", *known, "", *world.problems or ["all as expected"], sep="\n")
    return 1 if world.problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
