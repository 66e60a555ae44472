"""Kinds of datasets as orders: the contract, views over them, and what a subclass of the user replaces."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import Speaker, random_rows, write_rows
from helpers.masked_datasets import BERT, T5, write_sentences
from helpers.masked_datasets import build as build_masked

import binidx
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.errors import ConfigError
from binidx.order.view import ViewRequest
from binidx.testing import check_order

S = 32
GPT: dict[str, Any] = {"random_seed": 3, "sequence_length": S, "split": "1,0,0", "tokenizer": Speaker()}


def build(kind: Any, config: Any, num_samples: int | None) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(kind, [num_samples, 0, 0], lambda: True, config).build()[0]


def chats(where: Path, kind: Any = binidx.megatron.SFTDataset, num_samples: int = 75, **options: Any) -> Any:
    uri = write_rows(f"{where}/chat.jsonl", random_rows(1, 30))
    return build(kind, binidx.megatron.SFTDatasetConfig(**GPT, blend=([uri], None), **options), num_samples)


def sentences(where: Path, kind: Any) -> Any:
    write_sentences(where / "sentences", 60, np.random.default_rng(2))
    return build_masked(kind, [f"{where}/sentences"], (300, 0, 0))[0]


def pairs(where: Path) -> Any:
    rng = np.random.default_rng(4)
    with binidx.IndexedDatasetBuilder(f"{where}/pairs.bin", np.int32, multimodal=True) as builder:
        for _ in range(40):
            lengths = rng.integers(0, 20, rng.integers(0, 5)).tolist()
            builder.add_document(rng.integers(1, 900, sum(lengths)), lengths, rng.integers(0, 3, len(lengths)).tolist())
        builder.finalize(f"{where}/pairs.idx")
    config = binidx.megatron.MultimodalDatasetConfig(**GPT, blend=([f"{where}/pairs"], None), image_h=1, image_w=1)
    return build(binidx.megatron.MultimodalDataset, config, 90)


KINDS: dict[str, Callable[[Path], Any]] = {
    "chats": chats,
    "shuffled chats": lambda where: chats(where, shuffle=True),
    "chats of their own length": lambda where: chats(where, binidx.megatron.VarlenDataset),
    "BERT": lambda where: sentences(where, BERT),
    "T5": lambda where: sentences(where, T5),
    "text and images": pairs,
}


def equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        many = isinstance(one[name], list)
        for left, right in zip(one[name] if many else [one[name]], other[name] if many else [other[name]], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_keeps_the_contract_of_orders(name: str, tmp_path: Path) -> None:
    dataset = KINDS[name](tmp_path)
    check_order(dataset.order)
    check_order(pickle.loads(pickle.dumps(dataset)).order, seed=1)


@pytest.mark.parametrize("name", KINDS)
def test_spans_and_assemble_of_one_sample_are_what_a_batch_serves(name: str, tmp_path: Path) -> None:
    dataset = KINDS[name](tmp_path)
    numbers = [0, len(dataset) - 1, 7, None]
    for idx, sample in zip(numbers, dataset.__getitems__(numbers), strict=True):
        equal(dataset.assemble(idx, dataset.dataset.read(dataset.spans(idx))), sample)
    equal(dataset[-3], dataset[len(dataset) - 3])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_view_leaves_out_rows_of_chats(shuffle: bool, tmp_path: Path) -> None:
    inner = chats(tmp_path, shuffle=shuffle)
    (tmp_path / "list.txt").write_text("3\n11\n")
    viewed = chats(tmp_path, shuffle=shuffle, order=binidx.View(f"{tmp_path}/list.txt"))
    check_order(viewed.order)
    kept = [number for number in range(len(inner)) if inner.find_row(number) not in (3, 11)]
    assert len(viewed) == len(kept) < len(inner)
    for number, original in enumerate(kept):
        equal(viewed[number], inner[original])


def test_an_order_with_an_index_of_its_own_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="order: SFTDataset has an order of its own; leave it, or skip documents"):
        chats(tmp_path, order="first_fit")
    (tmp_path / "list.txt").write_text("3\n")
    with pytest.raises(ConfigError, match="order: SFTDataset has an order of its own"):
        chats(tmp_path, order=binidx.View(f"{tmp_path}/list.txt", how="rebuild"))
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        builder.add_document(np.arange(200), [200])
        builder.finalize(f"{tmp_path}/en.idx")
    config = binidx.GPTDatasetConfig(**GPT, blend=([f"{tmp_path}/en"], None), order="first_fit")
    with pytest.raises(ConfigError, match="order: BestFitGPTDataset packs documents by itself; use GPTDataset"):
        build(binidx.megatron.BestFitGPTDataset, config, 3)


class Reversed(binidx.GPTDataset):
    """Serves the tokens of each sample from its last span to its first; both methods call the built-in one."""

    def spans(self, idx: int | None) -> Any:
        return super().spans(idx)[::-1]

    def assemble(self, idx: int | None, sequences: Any) -> Any:
        return {**super().assemble(idx, sequences), "number": torch.tensor(-1 if idx is None else idx)}


def test_methods_of_a_user_may_call_those_that_they_replace(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        for first in range(40):
            builder.add_document(np.arange(first * 100 + 50, first * 100 + 61), [11])
        builder.finalize(f"{tmp_path}/en.idx")
    config = binidx.GPTDatasetConfig(**GPT, blend=([f"{tmp_path}/en"], None))
    plain, changed = (build(kind, config, 30) for kind in (binidx.GPTDataset, Reversed))
    with pytest.raises(ConfigError, match="order: Reversed has no epochs"):
        changed.order.epochs(np.arange(3))
    assert changed.order_identity["class"] == "Reversed"
    for number in range(len(plain)):
        spans = plain.spans(number)
        assert changed.spans(number) == spans[::-1]
        tokens = np.concatenate(plain.dataset.read(spans[::-1]))
        sample = changed[number]
        np.testing.assert_array_equal(sample["tokens"], tokens[:S])
        assert sample["number"] == number
    assert not changed[None]["loss_mask"].any()
    changed.shuffle_index = changed.shuffle_index[::-1].copy()
    assert changed.spans(0) == plain.spans(len(plain) - 1)[::-1]


def write_documents(prefix: str, count: int = 40, tokens: int = 11) -> str:
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        for document in range(count):
            builder.add_document(np.arange(tokens) + 100 * document + 50, [tokens])
        builder.finalize(f"{prefix}.idx")
    return prefix


def documents_of(dataset: Any) -> set[int]:
    return {int(token) // 100 for sample in dataset for token in sample["tokens"]}


def test_a_subclass_may_ask_for_the_length_and_not_hide_that_of_a_view(tmp_path: Path) -> None:
    class Shorter(binidx.GPTDataset):
        def spans(self, idx: int | None) -> Any:
            return super().spans(idx)

        def __len__(self) -> int:
            return super().__len__() - 1

    prefix = write_documents(f"{tmp_path}/en")
    config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None))
    plain = build(binidx.GPTDataset, config, 30)
    assert len(build(Shorter, config, 30)) == len(plain) - 1
    (tmp_path / "list.txt").write_text("3\n")
    viewed = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=binidx.View(f"{tmp_path}/list.txt"))
    with pytest.raises(ConfigError, match="order: Shorter reads or counts samples by itself, which takes no order"):
        build(Shorter, viewed, 30)


def test_threads_that_open_an_order_at_once_do_not_open_it_again_for_their_own_hooks() -> None:
    class Opener:
        def open(self, request: object) -> str:
            is_outer = threading.get_ident() not in begun
            begun.append(threading.get_ident())
            if is_outer:
                both.wait()
            inner.append(dataset.order)
            if is_outer:
                both.wait()
            return "whole"

    class Opened(binidx.GPTDataset):
        opener: Any = Opener()

    begun, inner, both = list[int](), list[Any](), threading.Barrier(2)
    dataset: Any = object.__new__(Opened)
    vars(dataset).update(request=None, opened=SimpleNamespace(order="below"))
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda _: dataset.order, range(2))] == ["whole", "whole"]
    assert len({*begun}) == len(begun) == 2
    assert inner == ["below", "below"]


def test_a_blend_with_its_own_getitem_is_read_by_it(tmp_path: Path) -> None:
    class Marked(binidx.megatron.BlendedDataset):
        def __getitem__(self, idx: int) -> Any:
            return {**super().__getitem__(idx), "number": torch.tensor(idx)}

    prefixes = [write_documents(f"{tmp_path}/{name}") for name in ("en", "de")]
    blend = build(binidx.GPTDataset, binidx.GPTDatasetConfig(**GPT, blend=(prefixes, [0.5, 0.5])), 30)
    marked = Marked(blend.datasets, [0.5, 0.5], len(blend), blend.config)
    loader = binidx.build_pretraining_data_loader(marked, 0, 4)
    assert loader is not None
    assert next(iter(loader))["number"].tolist() == [0, 1, 2, 3]


def test_tokens_alone_are_refused_where_a_subclass_reads_samples(tmp_path: Path) -> None:
    class Doubled(binidx.GPTDataset):
        def __getitem__(self, idx: int | None) -> Any:
            return {name: 2 * column for name, column in super().__getitem__(idx).items()}

    config = binidx.GPTDatasetConfig(**GPT, blend=([write_documents(f"{tmp_path}/en")], None))
    with pytest.raises(ConfigError, match="Doubled: cannot serve tokens alone"):
        build(Doubled, config, 30).read_tokens([0])


@pytest.mark.parametrize("order", ["first_fit", "best_fit"])
def test_packed_documents_of_other_kinds(order: str, tmp_path: Path) -> None:
    prefix = write_documents(f"{tmp_path}/en")
    config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=order)
    with pytest.raises(ConfigError, match="inter_document_masking: found False"):
        build(binidx.megatron.VarlenGPTDataset, config, 10)
    config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=order, inter_document_masking=True)
    sample = build(binidx.megatron.VarlenGPTDataset, config, 10)[0]
    lengths = sample["original_seq_len"].numpy(), sample["padded_seq_len"].numpy()
    ends = (np.cumsum(lengths[1]) - lengths[1] + lengths[0] - 1)[:-1]
    assert len(ends) >= 1
    assert not sample["loss_mask"][ends].any()
    words = dict.fromkeys(("prefix", "middle", "suffix", "pad", "eod"), "x")
    fim = binidx.megatron.GPTFIMDatasetConfig(
        **GPT, blend=([prefix], None), order=order, fim_rate=0.5, fim_spm_rate=0.5, fim_extra_tokens=words
    )
    with pytest.raises(ConfigError, match="order: GPTFIMDataset moves text across the documents of a packed sample"):
        build(binidx.megatron.GPTFIMDataset, fim, 10)
    packed = build(binidx.GPTDataset, config, 10)
    assert packed.num_tokens == 40 * 11
    assert pickle.loads(pickle.dumps(packed)).num_tokens == packed.num_tokens


def test_the_padding_sample_and_sequences_of_a_view(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("3\n11\n")
    viewed = chats(tmp_path, order=binidx.View(f"{tmp_path}/list.txt"))
    inner = chats(tmp_path)
    kept = [number for number in range(len(inner)) if inner.find_row(number) not in (3, 11)]
    assert [viewed.find_row(number) for number in range(len(viewed))] == [inner.find_row(number) for number in kept]
    padding = viewed[None]
    assert not padding["loss_mask"].any()
    np.testing.assert_array_equal(padding["tokens"], viewed[0]["tokens"])


@pytest.mark.parametrize("over", ["blend", "source"])
@pytest.mark.parametrize("how", ["skip", "rebuild"])
def test_a_list_must_name_sources_of_the_run(how: Any, over: Any, tmp_path: Path) -> None:
    prefixes = [write_documents(f"{tmp_path}/{name}") for name in ("en", "de")]
    for line, needed in (("3", "a number alone"), (f"{tmp_path}/fr\t3", f"{tmp_path}/fr")):
        (tmp_path / "list.txt").write_text(f"{line}\n")
        order = binidx.View(f"{tmp_path}/list.txt", how=how, over=over)
        with pytest.raises(ConfigError, match=f"list.txt: found {needed}, needs the prefix of one of 2 sources"):
            build(binidx.GPTDataset, binidx.GPTDatasetConfig(**GPT, blend=(prefixes, [0.5, 0.5]), order=order), 30)
    split = {name: value for name, value in GPT.items() if name != "split"}
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t3\n")
    order = binidx.View(f"{tmp_path}/list.txt", how=how, over=over)
    built = []
    for option in (order, None):
        config = binidx.GPTDatasetConfig(
            **split, blend_per_split=[([prefixes[0]], None), ([prefixes[1]], None), None], order=option
        )
        builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [90, 90, None], lambda: True, config)
        built.append(builder.build())
    (train, valid, _), (_, plain, _) = built
    assert 3 not in documents_of(train)
    assert 3 in documents_of(valid)
    assert documents_of(valid) == documents_of(plain)


def test_a_view_holds_in_lists_of_validation_sets_in_stages_and_in_lengths(tmp_path: Path) -> None:
    prefixes = [write_documents(f"{tmp_path}/{name}") for name in ("en", "de")]
    (tmp_path / "list.txt").write_text(f"{prefixes[0]}\t3\n{prefixes[1]}\t3\n")
    order = binidx.View(f"{tmp_path}/list.txt")
    split = {name: value for name, value in GPT.items() if name != "split"}
    lists = binidx.GPTDatasetConfig(
        **split, blend_per_split=[None, (prefixes, None), None], multiple_validation_sets=True, order=order
    )
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [0, None, 0], lambda: True, lists)
    sets: Any = builder.build()[1]
    config = binidx.GPTDatasetConfig(**GPT, blend=(prefixes, [0.5, 0.5]), order=order)
    stages = [binidx.Stage((prefixes, [0.5, 0.5]), 20), binidx.Stage(([prefixes[0]], None), 8)]
    staged = binidx.StagedBlendedDataset(binidx.GPTDataset, stages, config)
    windows = build(binidx.GPTDataset, config, 20)
    lengths = binidx.LengthStagedDataset(windows, [binidx.LengthStage(S // 2, 10), binidx.LengthStage(S, 5)])
    for dataset in (*sets, staged, lengths):
        assert len(documents_of(dataset)) > 3
        assert 3 not in documents_of(dataset)


def made_directly(kind: Any, built: Any, config: Any) -> Any:
    """The dataset of a builder, made again by its constructor."""
    return kind(built.dataset, built.dataset_path, built.indices, built.num_samples, built.index_split, config)


READS: list[Callable[[Any], Any]] = [
    lambda dataset: dataset[0],
    lambda dataset: dataset.__getitems__([0]),
    lambda dataset: dataset.read_tokens([0]),
    lambda dataset: dataset.order_identity,
    lambda dataset: dataset.order,
    lambda dataset: len(dataset),
    lambda dataset: [*dataset.locate_bytes(np.arange(2))],
    lambda dataset: next(iter(binidx.build_pretraining_data_loader(dataset, 0, 2))),  # type: ignore[arg-type]
]

VIEWS: list[dict[str, Any]] = [{}, {"over": "source"}, {"how": "rebuild"}, {"keep": True}]


def same_samples(one: Any, other: Any) -> None:
    assert len(one) == len(other) > 0
    assert one.order_identity == other.order_identity
    for left, right in zip(one, other, strict=True):
        equal(left, right)


@pytest.mark.parametrize("options", VIEWS)
@pytest.mark.parametrize("kind", [binidx.GPTDataset, BestFitGPTDataset, Reversed])
def test_a_constructor_serves_the_view_of_a_builder(kind: Any, options: Any, tmp_path: Path) -> None:
    prefix, drop = write_documents(f"{tmp_path}/en"), tmp_path / "list.txt"
    plain = build(kind, binidx.GPTDatasetConfig(**GPT, blend=([prefix], None)), 90)

    def make(lines: str) -> Any:
        drop.write_text(lines)
        config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=binidx.View(f"{drop}", **options))
        return config, made_directly(kind, plain, config)

    listed = [document for document in range(40) if (document != 3 if options.get("keep") else document in (3, 5))]
    config, direct = make("".join(f"{document}\n" for document in listed))
    assert 3 not in documents_of(direct)
    assert len(documents_of(direct)) > 3
    same_samples(direct, build(kind, config, 90))
    same_samples(pickle.loads(pickle.dumps(make("7\n")[1])), make("7\n")[1]) if not options.get("keep") else None
    _, unknown = make(f"{tmp_path}/fr\t3\n") if options.get("how") != "rebuild" else (None, None)
    for read in READS if unknown is not None else ():
        with pytest.raises(ConfigError, match="needs the prefix of one of 1 sources"):
            read(unknown)


def test_a_thread_that_reads_while_a_view_is_opened_gets_the_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_documents(f"{tmp_path}/en")
    (tmp_path / "list.txt").write_text("3\n")
    config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=binidx.View(f"{tmp_path}/list.txt"))
    direct = made_directly(binidx.GPTDataset, build(binidx.GPTDataset, config, 90), config)
    serve, read, others = ViewRequest.serve, list[set[int]](), list[threading.Thread]()

    def serve_while_another_thread_reads(request: Any, order: Any) -> Any:
        if not others:
            others.append(threading.Thread(target=lambda: read.append(documents_of(direct))))
            others[0].start()
            others[0].join()
        return serve(request, order)

    monkeypatch.setattr(ViewRequest, "serve", serve_while_another_thread_reads)
    assert len(direct) > 3  # opens the order
    [documents] = read
    assert 3 not in documents_of(direct)
    assert 3 not in documents
    assert len(documents) > 3


@pytest.mark.parametrize("options", VIEWS)
def test_a_blend_made_directly_serves_the_view_of_a_builder(options: Any, tmp_path: Path) -> None:
    prefixes = [write_documents(f"{tmp_path}/{name}") for name in ("en", "de")]
    drop = [3, 4, 5] if not options.get("keep") else [document for document in range(40) if document not in (3, 4, 5)]
    lines = [f"{prefixes[1]}\t{document}\n" for document in drop]
    lines += [f"{prefixes[0]}\t{document}\n" for document in range(40) if options.get("keep")]
    (tmp_path / "list.txt").write_text("".join(lines))
    order = binidx.View(f"{tmp_path}/list.txt", **options)
    plain, viewed = (
        binidx.GPTDatasetConfig(
            **GPT, blend=(prefixes, [0.5, 0.5]), order=option, mid_level_dataset_surplus=1.0
        ) for option in (None, order)
    )  # fmt: skip
    built = build(binidx.GPTDataset, viewed, 60)
    parts = [made_directly(binidx.GPTDataset, part, viewed) for part in built.datasets]
    same_samples(binidx.megatron.BlendedDataset(parts, [0.5, 0.5], 60, viewed), built)
    # A blend whose own config asks for nothing keeps what its datasets were asked for.
    kept = binidx.megatron.BlendedDataset(parts, [0.5, 0.5], 40, plain)
    assert len(kept) == 40
    for dataset in (built, kept):
        documents = [documents_of([sample]) for sample in dataset if sample["dataset_id"] == 1]
        assert documents
        assert not any(each & {3, 4, 5} for each in documents)
    assert {int(sample["dataset_id"]) for sample in kept} == {0, 1}
    unbuilt = build(binidx.GPTDataset, plain, 60).datasets
    if options.get("how") == "rebuild":
        with pytest.raises(ConfigError, match=r"order: found a dataset of .* that was built without it; build it with"):
            binidx.megatron.BlendedDataset(unbuilt, [0.5, 0.5], 40, viewed)
    else:
        same_samples(binidx.megatron.BlendedDataset(unbuilt, [0.5, 0.5], 60, viewed), built)


@pytest.mark.parametrize("line", ["3", "fr\t3"])
def test_stages_refuse_a_list_that_names_no_source(line: str, tmp_path: Path) -> None:
    prefixes = [write_documents(f"{tmp_path}/{name}") for name in ("en", "de")]
    (tmp_path / "list.txt").write_text(f"{line}\n")
    order = binidx.View(f"{tmp_path}/list.txt", over="source")
    config = binidx.GPTDatasetConfig(**GPT, blend=(prefixes, [0.5, 0.5]), order=order)
    with pytest.raises(ConfigError, match="needs the prefix of one of 2 sources"):
        binidx.StagedBlendedDataset(binidx.GPTDataset, [binidx.Stage((prefixes, [0.5, 0.5]), 20)], config)


def test_windows_made_directly_have_their_view(tmp_path: Path) -> None:
    prefix = write_documents(f"{tmp_path}/en")
    (tmp_path / "list.txt").write_text("3\n")
    config = binidx.GPTDatasetConfig(**GPT, blend=([prefix], None), order=binidx.View(f"{tmp_path}/list.txt"))
    built = build(binidx.GPTDataset, config, 30)
    stages = [binidx.LengthStage(S // 2, 10)]
    direct = binidx.LengthStagedDataset(made_directly(binidx.GPTDataset, built, config), stages)
    assert 3 not in documents_of(direct)
    same_samples(direct, binidx.LengthStagedDataset(built, stages))


def test_a_chat_made_directly_has_the_view_of_a_builder(tmp_path: Path) -> None:
    inner = chats(tmp_path)
    (tmp_path / "list.txt").write_text("3\n")
    options = {"blend": ([inner.dataset_path], None), "order": binidx.View(f"{tmp_path}/list.txt")}
    config = binidx.megatron.SFTDatasetConfig(**GPT, **options)
    direct = made_directly(binidx.megatron.SFTDataset, inner, config)
    same_samples(direct, build(binidx.megatron.SFTDataset, config, inner.num_samples))
    assert 3 not in {direct.find_row(number) for number in range(len(direct))}
