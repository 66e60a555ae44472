"""binidx clean: what killed processes left is listed and removed, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from binidx.storage.location import Location
from binidx.storage.stores.local import node_id
from binidx.storage.writing.publish import create_object
from binidx.tools import main


def test_it_lists_and_then_removes_all_but_files_in_use(tmp_path: Path, capsys) -> None:
    (tmp_path / "deep").mkdir()
    left = tmp_path / "deep" / f"en.bin.{node_id()}{'a' * 24}.tmp"
    left.write_bytes(bytes(2048))
    (tmp_path / "deep" / "users.tmp").touch()
    with create_object(Location.of(tmp_path / "x")) as out:
        out.write(b"x")
        assert main(["clean", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert f"{left}\n  2.0 KiB, written " in text
        assert text.endswith("2 files, 2.0 KiB\n")
        assert left.exists()
        [staged] = tmp_path.glob("x.*.tmp")
        assert main(["clean", str(tmp_path), "--remove", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["files"]
    assert {each["path"]: each["removed"] for each in found} == {str(left): True, str(staged): False}
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["deep", "users.tmp", "x"]


def test_a_directory_that_does_not_exist_is_an_error(tmp_path: Path, capsys) -> None:
    assert main(["clean", f"{tmp_path}/no"]) == 2
    assert capsys.readouterr().err == f"binidx clean: {tmp_path}/no: no such directory\n"
