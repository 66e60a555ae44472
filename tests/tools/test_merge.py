"""binidx merge: the call, what a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.conversion import build, names_beside, pair
from helpers.lineage_data import build_with_lineage

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.tools import main


def test_it_merges_and_says_what_it_did(tmp_path: Path, capsys) -> None:
    sources = [build(tmp_path / name, 100, n) for n, name in enumerate("ab")]
    assert main(["merge", *sources, "--to", f"{tmp_path}/all"]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path}/all: 2 datasets\n  20 documents, 20 sequences, 200 tokens\n" in out
    assert "400 bytes copied by the kernel, 0 bytes through this process" in out
    assert err == ""
    assert main(["merge", *sources, "--to", f"{tmp_path}/all"]) == 0
    out, err = capsys.readouterr()
    assert "400 bytes there already, and equal, 400 bytes through this process" in out
    assert err == f"binidx merge: {tmp_path}/all: holds this dataset already, compared byte for byte\n"
    assert main(["merge", *reversed(sources), "--to", f"{tmp_path}/all"]) == 2
    assert "holds .bin, .idx, needed a free name; --overwrite replaces it" in capsys.readouterr().err
    assert main(["merge", *sources, "--to", f"{tmp_path}/all", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 200
    assert pair(f"{tmp_path}/all")[0] == b"".join(pair(source)[0] for source in sources)


def test_dropped_checksums_and_bad_data_are_said(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 100)
    convert_dataset(source, source, way=StorageFormat(checksums=True))
    assert main(["merge", source, "--to", f"{tmp_path}/all"]) == 0
    out = capsys.readouterr().out
    assert "1 dataset\n" in out
    assert "  checksums were neither compared nor carried along: binidx verify each source,\n" in out
    assert f"  then binidx convert {tmp_path}/all --to {tmp_path}/all --checksums\n" in out
    Path(f"{source}.idx").write_bytes(b"nonsense")
    assert main(["merge", source, "--to", f"{tmp_path}/other"]) == 1
    assert "binidx merge: " in capsys.readouterr().err


def test_no_lineage_holds_for_a_list_too(tmp_path: Path) -> None:
    source = build_with_lineage(tmp_path / "en", 10, 1)
    assert main(["merge", source, "--to", f"{tmp_path}/list", "--virtual", "--no-lineage"]) == 0
    assert names_beside(f"{tmp_path}/list") == ["list.parts.json"]
