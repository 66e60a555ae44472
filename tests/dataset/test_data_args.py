"""Blends of arguments and of files, against Megatron Core's reading of the same lists."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Bucket
from helpers.oracle import megatron
from hypothesis import given
from hypothesis import strategies as st
from servers.http_objects import Server

from binidx.dataset.blend_arguments import (
    get_blend_and_blend_per_split,
    get_blend_from_list,
    read_data_args,
    read_per_split_data_args,
)
from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.packed.packed_run import load_packed_run
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

PREFIXES = st.sampled_from(["a", " s3://b/c ", "x.1", "7", "en_text_document"])
PACKED = {"fork": "lit-gpt", "block_size": 8, "n_chunks": 1, "seed": 1}
WEIGHTS = st.sampled_from(["1", "0.5", " 2 ", "1e-3"])


@given(st.one_of(st.lists(PREFIXES, min_size=1), st.lists(st.tuples(WEIGHTS, PREFIXES), min_size=1)))
def test_lists_are_read_as_megatron_reads_them(items: list[Any]) -> None:
    arguments = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
    parsed = [_is_number(each) for each in arguments[::2]]
    if len(arguments) % 2 == 0 and any(parsed) and not all(parsed):
        with pytest.raises(ConfigError, match="in the place of a weight"):
            get_blend_from_list(arguments)
    else:
        assert get_blend_from_list(arguments) == tuple(megatron.utils.get_blend_from_list(arguments))


def _is_number(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return False
    return True


def test_weights_for_some_prefixes_only_are_an_error_where_megatron_takes_them_for_prefixes() -> None:
    arguments = ["1", "a", "x", "b"]
    assert megatron.utils.get_blend_from_list(arguments) == (["1", "a", "x", "b"], None)
    with pytest.raises(ConfigError, match="found 'x' in the place of a weight; need one before each prefix, or none"):
        get_blend_from_list(arguments)
    with pytest.raises(ConfigError, match="data path: found none"):
        get_blend_from_list([])
    assert get_blend_from_list(None) is None


def test_arguments_come_out_of_files_in_any_store(s3: Bucket) -> None:
    text, table = f"{s3.fresh()}/args.txt", f"{s3.fresh()}/args.json"
    with create_object(Location.of(text)) as out:
        out.write(b"0.7 s3://corpus/en\n0.3   gs://corpus/code\n")
    with create_object(Location.of(table)) as out:
        out.write(json.dumps({"train": ["0.7", "a", 0.3, "b"], "valid": "c d", "test": None}).encode())
    assert read_data_args(text) == (["s3://corpus/en", "gs://corpus/code"], [0.7, 0.3])
    per_split = [(["a", "b"], [0.7, 0.3]), (["c", "d"], None), None]
    assert read_per_split_data_args(table) == per_split
    assert get_blend_and_blend_per_split(SimpleNamespace(per_split_data_args_path=table)) == (None, per_split)
    assert get_blend_and_blend_per_split(SimpleNamespace(data_args_path=text)) == (read_data_args(text), None)


def test_files_of_a_web_server_name_no_data_elsewhere(web: Server) -> None:
    listed = f"{web.endpoint}/names"
    for name, read, text in (
        ("args.txt", read_data_args, "0.5 /etc/x 0.5 https://other/y"),
        ("split.json", read_per_split_data_args, '{"train": ["/etc/x"], "valid": null, "test": null}'),
        ("packed.json", load_packed_run, json.dumps(PACKED | {"sets": [{"name": "a", "files": ["/etc/x"]}]})),
        (
            "listed.json",
            load_packed_run,
            json.dumps(PACKED | {"sets": [{"name": "a", "files": listed}]}),
        ),
    ):
        web.objects |= {f"/{name}": text.encode(), "/names": b"/etc/x\n"}
        with pytest.raises(ConfigError, match=rf"names data elsewhere \(found /etc/x, needed {web.endpoint}\)"):
            read(f"{web.endpoint}/{name}")


def test_arguments_of_a_script_become_the_fields_of_a_config() -> None:
    of = get_blend_and_blend_per_split
    assert of(SimpleNamespace(data_path=["1", "a"], data_args_path=None)) == ((["a"], [1.0]), None)
    assert of(SimpleNamespace(train_data_path=["a"], test_data_path=["b"])) == (
        None,
        [(["a"], None), None, (["b"], None)],
    )
    assert of(SimpleNamespace()) == (None, None)
    with pytest.raises(ConfigError, match="found data_path, train_data_path, need only one of them"):
        of(SimpleNamespace(data_path=["a"], train_data_path=["b"]))


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("[1]", r"expected object .found .1.*needs an object with train, valid and test"),
        ('{"train": "a"}', "missing required field valid"),
        ("{", "no JSON"),
        ('{"train": 3, "valid": null, "test": null}', r"train: expected str . array . null .found 3"),
        ('{"train": [3], "valid": null, "test": null}', "need strings"),
        ('{"train": "1 a x b", "valid": null, "test": null}', "args.json, train: data path: found 'x'"),
    ],
)
def test_files_that_say_something_else_are_named(text: str, needed: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(ConfigError, match=needed):
        read_per_split_data_args(str(tmp_path / "args.json"))
    with pytest.raises(ObjectNotFoundError):
        read_data_args(str(tmp_path / "none"))
