"""Datasets of the runs of a model, joined by what they are: a copy of a dataset is that dataset.

    run 1   s3://corpus/en ─┐   lengths, bounds and dtype agree, and so do digests of the tokens,
    run 2   s3://copy/en   ─┴►  s3://corpus/en         or `same_data` of a run says that both are one

Digests of the tokens are those of the checksums beside two plain `.bin` (of large data those of 32,768 blocks), or else
of the job in two manifests. The sizes of zstd's frames prove no equality: other tokens may have the same.

Cost: nothing if all runs have the same prefixes; else the identity of each dataset, and the digests of those that are
alike. No token is read.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from binidx.errors import ConfigError, redacted
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.sidecars.dataset_manifest import MANIFEST, read_manifest
from binidx.order.order_protocols import Source

MOST_SOURCES_NAMED = 3
"""Most pairs of datasets that a note names."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinedSources:
    """Datasets of some runs, each under the name that the first run with its data gave it.

    Attributes:
        sources: name -> the dataset.
        names: prefix of a dataset of any run, as its file has it and as it is opened -> its name in `sources`.
        notes: a line about datasets that may be copies of others and are not joined with them; none if there are none.
    """

    sources: Mapping[str, Source]
    names: Mapping[str, str]
    notes: Sequence[str]

    def select(self, name: str | None) -> Mapping[str, Source]:
        """Return the datasets by their names: the one that has a prefix, or all; ConfigError if there is none."""
        if name is not None and name not in self.names:
            raise unknown_source(name, self.sources)
        return self.sources if name is None else {self.names[name]: self.sources[self.names[name]]}

    def names_of(self, sources: Sequence[Source]) -> list[str]:
        """Return the name of each dataset of one of the runs."""
        return [self.names[source.prefix] for source in sources]

    def check_data(self, sources: Sequence[Source]) -> None:
        """Raise ConfigError if a dataset of one of the runs is other data than the first run opened."""
        for name, source in zip(self.names_of(sources), sources, strict=True):
            if source is (first := self.sources[name]) or source.dataset.identity == first.dataset.identity:
                continue
            raise ConfigError(f"{name}: replaced between two runs (found other lengths); ask about each run alone")


def unknown_source(name: str, sources: Iterable[str]) -> ConfigError:
    """Return the error for a name that no source of a run has, with those that may be meant, or all."""
    near = [each for each in sources if each.endswith(f"/{name}")] or difflib.get_close_matches(name, [*sources])
    way = f"did you mean {' or '.join(near[:3])}?" if near else f"needs one of {', '.join(sources)}"
    return ConfigError(f"--source: found {name}, {way}")


def join_sources(datasets: Sequence[Sequence[Source]], same_data: Sequence[Mapping[str, str]] = ()) -> JoinedSources:
    """Return the datasets of some runs, and log those that may be copies of others.

    Args:
        datasets: those of each run, the earliest first.
        same_data: that of each run, if any run has it.

    Raises:
        ConfigError: one prefix, relative to different directories, names two datasets; or `same_data` of a run joins
            datasets that are not the same.
    """
    runs = [{source.prefix: source for source in sources} for sources in datasets]
    stored = {prefix: source for run in runs[::-1] for prefix, source in run.items()}
    stored = {prefix: stored[prefix] for run in runs for prefix in run}
    prefixes = [{text: each.prefix for each in run.values() for text in (each.name, each.prefix)} for run in runs]
    known = {text: prefix for own in prefixes[::-1] for text, prefix in own.items()}
    leaders, apart, alike = {prefix: prefix for prefix in stored}, [], defaultdict[str, list[str]](list)

    def join(one: str, other: str) -> None:
        leaders.update({prefix: leaders[one] for prefix, leader in leaders.items() if leader == leaders[other]})

    pairs = [(own[one], known[other]) for own, names in zip(prefixes, same_data, strict=False)
             for one, other in names.items() if one in own and other in known]  # fmt: skip
    for copy, one in pairs:
        check_alias(stored[copy], stored[one])
        join(one, copy)
    if any(run.keys() != runs[0].keys() for run in runs):
        for prefix, source in stored.items():
            alike[json.dumps(source.dataset.identity)].append(prefix)
    for one, other in (pair for group in alike.values() for pair in combinations(group, 2)):
        same = leaders[one] == leaders[other] or has_same_tokens(stored[one], stored[other])
        if same:
            join(one, other)
        elif same is None and not any({one, other} <= run.keys() for run in runs):
            apart.append((one, other))
    names, sources = dict[str, str](), dict[str, Source]()
    for prefix, source in (pair for run in runs for pair in run.items()):
        leader = stored[leaders[prefix]]
        texts = {names.setdefault(text, leader.name) for text in (source.name, prefix)}
        if (first := sources.setdefault(leader.name, leader)) is not leader or texts != {leader.name}:
            found = f"found {first.prefix} and {prefix}"
            raise ConfigError(f"{source.name}: names two datasets ({found}); save the runs with absolute paths")
    notes = note_apart([(stored[other], stored[one]) for one, other in apart if leaders[one] != leaders[other]])
    for note in notes:
        logger.warning(note)
    return JoinedSources(sources, names, notes)


def note_apart(pairs: Sequence[tuple[Source, Source]]) -> list[str]:
    """Return a line about pairs of datasets that may be the same; none without such pairs."""
    named = [f"{redacted(one.name)} and {redacted(other.name)}" for one, other in pairs[:MOST_SOURCES_NAMED]]
    named += [f"{len(pairs) - MOST_SOURCES_NAMED:,} more pairs"] * (len(pairs) > MOST_SOURCES_NAMED)
    same_data = json.dumps({redacted(one.prefix): redacted(other.prefix) for one, other in pairs})
    return [
        f"{'; '.join(named)}: same lengths, tokens not compared, counted apart; binidx convert --checksums of both or "
        f'"same_data": {same_data} in the run file joins them'
    ] * bool(pairs)


def check_alias(one: Source, other: Source) -> None:
    """Raise ConfigError if two datasets that `same_data` joins are not the same."""
    identities = [one.dataset.identity, other.dataset.identity]
    if identities[0] != identities[1] or has_same_tokens(one, other) is False:
        what = "tokens" if identities[0] == identities[1] else "lengths or dtype"
        sizes = " and ".join(f"{each['num_sequences']:,} sequences of {each['dtype']}" for each in identities)
        names = f"{redacted(one.name)} and {redacted(other.name)}"
        raise ConfigError(f"same_data: {names} have other {what} (found {sizes}); take the entry out")


def has_same_tokens(one: Source, other: Source) -> bool | None:
    """Return whether two datasets of equal lengths have the same tokens; None if nothing beside them shows it.

    Raises:
        FormatError, StorageError: what lies beside them is malformed, or cannot be read.
    """
    pairs = [source.dataset for source in (one, other) if isinstance(source.dataset, IndexedDataset)]
    if len(pairs) < 2:
        return None
    first, second = (pair.token_digests for pair in pairs)
    if "raw" in first and "raw" in second:
        return first["raw"] == second["raw"]
    if "manifest" not in first or first["manifest"] != second.get("manifest"):
        return None
    # A job writes a dataset for each of its keys.
    files = [read_manifest(pair.location + MANIFEST) or {} for pair in pairs]
    return True if files[0].get("dataset") == files[1].get("dataset") else None
