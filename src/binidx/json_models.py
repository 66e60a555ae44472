"""JSON files as dataclasses: a malformed file is one error with the file, the path of the field and its value.

    PACKED = JsonFile(PackedDescription, error=ConfigError)
    PACKED.decode(b'{"sets": [{"name": 5}], ...}', "packed.json")
    ConfigError: packed.json: $.sets[0].name: expected str (found 5)

The standard library parses, and msgspec checks the values against the model: `json.dumps` may write strings that
msgspec's parser refuses, such as file names that are not UTF-8. A float field keeps an int only if its type is
`int | float`.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import msgspec

from binidx.errors import BinidxError, FormatError, clipped
from binidx.forks import ProcessLock

MAX_BYTES = 1 << 30
"""Bytes of the largest file: 40 times a large tokenizer.json, or the manifest of 2.5 million inputs."""

MOST_QUOTED = 80
"""Characters of a name or value that an error quotes."""

MAX_DEPTH = 64
"""Most levels of nested arrays and objects: values of this depth are compared and written within Python's stack."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Field of a file with a number of things or bytes."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
"""Token id of a vocabulary; bounded, as tokenizer libraries allocate 16 bytes for each id up to the largest."""
Model = TypeVar("Model")

ALIKE = 0.8
"""Ratio of `difflib` from which on an unknown field counts as a misspelt one."""

logger = logging.getLogger(__name__)


def tolerate_all(path: str, similar: str) -> bool:
    """Return True: a newer version may have added any field, as it changes a tag where a field changes the meaning."""
    return True


@dataclass(frozen=True)
class JsonFile(Generic[Model]):
    """A kind of JSON file.

    Args:
        model: dataclass of its fields, or any type that `msgspec.convert` takes.
        tags: fields of the file, not of the model, with their required values: format and version. Compared first,
            and written first.
        error: raised for a file that is not of this kind.
        hint: remedy, appended to the error message.
        open: whether it is a file of others, whose unknown fields are ignored in silence.
        tolerates: returns whether an unknown field is ignored with a warning, once in a process; else, and if it is
            None, that is an error. Its arguments: the path of the object, `$` for the file, and the known field of a
            similar name, or "".
    """

    model: type[Model]
    tags: Mapping[str, Any] = field(default_factory=dict)
    error: type[BinidxError] = FormatError
    hint: str = ""
    open: bool = False
    tolerates: Callable[[str, str], bool] | None = None

    def encode(self, content: Any, end: str = "", **layout: Any) -> bytes:
        """Return the bytes of a file.

        Args:
            content: instance of the model, or its JSON value; fields that the model lacks are written, too.
            end: end of the file, after the JSON value.
            layout: arguments of `json.dumps`.
        """
        values = content if isinstance(content, Mapping) else asdict(content)
        return (json.dumps({**self.tags, **values}, **layout) + end).encode()

    def decode(self, data: bytes | memoryview, subject: str) -> Model:
        """Parse a file's bytes, and return them as an instance of the model.

        Args:
            subject: URI of the file or another beginning of the error message; may be empty.

        Raises:
            BinidxError: of the class `self.error`, for any malformed bytes.
        """
        return self.convert(self.parse(data, subject), subject)

    def parse(self, data: bytes | memoryview, subject: str) -> Any:
        """Return the JSON value of a file's bytes; raise `self.error` if it is malformed, or too large or deep."""
        self.check_size(len(data), subject)
        try:
            # Files of others have such numbers in fields that we ignore: model_max_length is 10^30.
            limits: dict[str, Any] = {} if self.open else {"parse_int": _parse_int, "parse_float": _parse_float}
            found = json.loads(bytes(data), parse_constant=_refuse_constant, **limits)
            level, depth = [found], 0
            while level:
                if (depth := depth + 1) > MAX_DEPTH:
                    raise RecursionError
                inside = [each.values() if type(each) is dict else each for each in level if type(each) in (dict, list)]
                level = [each for values in inside for each in values if type(each) in (dict, list)]
        except RecursionError:
            self._fail(subject, f"nested too deep (more than {MAX_DEPTH} levels)")
        except ValueError as error:
            self._fail(subject, f"no JSON: {error}")
        return found

    def convert(self, value: Any, subject: str) -> Model:
        """Return a parsed JSON value as an instance of the model; raise `self.error` if it does not fit the model."""
        if self.tags:
            if not isinstance(value, dict):
                self._fail(subject, f"$: expected object (found {_short(value)})")
            for name, needed in self.tags.items():
                if (found := value.get(name)) != needed or type(found) is not type(needed):
                    self._fail(subject, f"$.{name}: expected {_short(needed)} (found {_short(found)})")
            value = {name: each for name, each in value.items() if name not in self.tags}
        try:
            with contextlib.nullcontext() if self.model in _described else _describing():
                made = msgspec.convert(value, self.model, str_keys=True)
                _described.add(self.model)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: half of a surrogate pair
            self._fail(subject, _reworded(str(error), value))
        for path, name, known in () if self.open else _unknown_fields(value, made, "$"):
            similar = next(iter(difflib.get_close_matches(name[:MOST_QUOTED], known, 1, ALIKE)), "")
            hint = f"; did you mean {similar}?" if similar else ""
            problem = f"{path}: unknown field {clipped(name, MOST_QUOTED)}"
            if self.tolerates is None or not self.tolerates(path, similar):
                self._fail(subject, f"{problem}; it has {', '.join(known)}{hint}")
            if (note := (str(self.model), path, name)) not in _warned:
                _warned.add(note)
                problem += " is ignored" + (hint or "; a newer version of binidx may have written it")
                logger.warning("%s", ": ".join(filter(None, (subject, problem))))
        return made

    def check_size(self, num_bytes: int, subject: str) -> None:
        """Raise `self.error` for a file of more than MAX_BYTES, 1 GiB."""
        if num_bytes > MAX_BYTES:
            self._fail(subject, f"too large (found {num_bytes:,} bytes, need at most {MAX_BYTES:,})")

    def _fail(self, subject: str, problem: str) -> NoReturn:
        raise self.error(": ".join(filter(None, (subject, problem))) + (f"; {self.hint}" if self.hint else ""))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _parse_int(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 64:
        raise ValueError(f"{text[:24]} does not fit 64 bits")
    return value


def _parse_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:24]} does not fit 64 bits")
    return value


def _reworded(text: str, value: Any) -> str:
    """Return msgspec's message as path, problem and found value: `$.a[0]: expected int (found 'x')`.

    The value is missing if the path leads through a mapping, whose key msgspec omits.
    """
    problem, _, path = text.replace("`", "").partition(" - at ")
    if problem.startswith("Expected"):
        problem, _, found = problem.replace("Expected", "expected").partition(", got ")
        if re.fullmatch(r"(\$(\.\w+|\[\d+\])*)?", path):
            for name, place in re.findall(r"\.(\w+)|\[(\d+)\]", path):
                value = value[name] if name else value[int(place)]
            found = _short(value)
        problem += f" (found {found})" if found else ""
    return f"{path or '$'}: {problem.removeprefix('Object ')}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_QUOTED else f"{type(value).__name__} {text[:60]}..."


_describing, _described = ProcessLock(), set[Any]()
"""Lock for the first use of a model, and the models that have been used. msgspec 0.22 keeps its description of a
dataclass before that is complete, and a thread that finds it so ends the process. Source: msgspec, _core.c."""

_warned: set[tuple[str, str, str]] = set()
"""Models, paths and names of unknown fields that this process has logged."""


def _unknown_fields(value: Any, made: Any, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield, for each field in `value` that its class lacks, the path of its object, its name, and the known fields.

    Args:
        made: `value`, decoded.
        path: of `value`.
    """
    inside: Iterable[tuple[Any, Any, Any]] = ()
    if made is value:  # of type Any
        return
    if isinstance(made, (list, tuple)):
        inside = zip(range(len(value)), value, made, strict=False)
    elif isinstance(made, dict):
        inside = zip(value, value.values(), made.values(), strict=False)
    elif is_dataclass(made):
        kind: Any = type(made)
        known = [each.name for each in fields(kind) if each.init]
        yield from ((path, name, known) for name in sorted(value.keys() - known))
        inside = [(name, value[name], getattr(made, name)) for name in known if name in value]
    for name, given, each in inside:
        if type(given) in (dict, list):
            step = f"[{name}]" if isinstance(name, int) else f".{clipped(name, MOST_QUOTED)}"
            yield from _unknown_fields(given, each, path + step)
