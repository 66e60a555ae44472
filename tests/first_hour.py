"""The first hour of a newcomer, by a wheel: `make first-hour`. Minutes, and 4 GB of disk.

Types the blocks of README.md into one fresh environment; the Hub is a server here. Then installs the wheel with core
dependencies alone into another, and goes from text to a loader on S3 (SeaweedFS on loopback); there an extra is
installed only when an error asks for it, by the line that the error prints. Each step prints its command and its
output, and expects an exit status and a text; the exit status is 1 if one differs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP_LINE = re.compile(r"pip install '?binidx\[\w+\]'?")
SHOWN_LINES = 45


class Newcomer:
    """A shell in a fresh environment, which installs what errors ask for."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.num_steps, self.installed, self.surprises = 0, list[str](), list[str]()

    def title(self, text: str) -> None:
        print(f"\n\033[1m## {text}\033[0m" if sys.stdout.isatty() else f"\n## {text}", flush=True)

    def types(self, command: str, *says: str, status: int = 0, stdin: str = "") -> str:
        """Run a command, install the extras that its errors name, and compare the last run with the expectations.

        Args:
            says: regular expressions; the output, stdout and stderr as a terminal mixes them, has to match each.
            stdin: a Python program, which is shown, too.
        """
        self.num_steps += 1
        print(f"\n$ {command}" + (f" <<'END'\n{stdin.strip()}\nEND" if stdin else ""), flush=True)
        while True:
            found, output = self._run(command, stdin)
            lines = output.splitlines()
            more = [f"... {len(lines) - SHOWN_LINES} more lines"] * (len(lines) > SHOWN_LINES)
            print("".join(f"{line}\n" for line in [*lines[:SHOWN_LINES], *more]), end="", flush=True)
            asked = PIP_LINE.search(output)
            if not found or asked is None or asked[0] in self.installed:
                break
            self._install(asked[0])
            print(f"\n$ {command}", flush=True)
        wrong = [f"exit status {found}, expected {status}"] * (found != status)
        wrong += [f"no {pattern!r} in the output" for pattern in says if not re.search(pattern, output)]
        wrong += ["a traceback"] * ("Traceback" in output and not stdin)
        wrong += [f"a line of {len(line)} characters" for line in lines if len(line) > 1_000]
        for each in wrong:
            print(f"!!! {each}", flush=True)
        self.surprises += [f"{command}: {each}" for each in wrong]
        return output

    def python(self, program: str, *says: str, status: int = 0) -> str:
        return self.types("python", *says, status=status, stdin=program)

    def _install(self, line: str) -> None:
        self.installed.append(line)
        began = time.monotonic()
        status, output = self._run(f"{line} --quiet", "")
        print(f"\n$ {line}\n({time.monotonic() - began:.0f} s)", flush=True)
        if status:
            sys.exit(f"{line}: {status}\n{output}")

    def _run(self, command: str, stdin: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, cwd=self.folder, env=self.environment,
        )  # fmt: skip
        return done.returncode, done.stdout.replace(str(self.folder), "~")


def prepare(folder: Path) -> None:
    """Write what a newcomer brings: text, a tokenizer, and an empty bucket."""
    sys.path.append(str(ROOT / "examples"))
    from demo.corpus import build_corpus, train_bpe

    texts = build_corpus()["en"][:2_000]
    rows = [json.dumps({"id": f"doc-{number}", "text": text}) for number, text in enumerate(texts)]
    (folder / "en.jsonl").write_text("\n".join(rows) + "\n")
    train_bpe(texts[:200], folder / "tokenizer.json", vocab_size=1_024)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}')


def readme(user: Newcomer) -> None:
    """Type the commands of README.md in a folder of their own; the bucket stands, and so does the environment."""
    from servers.http_objects import http_objects

    user.title("README: four commands and a script, then from a bucket")
    tokenizer = (user.folder / "tokenizer.json").read_bytes()
    user.folder /= "readme"
    user.folder.mkdir()
    page = (ROOT / "README.md").read_text().replace("s3://corpus/", "s3://readme/")
    local, server, bucket = (block.splitlines() for block in re.findall(r"```sh\n(.*?)```", page, re.S))
    (user.folder / "train.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
    user.types(f"{local[0].rpartition('&& ')[2]} --quiet")
    user.types(local[1])
    with http_objects({"/openai-community/gpt2/resolve/main/tokenizer.json": tokenizer}) as hub:
        user.environment["HF_ENDPOINT"] = hub.endpoint
        user.types(local[2], "79 documents", "<eod>")
    user.types(local[3], r"step 50  loss \d")
    user.types(f"{server[1]} --quiet && weed version")
    for line, says in zip(bucket, ("", "-> s3://readme/en", "en: sound", r"(?s)(step 50 .*){2}"), strict=True):
        user.types(line, says)
    user.types("binidx doctor s3://readme/en", "ok +torch", "a dataset, in")


def look_around(user: Newcomer) -> None:
    user.title("What is installed")
    user.types("binidx --help | head -8", "usage: binidx COMMAND", "preprocess")
    user.types("binidx", "usage: binidx COMMAND")
    user.types("python -m binidx --version", r"binidx \d+\.\d+")
    user.types("binidx preproces en.jsonl", "did you mean 'preprocess'", status=2)
    user.types("binidx inspect --help", "usage: binidx inspect", "example:")


def tokenize(user: Newcomer) -> None:
    user.title("Text to tokens")
    user.types("binidx preprocess en.jsonl --to data/en", "--tokenizer", status=2)
    user.types("binidx preprocess english.jsonl --to data/en --tokenizer tokenizer.json", "english.jsonl", status=2)
    user.types(
        "binidx preprocess en.jsonl --to data/en --tokenizer tokenizer.json --dry-run", "2,000", "data/en_text_d"
    )
    user.types("binidx estimate en.jsonl --tokenizer tokenizer.json", "tokens")
    user.types(
        "binidx preprocess en.jsonl --to data/en --tokenizer tokenizer.json --append-eod --id-key id",
        "2,000 documents",
    )
    user.types("ls data", "en_text_document.bin", "en_text_document.idx")
    user.types("binidx inspect data/en", "did you mean data/en_text_document", status=2)
    user.types("binidx inspect data/en_text_document.bin", "2,000")
    user.types("binidx inspect ~/data/en_text_document", "2,000")
    user.types("binidx inspect data/en_text_document --text 1 --tokenizer tokenizer.json", "2,000")
    user.types("binidx verify data/en_text_document --vocab-size 1024", "sound|ok")
    user.types("binidx verify data/en_text_document --vocab-size 100", "token 351, needed 0 to 99", status=1)


def to_s3(user: Newcomer) -> None:
    user.title("To S3")
    user.types("binidx convert data/en_text_document --to s3://corpos/en", "corpos", status=2)
    user.types("binidx convert data/en_text_document --to s3://corpus/en", "s3://corpus/en")
    user.types("binidx convert data/en_text_document --to s3://corpus/en", "holds this dataset already")
    user.types("binidx inspect s3://corpus/en --json | head -c 300", '"documents": 2000|"num_documents": 2000')
    user.types("AWS_SECRET_ACCESS_KEY=wrong binidx inspect s3://corpus/en", "credentials|key|denied", status=2)


def read(user: Newcomer) -> None:
    user.title("From Python")
    user.python(
        """
import binidx
data = binidx.IndexedDataset("s3://corpus/en")
print(data)
print(len(data), data[0][:8], data.sequence_lengths[:4])
""",
        r"IndexedDataset\(s3://corpus/en", "2000",
    )  # fmt: skip
    user.python(
        """
import binidx
train = binidx.load_dataset("s3://corpus/en", sequence_length=256)
print(train)
print(train[0]["tokens"].shape)
loader = train.loader(batch_size=8)
print(loader, len(loader), "batches")
for number, batch in enumerate(loader):
    if number == 0:
        print({name: tuple(value.shape) for name, value in batch.items()})
print(number + 1, "batches seen")
print(loader.state_dict()["consumed_samples"], "samples consumed")
print(binidx.report())
""",
        r"GPTDataset\(s3://corpus/en", r"\(8, 256\)", "batches seen", "requests",
    )  # fmt: skip
    user.python(
        """
import binidx
train = binidx.load_dataset({"s3://corpus/en": 0.7, "data/en_text_document": 0.3}, sequence_length=256)
print(train)
print(train.as_code())
binidx.Run(train.config, train.sizes, 8).save("run.json")
""",
        "BlendedDataset", "GPTDatasetConfig", "0.7",
    )  # fmt: skip


def provenance(user: Newcomer) -> None:
    user.title("What was in a step")
    user.types("binidx plan run.json", "steps")
    user.types("binidx trace run.json --steps 3", "document", "en.jsonl")
    user.types("binidx trace run.json --steps 3000", r"--steps: found 3000, the run has \d+ steps", status=2)
    user.types("binidx trace run.json --steps three", "--steps", status=2)
    user.types("binidx where run.json --document 7 --source s3://corpus/en --steps :40", "step")
    user.types("binidx where run.json --document id=doc-7", "step")
    user.types("binidx where run.json --document id=nobody", "nobody", status=2)
    user.types("binidx account run.json", "s3://corpus/en", "epochs")
    user.types("binidx trace run.json", "--steps", status=2)


def mistakes(user: Newcomer) -> None:
    user.title("Common mistakes")
    for call, says in (
        ('load_dataset("x", sequence_length=256)', "x.idx"),
        ('load_dataset("s3://corpus/english", sequence_length=256)', "s3://corpus/english"),
        ('load_dataset("data/en_text_document", 256, split="90,10", which="test")', "split"),
        ('load_dataset("data/en_text_document", 256, shuffle=True)', "shuffle"),
        ('load_dataset("data/en_text_document", "256")', "sequence_length"),
        ('load_dataset("data/en_text_document", 0)', "sequence_length"),
        ('load_dataset({"data/en_text_document": "much"}, 256)', "much|weight"),
        ('load_dataset([], 256)', "blend"),
        ('load_dataset("data/en_text_document", 256).loader(0)', "batch_size: found 0"),
        ('IndexedDataset("data/en")', "data/en"),
        ('GPTDatasetConfig(random_seed=1, sequence_length=8, blend="x", split="1,0,0")', "tokenizer"),
        ('GPTDatasetConfig(1, 8, blend=("x", 1), split="1,0,0", tokenizer=SpecialTokens())', "blend"),
        ('load_dataset("data/en_text_document", 256, tokenizer="tokenizer.js")', "tokenizer.js"),
        ('load_dataset("gs://corpus/en", sequence_length=256)', "gs://corpus/en"),
        ('load_datasets("x", 256)', "load_dataset"),
    ):  # fmt: skip
        output = user.types(f"python -c 'from binidx import *; import binidx; binidx.{call}' 2>&1 | tail -n 1", says)
        if "binidx.errors." not in output and "AttributeError" not in output:
            user.surprises.append(f"{call}: no error of binidx: {output}")
    user.title("Errors as JSON")
    user.types("binidx verify nowhere --json 2> /dev/null", '"kind": "ObjectNotFoundError"', status=2)
    user.types("binidx trace run.json --json 2> /dev/null", '"exit_status": 2', "--steps", status=2)
    user.types("binidx shuffle data/en_text_document --to data/mixed --seed 1 --memory 2", "--memory", status=2)
    user.types("binidx demo --steps 8", "examples/demo: not installed .*clone.*make demo", status=2)


CHAPTERS = [look_around, tokenize, to_s3, read, provenance, mistakes]


def environment_of(place: str, home: Path, server: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a newcomer with the programs of a virtual environment and the keys of a server."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BINIDX"))}
    return names | dict(server) | {
        "PATH": f"{place}/bin:{os.environ['PATH']}", "HOME": str(home), "COLUMNS": "100",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip


def main(wheel: str) -> int:
    """Run the hour; return 1 if a step was not as expected."""
    from servers.seaweed import s3_server

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="binidx-hour-") as text, s3_server(Path(text) / "server") as server:
        folder = Path(text) / "home"
        folder.mkdir()
        prepare(folder)
        server.make_bucket("corpus")
        server.make_bucket("readme")
        surprises = list[str]()
        for name, chapters in {"readme": [readme], "venv": CHAPTERS}.items():
            venv.EnvBuilder(symlinks=True, with_pip=True).create(Path(text) / name)
            user = Newcomer(folder, environment_of(f"{text}/{name}", folder, server.environment))
            user.types(f"pip install --quiet {Path(wheel).resolve()}")
            user.types("pip list --format freeze")
            for chapter in chapters:
                chapter(user)
            surprises += user.surprises
        size = subprocess.run(["du", "-sm", f"{text}/venv"], capture_output=True, text=True, check=True).stdout.split()
    print(f"\n{user.num_steps} steps in {time.monotonic() - began:.0f} s, {size[0]} MB; installed on request:")
    print(*(f"    {line}" for line in user.installed), sep="\n")
    print(*(f"!!! {each}" for each in surprises) if surprises else ["all as expected"], sep="\n")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
