"""Registries: names of stores, codecs or orders, and what they stand for; packages from elsewhere add names.

    built in      rows of binidx, imported at the first use; no other package can replace them
    registered    by a call in this process; worker processes get the same (`Registrations`)
    installed     entry points of installed packages, looked up, once in a process, for a name that is neither

A start with built-in names therefore imports nothing for the others. A name is only ever compared with names that a
package or a program has registered: no text in a file makes binidx import a module that the text names.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from binidx.errors import ConfigError
from binidx.forks import cached_property

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)
Value = TypeVar("Value")

_registries: list[Registry[Any]] = []


class Registry(dict[str, Value]):
    """Dictionary of names and the values that they stand for, which imports a value when it is first asked for.

    Args:
        home: "module:NAME" of this registry, as which it pickles.
        kind: what a name stands for, for messages.
        group: group of the entry points by which installed packages publish values.
        pattern: regular expression of valid names.
        builtin: name -> "module:attribute".

    Attributes:
        known: all names but those of installed packages that were not looked up yet: first the built-in ones.
        registered: names that this process registered.
    """

    def __init__(self, home: str, kind: str, group: str, pattern: str, builtin: Mapping[str, str]) -> None:
        self.home, self.kind, self.group, self.pattern, self.builtin = home, kind, group, pattern, builtin
        self.known, self.registered = [*builtin], set[str]()
        _registries.append(self)

    def register(self, name: str, value: Value) -> None:
        """Let a name stand for a value in this process, and in worker processes that it starts.

        Args:
            name: matches `pattern`.
            value: can be pickled, for worker processes.

        Raises:
            ConfigError: the name is built in, not valid, or stands for another value.
        """
        if name in self.builtin:
            raise ConfigError(f"{self.kind} {name!r}: built in, cannot be replaced; choose another name")
        if not re.fullmatch(self.pattern, name):
            raise ConfigError(f"{self.kind}: not a name (found {name!r}, need {self.pattern}); choose another name")
        other = self.get(name, value)
        if other != value and _describe(other) != _describe(value):
            both = f"{_describe(other)} and {_describe(value)}"
            raise ConfigError(f"{self.kind} {name!r}: registered twice (found {both}, need one); remove one of them")
        self[name] = value
        self.registered.add(name)
        self._add_known(name)

    def __missing__(self, name: str) -> Value:
        """Import and return the value of a name.

        Raises:
            KeyError: an unknown name.
            ConfigError: two installed packages publish the name, or its module cannot be imported.
        """
        if (target := self.builtin.get(name) or self._published(name)) is None:
            raise KeyError(name)
        return self.setdefault(name, import_attribute(target))

    def names(self) -> list[str]:
        """Return all names, those of installed packages included: first the built-in ones."""
        self._add_known(*self.installed)
        return self.known

    def _add_known(self, *names: str) -> None:
        self.known = [*self.builtin, *sorted({*self.known, *names}.difference(self.builtin))]

    @cached_property
    def installed(self) -> Mapping[str, list[EntryPoint]]:
        """Entry points of installed packages by name; looking them up reads the metadata of every package."""
        from importlib.metadata import entry_points  # slow to import

        points = defaultdict(list)
        for point in entry_points(group=self.group):
            if point.name in self.builtin:
                logger.warning("%s: %s is built in, and not replaced", _package(point), f"{self.kind} {point.name!r}")
            else:
                points[point.name].append(point)
        return points

    def _published(self, name: str) -> str | None:
        """Return the "module:attribute" that an installed package publishes under a name."""
        points = self.installed.get(name, [])
        if len({point.value for point in points}) > 1:
            packages = " and ".join(sorted(map(_package, points)))
            raise ConfigError(f"{self.kind} {name!r}: published twice (found {packages}, need one); uninstall one")
        return points[0].value if points else None

    def __reduce__(self) -> tuple[Any, ...]:
        return import_attribute, (self.home,)


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name if point.dist else '?'} ({point.value})"


def _describe(value: object) -> str:
    """Return the module and the name of a class or function, else the `repr`: equal for one that was defined again."""
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{value.__module__}:{name}"


def import_attribute(target: str) -> Any:
    """Import and return "module:attribute".

    Raises:
        ConfigError: there is no such module or attribute.
    """
    module, _, name = target.partition(":")
    try:
        return functools.reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{target}: cannot be imported ({error}); repair or uninstall its package") from error


class Registrations:
    """All that this process has registered, as a value to pickle: unpickling it registers the same there.

    Readers and datasets have one in their pickles, tasks of jobs one among their arguments, so that a spawned process
    knows the names that the URIs in them have.
    """

    def __bool__(self) -> bool:
        return any(registry.registered for registry in _registries)

    def __reduce__(self) -> tuple[Any, ...]:
        rows = [(registry, name, registry[name]) for registry in _registries for name in registry.registered]
        return _register_all, (rows,)


def _register_all(rows: list[tuple[Registry[Any], str, Any]]) -> Registrations:
    for registry, name, value in rows:
        registry.register(name, value)
    return Registrations()
