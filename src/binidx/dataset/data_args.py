"""Blends as they are given to scripts: lists of arguments, and files of them at any URI.

    a b c                    three prefixes, in proportion to their sizes
    0.7 a 0.3 b              weights and prefixes in turn: where every other argument, from the first on, is a number

Source: Megatron Core, `get_blend_from_list`, and Megatron-LM, `get_blend_and_blend_per_split`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.dataset.config import Blend
from binidx.dataset.split import Split
from binidx.errors import ConfigError
from binidx.storage.backends import open_object
from binidx.storage.transfer import read_whole

WHOLE = ("data_path", "data_args_path")
PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """The prefixes of a list of arguments, and their weights or None.

    A list of two that are both numbers is a weight and a prefix.

    Raises:
        ConfigError: weights for some prefixes only, where Megatron takes the weights for prefixes; or no prefix.
    """
    if blend is None:
        return None
    if not blend:
        raise ConfigError("data path: found none, needs prefixes, or weights and prefixes in turn")
    if len(blend) % 2:
        return _prefixes(blend), None
    weights = [_number(each) for each in blend[::2]]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return _prefixes(blend), None
    if len(given) < len(weights):
        bad = blend[2 * weights.index(None)]
        raise ConfigError(f"data path: found {bad!r} in the place of a weight; needs one before each prefix, or none")
    return _prefixes(blend[1::2]), given


def read_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> Blend | None:
    """The blend in a text of arguments apart by white space: what `--data-args-path` names.

    Raises:
        ConfigError: as `get_blend_from_list`.
        ObjectNotFoundError: there is no such file.
    """
    return _named(uri, _text(uri, storage_options).split())


def read_per_split_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> list[Blend | None]:
    """The blends of train, valid and test in a JSON object: what `--per-split-data-args-path` names.

    Each value is a list of arguments, a string of them, or null for a split without data.

    Raises:
        ConfigError: no object with these three keys, and as `get_blend_from_list`.
        ObjectNotFoundError: there is no such file.
    """
    try:
        found = json.loads(_text(uri, storage_options))
    except ValueError as error:
        raise ConfigError(f"{uri}: no JSON: {error}") from error
    names = [split.name for split in Split]
    if not isinstance(found, dict) or set(found) != set(names):
        raise ConfigError(f"{uri}: found {_said(found)}, needs an object with {', '.join(names)}")
    return [_named(f"{uri}, {name}", _arguments(uri, name, found[name])) for name in names]


def get_blend_and_blend_per_split(
    args: Any, storage_options: Mapping[str, Any] | None = None
) -> tuple[Blend | None, list[Blend | None] | None]:
    """`blend` and `blend_per_split` of a config, out of a script's arguments.

    Args:
        args: has some of `data_path`, `data_args_path`; or of `train_data_path`, `valid_data_path`, `test_data_path`,
            `per_split_data_args_path`. What it does not have is None.

    Raises:
        ConfigError: arguments of two of these ways (Megatron takes the first), and as the functions above.
    """
    given = [name for name in (*WHOLE, *PER_SPLIT) if getattr(args, name, None) is not None]
    several = len(given) > 1 and not set(given) <= set(PER_SPLIT[:3])
    if several:
        raise ConfigError(f"data path: found {', '.join(given)}, needs one way of saying it")
    if not given:
        return None, None
    way, value = given[0], getattr(args, given[0])
    if way == "data_path":
        return get_blend_from_list(value), None
    if way == "data_args_path":
        return read_data_args(value, storage_options), None
    if way == "per_split_data_args_path":
        return None, read_per_split_data_args(value, storage_options)
    return None, [get_blend_from_list(getattr(args, name, None)) for name in PER_SPLIT[:3]]


def _prefixes(arguments: Sequence[str]) -> list[str]:
    return [prefix.strip() for prefix in arguments]


def _number(argument: Any) -> float | None:
    try:
        return float(argument)
    except ValueError:
        return None


def _arguments(uri: str, name: str, value: Any) -> list[Any] | None:
    arguments = value.split() if isinstance(value, str) else value
    if arguments is not None and not isinstance(arguments, list):
        raise ConfigError(f"{uri}: found {name}: {value!r}, needs a list, a string or null")
    return arguments


def _named(subject: str, arguments: Sequence[Any] | None) -> Blend | None:
    try:
        return get_blend_from_list(arguments)
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{subject}: found {arguments!r}, needs strings, and numbers for weights") from error


def _said(found: Any) -> str:
    return f"an object with {', '.join(found) or 'nothing'}" if isinstance(found, dict) else type(found).__name__


def _text(uri: str, storage_options: Mapping[str, Any] | None) -> str:
    data = read_whole(open_object(uri, storage_options=storage_options, cache=False))
    try:
        return str(bytes(data), "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{uri}: no text in UTF-8: {error}") from error
