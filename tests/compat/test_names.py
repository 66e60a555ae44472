"""Every name in Megatron Core's datasets is in ours, with its arguments; or it is listed here, with the reason."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.oracle import megatron

from binidx.compat.megatron import serve

CORE = Path(megatron.gpt.__file__).parent

MODULES_LEFT = {
    "data_schedule": "packs sequences on the GPUs of a run; Megatron's own goes on working, over our samplers",
    "helpers": "calls helpers_cpp, which is ours",
    "megatron_tokenizer": "Megatron's tokenizers stay its own",
    "object_storage_utils": "of Megatron's readers of stores, which nothing here calls",
    "utils_s3": "the same",
}
MEGATRONS_OWN = "imports from Megatron's file, which is right over our classes"
LEFT = {
    "blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder._build_megatron_datasets_parallel": "ours opens "
    "remote prefixes together, and has no rank that goes first",
    "blended_megatron_dataset_builder._get_size_per_split_per_dataset": MEGATRONS_OWN,
    "blended_megatron_dataset_builder.MidLevelDataset": MEGATRONS_OWN,
    "blended_megatron_dataset_builder.TopLevelDataset": MEGATRONS_OWN,
    "blended_megatron_dataset_builder.DistributedDataset": MEGATRONS_OWN,
    "blended_dataset._VERBOSE": MEGATRONS_OWN,
    "gpt_dataset._build_document_index": MEGATRONS_OWN,
    "gpt_dataset._build_shuffle_index": MEGATRONS_OWN,
    "gpt_dataset._get_ltor_masks_and_position_ids": MEGATRONS_OWN,
    "indexed_dataset.IndexedDataset.initialize": "ours opens in __init__, and pickles itself",
    "indexed_dataset._INDEX_HEADER": MEGATRONS_OWN,
    "indexed_dataset._IndexWriter": MEGATRONS_OWN,
    "indexed_dataset._BinReader": "of files; ours reads ranges of bytes of any store",
    "indexed_dataset._FileBinReader": "the same",
    "indexed_dataset._MMapBinReader": "the same",
    "indexed_dataset._MultiStorageClientBinReader": "the same",
    "indexed_dataset._S3BinReader": "the same",
    "indexed_dataset.OBJECT_STORAGE_BIN_READERS": "the same",
    "megatron_dataset.LowLevelDataset": MEGATRONS_OWN,
    "megatron_dataset._PAD_TOKEN_ID": MEGATRONS_OWN,
    "t5_dataset.T5MaskedWordPieceDataset._build_b1ss_attention_mask": "a step of config_attention_mask, which is there",
}


def modules() -> Iterator[str]:
    return (each.name for each in pkgutil.iter_modules([str(CORE)]))


def names_in(module: str) -> list[str]:
    """What a module defines itself, without its logger."""
    if not (CORE / f"{module}.py").exists():  # compiled
        return [name for name in vars(importlib.import_module(f"megatron.core.datasets.{module}")) if name[0] != "_"]
    found: list[str] = []
    for node in ast.parse((CORE / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name) and target.id != "logger"]
    return found


def both(module: str) -> tuple[ModuleType, ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"binidx.compat.megatron.{module}"), importlib.import_module(
            f"megatron.core.datasets.{module}"
        )


def classes() -> Iterator[tuple[str, type, type]]:
    for module in serve.CORE:
        ours, theirs = both(module)
        for name in names_in(module):
            if f"{module}.{name}" in LEFT:
                continue
            if isinstance(getattr(theirs, name, None), type) and getattr(theirs, name).__module__ == theirs.__name__:
                yield f"{module}.{name}", getattr(ours, name), getattr(theirs, name)


CLASSES = list(classes())


def test_every_module_is_served_or_left_to_megatron() -> None:
    assert {*modules()} == {*serve.CORE, *MODULES_LEFT}


@pytest.mark.parametrize("module", serve.CORE)
def test_every_name_of_a_module_is_there(module: str) -> None:
    ours, _ = both(module)
    missing = [name for name in names_in(module) if not hasattr(ours, name) and f"{module}.{name}" not in LEFT]
    assert missing == []


def test_what_is_listed_as_left_out_is_left_out() -> None:
    for listed in LEFT:
        module, *path = listed.split(".")
        found: Any = both(module)[0]
        for name in path[:-1]:
            found = getattr(found, name)
        assert not hasattr(found, path[-1])


@pytest.mark.parametrize(("name", "ours", "theirs"), CLASSES, ids=[name for name, *_ in CLASSES])
def test_every_member_of_a_class_is_there(name: str, ours: type, theirs: type) -> None:
    members = [each for each in vars(theirs) if not each.startswith("__") and not each.startswith("_abc")]
    members += getattr(theirs, "__dataclass_fields__", {})
    assert [each for each in members if not _has(ours, each) and f"{name}.{each}" not in LEFT] == []


def _has(kind: type, name: str) -> bool:
    return hasattr(kind, name) or name in getattr(kind, "__dataclass_fields__", {})


def functions() -> Iterator[tuple[str, Any, Any]]:
    for module in serve.CORE:
        ours, theirs = both(module)
        for name in names_in(module):
            if inspect.isfunction(getattr(theirs, name, None)) and hasattr(ours, name):
                yield f"{module}.{name}", getattr(ours, name), getattr(theirs, name)
    for name, ours, theirs in CLASSES:
        if issubclass(theirs, enum.Enum):
            continue
        yield name, ours, theirs
        for member in sorted(set(vars(theirs)) - set(getattr(theirs, "__dataclass_fields__", {}))):
            if inspect.isfunction(getattr(theirs, member)) and member != "__init__" and hasattr(ours, member):
                yield f"{name}.{member}", getattr(ours, member), getattr(theirs, member)


@pytest.mark.parametrize(("name", "ours", "theirs"), [*functions()], ids=[name for name, *_ in functions()])
def test_arguments_are_megatrons(name: str, ours: Any, theirs: Any) -> None:
    taken, asked = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    if any(each.kind is each.VAR_POSITIONAL for each in taken.values()):
        return
    order = [each for each in taken if each in asked]
    assert order == [*asked]
    for each, parameter in asked.items():
        if not isinstance(parameter.default, type | type(inspect.isfunction)):
            assert taken[each].default == parameter.default, each
    for each in set(taken) - set(asked):
        assert taken[each].default is not inspect.Parameter.empty
