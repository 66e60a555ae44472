"""Data card of a run: what its sources hold, and how much of each was read; and a public summary to complete.

Figures come from the index, from the account of the run, and from lineage and manifests where a source has them. What
data cannot give (licences, languages, dates) comes from a file of the user, or is left open, visibly.

The public summary has the sections of the Commission's template of 24 July 2025, C(2025) 5235 final, for Article
53(1)(d) of Regulation (EU) 2024/1689. It is a draft for its author: binidx does not know whether data was licensed,
scraped or synthetic. The template ranks domain names by the size of their content; here hosts are ranked by documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from binidx.errors import ConfigError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.format.source import DatasetFiles, open_source
from binidx.run.history import RunHistory
from binidx.run.provenance.accounts import account
from binidx.storage.location import Location

OPEN = "**[to be completed]**"
"""Text in the place of an unknown value."""

GIVEN = ("license", "languages", "kind", "cut_off")
"""Fields of each source that its user may give."""

SOURCE_KINDS = ("public", "licensed", "private", "scraped", "user", "synthetic", "other")
"""Kinds of sources, each with a section in the template of the public summary."""

DETAILS = {
    "scraped": (
        *("Crawler name(s)/identifier(s)", "Purposes of the crawler(s)", "General description of crawler behaviour"),
        *("Period of data collection", "Description of the type of content and online sources crawled"),
    ),
    "user": ("General description of the services or products that collected it",),
    "synthetic": ("General-purpose AI model(s) that generated it", "Other AI models"),
}
"""Further lines for the author of the summary, about sources of a kind."""

TOP_SHARE = 10
"""One in so many domains is listed in the public summary, as the template asks (of small providers: one in 20)."""


def build_card(
    history: RunHistory,
    stop_step: int,
    about: Mapping[str, Mapping[str, str]] | None = None,
    *,
    repeats: bool = False,
    most_domains: int = 20,
) -> dict[str, Any]:
    """Return the data card of a model's runs in JSON values.

    Args:
        history: the runs.
        stop_step: first step that does not count.
        about: prefix of a source -> its license, languages, kind (one of SOURCE_KINDS) and cut_off, as far as known.
        repeats: also count how often documents were started, as `account` does.
        most_domains: number of domains of each source.

    Raises:
        ConfigError: `about` names no source of the run, or an unknown field or kind.

    Source: ours.
    """
    about, config = about or {}, history.last.config
    for name, given in about.items():
        unknown = [
            *({name} - {*history.joined.names}),
            *(given.keys() - {*GIVEN}),
            *({given.get("kind", "other")} - {*SOURCE_KINDS}),
        ]
        if unknown:
            needs = f"a source of the run, one of {', '.join(GIVEN)}, a kind of {', '.join(SOURCE_KINDS)}"
            raise ConfigError(f"about: found {unknown[0]!r}, needs {needs}")
    about = {history.joined.names[name]: given for name, given in about.items()}
    accounts = account(history, stop_step, repeats=repeats, by_name=True)
    sources = []
    for used in accounts:
        dataset = open_source(Location(history.sources[used.source].prefix, config.storage_options))
        job = (dataset.manifest or {}).get("job", {})
        recorded: dict[str, Any] = {
            "tokenizer": job.get("tokenizer", {}).get("uri"),
            "inputs": len(job.get("inputs", [])) or None,
        }
        own = {name: about.get(used.source, {}).get(name) for name in GIVEN}
        sources.append({**asdict(used), "seen": list(used.seen), **recorded, **own, **_domains(dataset, most_domains)})
    totals = {name: sum(each[name] for each in sources) for name in ("documents", "tokens", "tokens_read")}
    shape = {"sequence_length": config.sequence_length, "random_seed": config.random_seed, "runs": len(history.runs)}
    notes = {"fingerprint": history.fingerprint, "notes": [*history.joined.notes, *accounts.notes]}
    return {"steps": stop_step, **totals, **shape, **notes, "sources": sources}


def _domains(dataset: DatasetFiles, most: int) -> dict[str, Any]:
    """Return the domains of the ids that are URLs in the lineage, with their numbers of documents, largest first."""
    if not dataset.has(LINEAGE):
        return {"num_domains": None, "domains": []}
    import pyarrow.compute as compute

    counts = Counter[str]()
    for table in dataset.lineage():
        hosts = compute.struct_field(compute.extract_regex(table["id"], r"^https?://(?:www\.)?(?P<host>[^/:?#]+)"), 0)
        for pair in compute.value_counts(hosts.drop_null()).to_pylist():
            counts[pair["values"]] += pair["counts"]
    return {"num_domains": len(counts) or None, "domains": [[*pair] for pair in counts.most_common(most)]}


def format_card(card: Mapping[str, Any]) -> str:
    """Return a data card as Markdown."""
    lines = ["# Data card", ""]
    lines += [f"{card['tokens_read']:,} tokens read in {card['steps']:,} steps, of {card['tokens']:,} tokens in"]
    lines += [f"{card['documents']:,} documents. Order: `{card['fingerprint']}`.", ""]
    lines += [f"- {note}" for note in card["notes"]] + [""] * bool(card["notes"])
    head = ("source", "documents", "tokens", "tokens read", "epochs", *GIVEN)
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for each in card["sources"]:
        figures = [f"{each[name]:,}" for name in ("documents", "tokens", "tokens_read")]
        cells = [f"`{each['source']}`", *figures, f"{each['epochs_read']:.3f}", *(each[name] or OPEN for name in GIVEN)]
        lines.append(f"| {' | '.join(cells)} |")
    for each in card["sources"]:
        lines += ["", f"## `{each['source']}`", "", f"- tokenizer: {each['tokenizer'] or OPEN}"]
        lines.append(f"- input files: {each['inputs'] or OPEN}")
        if each["seen"]:
            seen = ", ".join(f"{times} times: {count:,}" for times, count in enumerate(each["seen"]) if count)
            lines.append(f"- documents by how often their first token was read: {seen}")
        named = ", ".join(f"{name} ({count:,})" for name, count in each["domains"])
        of = f" of {each['num_domains']:,}" if each["num_domains"] else ""
        lines.append(f"- top domains{of}, with documents: {named or OPEN}")
    return "\n".join(lines)


def format_public_summary(card: Mapping[str, Any]) -> str:
    """Return the public summary of training content, with what the card knows filled in, as Markdown."""
    sources, read = card["sources"], card["tokens_read"]
    used = sum(min(each["tokens"], each["tokens_read"]) for each in sources)
    bounds = ("Less than 1 billion tokens", 10**9), ("1 billion to 10 trillion tokens", 10**13)
    size = next((name for name, bound in bounds if used < bound), "More than 10 trillion tokens")
    given = {name: [each[name] for each in sources if each[name]] for name in ("cut_off", "languages")}
    sections = dict[str, str]()
    for kind in SOURCE_KINDS:
        listed = [line for each in sources if each["kind"] == kind for line in _source_lines(each)]
        details = [f"- {name}: {OPEN}" for name in DETAILS.get(kind, ())] if listed else [f"- {OPEN}"]
        sections[kind] = "\n".join([*listed, *details])
    unknown = [line for each in sources if not each["kind"] for line in _source_lines(each)]
    template = files("binidx.run.provenance").joinpath("public_summary.md").read_text("utf-8").removesuffix("\n")
    return template.format(
        open=OPEN,
        size=size,
        used=used,
        read=read,
        latest=max(given["cut_off"], default=OPEN),
        languages="; ".join(dict.fromkeys(given["languages"])) or OPEN,
        notes="".join(f"- {note}\n" for note in card["notes"]),
        unknown="\n".join([f"### Sources without a kind: {OPEN}", "", *unknown, "", ""]) if unknown else "",
        **sections,
    )


def _source_lines(source: Mapping[str, Any]) -> list[str]:
    told = [f"{name}: {source[name] or OPEN}" for name in ("license", "languages", "cut_off")]
    count = source["num_domains"] or 0
    largest = ", ".join(name for name, _ in source["domains"][: -(-count // TOP_SHARE)])
    size = f"{source['documents']:,} documents, {source['tokens']:,} tokens, {source['tokens_read']:,} read"
    return [
        f"- `{source['source']}`: {size}; {'; '.join(told)}",
        f"  - most relevant of {count:,} domain names: {largest or OPEN}",
    ]
