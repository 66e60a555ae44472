"""The blocks of README.md, typed as they stand: each pip line becomes an environment of what it names, the Hub a
server here, and the S3 server listens on free ports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

from helpers.installs import link_environment
from helpers.trained_tokenizers import byte_level
from servers.http_objects import http_objects
from servers.seaweed import find_weed, free_ports

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = {"binidx": "binidx.tools", "torchrun": "torch.distributed.run"}
PORTS = ["s3.port", "s3.port.grpc", "webdav.port"]
PORTS += [f"{name}.port{kind}" for name in ("master", "volume", "filer", "admin") for kind in ("", ".grpc")]


def make_environment(folder: Path, extras: list[str]) -> None:
    """Make the virtual environment of the pip lines, with the programs that they install."""
    python = link_environment(folder, extras)
    for name, module in PROGRAMS.items():
        program = python.with_name(name)
        program.write_text(
            f"#!{python}\nif __name__ == '__main__':\n    import {module}\n\n    exit({module}.main())\n"
        )
        program.chmod(0o755)
    python.with_name("weed").symlink_to(find_weed())


def test_the_blocks_run_as_typed_from_nothing_and_losses_fall(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "sh", "sh", "sh"]
    script, local, server, bucket = (block for _, block in blocks)
    (tmp_path / "train.py").write_text(script)
    lines = [*local.splitlines(), *server.splitlines(), *bucket.splitlines()]
    extras = ",".join(re.findall(r"pip install 'binidx\[(.*?)\]'", "\n".join(lines))).split(",")
    assert extras == ["hub", "preprocess", "torch", "demo", "s3"]
    make_environment(tmp_path / "env", [extra for extra in extras if extra != "demo"])
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    options = [f"-{name}={port}" for name, port in ports.items()]
    typed = "\n".join(lines).replace("python3 -m venv env && ", "").replace(":8333", f":{ports['s3.port']}")
    typed = re.sub(r"pip install '.*?'", "true", typed)
    typed = typed.replace("weed mini", f"weed mini {' '.join(options)} -s3.port.iceberg=0 -s3.port.lance=0")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BINIDX", "AWS", "HF"))}
    kept |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    file = "/openai-community/gpt2/resolve/main/tokenizer.json"
    with http_objects({f"/api/resolve-cache{file}": byte_level().to_str().encode()}) as hub:
        hub.targets[file] = f"/api/resolve-cache{file}"
        process = subprocess.Popen(
            ["bash", "-ec", typed], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, cwd=tmp_path, env={**kept, "HF_ENDPOINT": hub.endpoint}, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # the S3 server is left, if all went well
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", said)]
    assert len(losses) == 3 * 6
    assert losses[5] < losses[0] - 1
    assert "s3://corpus/en: sound" in said
