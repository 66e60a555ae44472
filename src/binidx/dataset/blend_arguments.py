"""Forms in which a blend is given: in Python, in a script's arguments, and in files of arguments.

    a b c                    three prefixes, in proportion to their sizes
    0.7 a 0.3 b              weights and prefixes in turn

Source: Megatron Core, `get_blend_from_list`; Megatron-LM, `get_blend_and_blend_per_split`. `parse_blend` is ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.format.bin_file import as_prefix
from binidx.format.virtual import check_named
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document, read_whole

Blend = tuple[Sequence[str], Sequence[float] | None]
"""Prefixes, and their weights or None (then each dataset is served whole, once)."""

FORMS = "needs (['s3://corpus/en', 's3://corpus/code'], [0.7, 0.3]) or {'s3://corpus/en': 0.7, 's3://corpus/code': 0.3}"
PREFIX = (str, os.PathLike)


def parse_blend(name: str, given: Any) -> Blend:
    """Return the prefixes and weights of a blend in any of these forms; a prefix may be a Path.

        (["a", "b"], [0.7, 0.3])     Megatron Core's: prefixes, and weights or None
        "a"                          one prefix
        ["a", "b"]                   prefixes without weights
        {"a": 0.7, "b": 0.3}         weights by prefix
        [("a", 0.7), ("b", 0.3)]     prefixes with their weights
        [0.7, "a", 0.3, "b"]         the arguments of --data-path

    Args:
        name: the option, for errors.
        given: the blend as the user wrote it.

    Raises:
        ConfigError: another form, no prefix, or a weight that is missing or not above 0.
    """
    blend = _read_blend([*given.items()] if isinstance(given, Mapping) else given)
    if blend is None:
        raise ConfigError(f"{name}: found {given!r}; {FORMS}")
    prefixes, weights = blend
    texts = [os.fspath(prefix) for prefix in prefixes]
    if not texts or any(not text or text.endswith("://") for text in texts):
        raise ConfigError(f"{name}: found no prefix in {given!r}; {FORMS}")
    if weights is not None and (len(weights) != len(prefixes) or not all(0 < weight < inf for weight in weights)):
        raise ConfigError(f"{name}: found weights {list(weights)}, needs {len(prefixes)} above 0, one per prefix")
    return [*map(as_prefix, texts)], None if weights is None else [*weights]


def _read_blend(given: Any) -> tuple[Sequence[Any], Sequence[float] | None] | None:
    """Return prefixes, some still Paths, and weights; None for an unknown form."""
    if isinstance(given, PREFIX):
        return [given], None
    if not is_sequence_of(given, object) or not len(given):
        return None
    if len(given) == 2 and (given[1] is None or is_sequence_of(given[1], Real)):
        prefixes = [given[0]] if isinstance(given[0], PREFIX) else given[0]
        return (prefixes, given[1]) if is_sequence_of(prefixes, PREFIX) else None
    if all(is_sequence_of(item, (*PREFIX, Real)) and len(item) == 2 for item in given):
        prefixes, weights = zip(*given, strict=True)
        return (prefixes, weights) if is_sequence_of(prefixes, PREFIX) and is_sequence_of(weights, Real) else None
    turns = len(given) % 2 == 0 and is_sequence_of(given[::2], Real) and is_sequence_of(given[1::2], PREFIX)
    if turns or is_sequence_of(given, PREFIX):
        return get_blend_from_list([os.fspath(item) if isinstance(item, PREFIX) else item for item in given])
    return None


def is_sequence_of(values: Any, kind: Any) -> bool:
    """Return whether `values` is a sequence of values of type `kind`, and not a text."""
    is_sequence = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
    return is_sequence and all(isinstance(value, kind) for value in values)


WHOLE_BLEND = ("data_path", "data_args_path")
PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
Arguments = list[str | int | float] | str | None


@dataclass(frozen=True)
class PerSplitArguments:
    """Contents of the file of `--per-split-data-args-path`: a list of arguments, a string of them, or null."""

    train: Arguments
    valid: Arguments
    test: Arguments


PER_SPLIT_FILE = JsonFile(PerSplitArguments, error=ConfigError, hint="needs an object with train, valid and test")


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Return the prefixes of a list of arguments, and their weights or None; None if there is no list.

    If every other argument, from the first on, is a number, these are the weights.

    Raises:
        ConfigError: there is no prefix, or weights for some prefixes only (Megatron takes the weights for prefixes).
    """
    if blend is None:
        return None
    if not blend:
        raise ConfigError("data path: found none, need prefixes, or weights and prefixes in turn")
    weights = [] if len(blend) % 2 else [_as_number(text) for text in blend[::2]]
    numbers = [weight for weight in weights if weight is not None]
    if not numbers:
        return [prefix.strip() for prefix in blend], None
    if len(numbers) < len(weights):
        bad = blend[2 * weights.index(None)]
        raise ConfigError(f"data path: found {bad!r} in the place of a weight; need one before each prefix, or none")
    return [prefix.strip() for prefix in blend[1::2]], numbers


def read_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> Blend | None:
    """Read the blend in the file of `--data-args-path`: arguments separated by white space.

    Args:
        uri: path or URI of the file.
        storage_options: options of its store.

    Raises:
        ConfigError: as for `get_blend_from_list`, or the file is not UTF-8.
        ObjectNotFoundError: there is no such file.
    """
    file = Location.of(uri, storage_options)
    data = read_whole(open_object(file, cache=False))
    try:
        blend = _parse_arguments(uri, str(bytes(data), "utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{uri}: not UTF-8 text: {error}") from error
    check_named(blend[0] if blend else (), file)
    return blend


def read_per_split_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> list[Blend | None]:
    """Read the blends of train, valid and test from the JSON file of `--per-split-data-args-path`.

    Args:
        uri: path or URI of the file.
        storage_options: options of its store.

    Raises:
        ConfigError: the file is no object with train, valid and test; or as for `get_blend_from_list`.
        ObjectNotFoundError: there is no such file.
    """
    file = Location.of(uri, storage_options)
    splits = PER_SPLIT_FILE.decode(read_document(PER_SPLIT_FILE, file), uri)
    blends = [_parse_arguments(f"{uri}, {name}", arguments) for name, arguments in vars(splits).items()]
    check_named([prefix for blend in blends if blend for prefix in blend[0]], file)
    return blends


def get_blend_and_blend_per_split(
    args: Any, storage_options: Mapping[str, Any] | None = None
) -> tuple[Blend | None, list[Blend | None] | None]:
    """Return `blend` and `blend_per_split` of a config from a script's arguments.

    Args:
        args: namespace with some of `data_path`, `data_args_path`; or of `train_data_path`, `valid_data_path`,
            `test_data_path`, `per_split_data_args_path`. Missing ones are None.
        storage_options: options of the stores of files of arguments.

    Raises:
        ConfigError: several of these options are given (Megatron takes the first); or as for the functions above.
    """
    given = {name: value for name in (*WHOLE_BLEND, *PER_SPLIT) if (value := getattr(args, name, None)) is not None}
    if len(given) > 1 and not set(given) <= set(PER_SPLIT[:3]):
        raise ConfigError(f"data path: found {', '.join(given)}, need only one of them")
    if "data_path" in given:
        return get_blend_from_list(given["data_path"]), None
    if "data_args_path" in given:
        return read_data_args(given["data_args_path"], storage_options), None
    if "per_split_data_args_path" in given:
        return None, read_per_split_data_args(given["per_split_data_args_path"], storage_options)
    return None, [get_blend_from_list(given.get(name)) for name in PER_SPLIT[:3]] if given else None


def _as_number(argument: Any) -> float | None:
    try:
        return float(argument)
    except ValueError:
        return None


def _parse_arguments(subject: str, arguments: Arguments) -> Blend | None:
    try:
        return get_blend_from_list(arguments.split() if isinstance(arguments, str) else arguments)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"{subject}: found {arguments!r}, need strings, and numbers for weights") from error
