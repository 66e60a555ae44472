"""Releases of Megatron, each as the set of rules by which its samples differ from those of other releases.

A kind of dataset lists the rules on which its samples depend. States record the name of a release, identities the rules
that have an effect, so a run continues with another release whose samples are equal.
"""

from __future__ import annotations

import re
from collections.abc import Set
from enum import StrEnum, auto
from typing import Any

from binidx.errors import ConfigError


class Rule(StrEnum):
    """A rule that some releases follow and others do not. The names are part of identities, and stay.

    Attributes:
        bert_sorted_ids: BERT draws random tokens of the sorted ids; without it, in the order of `inv_vocab`.
        fim_no_special_tokens: fill in the middle leaves special tokens out of the texts that it cuts.
        sft_no_eod: a conversation that its chat template did not end has no EOD.
        sft_padded_bounds: `cu_seqlens` of `SFTDataset` has S + 1 numbers; without it one more than conversations.
        sft_hybrid_padding: conversations are padded to `padding_multiple` with hybrid context parallelism.
        sft_sequence_parallel_padding: conversations are padded to `sequence_parallel_size` without it, too.
        varlen_pads_by_position: `VarlenDataset` trains on pad ids within a conversation.
        varlen_padding_mask: samples of `varlen_sbhd_validation` have a `padding_mask`.
        query_document_lengths: `_query_document_sample_shuffle_indices` returns lengths of documents, too.
        empty_is_none: `build_pretraining_data_loader` returns None for a dataset without samples.
    """

    bert_sorted_ids = auto()
    fim_no_special_tokens = auto()
    sft_no_eod = auto()
    sft_padded_bounds = auto()
    sft_hybrid_padding = auto()
    sft_sequence_parallel_padding = auto()
    varlen_pads_by_position = auto()
    varlen_padding_mask = auto()
    query_document_lengths = auto()
    empty_is_none = auto()


_VARLEN = {Rule.varlen_pads_by_position, Rule.varlen_padding_mask}
_SFT_PADDING = {Rule.sft_hybrid_padding, Rule.sft_sequence_parallel_padding}
_OF_0_17 = {Rule.fim_no_special_tokens, Rule.sft_no_eod, *_VARLEN}
_OF_0_18 = {*_OF_0_17, Rule.bert_sorted_ids}
_OF_0_19 = {*_OF_0_18, Rule.sft_padded_bounds, Rule.query_document_lengths}
_OF_MAIN = {*_OF_0_19, Rule.sft_hybrid_padding, Rule.empty_is_none}

EARLIEST, MAIN, NEWEST = "0.16", "main-2026-08-22", "main-pr6742-2026-08-21"
RELEASES: dict[str, Set[Rule]] = {
    EARLIEST: _SFT_PADDING,  # as binidx 0.1.0 padded; 0.16.1 does not
    "0.17": _OF_0_17,
    "0.18": _OF_0_18,
    "0.19": _OF_0_19,
    MAIN: _OF_MAIN,  # d98e8a64, which "main" means for ever; padding with hybrid context parallelism is dev's
    NEWEST: {*_OF_MAIN, *_SFT_PADDING} - {Rule.varlen_padding_mask},  # 095c3613, the head of the pull request
}
"""Name of a release -> its rules. `VarlenDataset`, which no release has, follows main's rules there."""


def parse_release_name(name: str) -> str:
    """Return the name in `RELEASES` of a release.

    Args:
        name: that name, a full version such as "0.19.2", or "main".

    Raises:
        ConfigError: no known release.
    """
    short = MAIN if name == "main" else re.sub(r"^(0\.\d+)\.\d+$", r"\1", str(name))
    if short not in RELEASES:
        raise ConfigError(f"megatron_samples: found {name!r}, need main, {', '.join(RELEASES)} or such as 0.19.2")
    return short


def follows(config: Any, rule: Rule) -> bool:
    """Return whether the samples of a config follow a rule.

    Args:
        config: has the field `megatron_samples`.
        rule: the rule.
    """
    return rule in RELEASES[parse_release_name(config.megatron_samples)]


def find_rules_in_effect(config: Any, rules: Set[Rule], release: str) -> Set[Rule]:
    """Return the rules that a release follows and that change the samples of a config.

    Args:
        config: options of the samples.
        rules: those on which the samples of a kind depend.
        release: as `megatron_samples` names it.

    Raises:
        ConfigError: no known release.
    """
    given: dict[str, Any] = vars(config)
    hybrid, ranks = bool(given.get("hybrid_context_parallel")), given.get("sequence_parallel_size") or 1
    idle = {
        Rule.sft_hybrid_padding: not hybrid,
        Rule.sft_sequence_parallel_padding: hybrid or ranks == 1,
        Rule.varlen_padding_mask: not given.get("varlen_sbhd_validation"),
    }
    return {rule for rule in RELEASES[parse_release_name(release)] & rules if not idle.get(rule, False)}


def describe_rules(config: Any, rules: Set[Rule]) -> dict[str, str]:
    """Return the field of an identity for the rules of a config: none for those of 0.16, "main" for those of d98e8a64.

    Args:
        config: options of the samples.
        rules: those on which the samples of a kind depend.
    """
    found, earliest, main = (
        find_rules_in_effect(config, rules, release) for release in (config.megatron_samples, EARLIEST, MAIN)
    )
    if found == earliest:
        return {}
    return {"megatron_samples": "main" if found == main else " ".join(sorted(found))}
