"""Names of commands and options in the previous release; they work for one more release, and stderr has the new one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

RENAMED: dict[str, tuple[str, ...]] = {
    "bake": ("prepare", "bake"),
    "check-node": ("doctor", "--nodes", "1"),
    "exposures": ("where", "--count"),
    "pack": ("export", "litpkds"),
    "pack --back": ("import", "litpkds"),
    "plot": ("account", "--figure", "KIND"),
    "prepare-cache": ("prepare", "index"),
    "read-plan": ("prepare", "read-plan"),
    "run": ("plan",),
    "summary": ("account", "--card"),
}
"""Old name -> the words in its place."""

OLD_STEPS = {"--before-step": ":", "--step": ""}
"""Old option of the commands that ask a run -> what stands before its value in --steps."""


def renamed(name: str, *arguments: str) -> list[tuple[str, ...]]:
    """Return the call with the names of this release, or the two calls in the place of `prepare-cache --read-plan`."""
    if name == "prepare-cache" and "--read-plan" in arguments:
        indices = [word for word in arguments if word != "--read-plan"]
        plans = ["--workers" if word == "--threads" else word for word in indices]
        plans = [word for word in plans if word not in ("--for-megatron", "--no-pin")]
        _note(f"{name} --read-plan", "prepare index, then binidx prepare read-plan")
        return [("prepare", "index", *indices), ("prepare", "read-plan", *plans)]
    if name == "pack":
        name = "pack --back" if "--back" in arguments else name
        arguments = tuple(re.sub("^--sep(?==|$)", "--eod", each) for each in arguments if each != "--back")
    if name in RENAMED:
        _note(name, " ".join(RENAMED[name]))
        old, (name, *words) = name, RENAMED[name]
        if old == "plot":
            words = [word for word in arguments if word in ("blend", "epochs", "lengths", "repeats")][:1]
            arguments = tuple(word for word in arguments if word not in words)
            words = ["--figure", *words] if words else []
        arguments = (*words, *arguments)
    if name in ("account", "grep", "spikes", "trace", "where"):
        rest = iter(arguments)
        arguments = tuple(_new_steps(name, word, rest) for word in rest)
    return [(name, *arguments)]


def _new_steps(name: str, word: str, following: Iterator[str]) -> str:
    """Return an argument, and of an old option of steps the new one with its value, which may be the next argument."""
    old, has_value, value = word.partition("=")
    if old not in OLD_STEPS:
        return word
    _note(f"{name} {old} N", f"{name} --steps {OLD_STEPS[old]}N")
    value = value if has_value else next(following, "")
    return f"--steps={OLD_STEPS[old]}{value}" if value else "--steps"


def _note(old: str, new: str) -> None:
    print(f"binidx {old} is binidx {new} now", file=sys.stderr)
