"""Rows of the first table of the page of figures, charts, and distances to limits: each shows a row of a bench."""

from __future__ import annotations

from dataclasses import dataclass

MEGATRON = "Megatron Core"


@dataclass(frozen=True)
class Claim:
    """A row of that table.

    Args:
        work: the work and its conditions.
        against: the peer.
        bench, row, setting: name of the bench, `work` of its row, and the peer's setting; None is its best.
        short, peer: label of its bar in the chart, and the peer; no bar without a label.
    """

    work: str
    against: str
    bench: str
    row: str
    setting: str | None = None
    short: str = ""
    peer: str = ""


CLAIMS = (
    Claim(
        "samples of 4,096 tokens from S3, 30 ms away, documents shuffled; we in one process",
        f"{MEGATRON}'s S3 reader: best of 0 to 32 workers and 5 block sizes",
        "from_s3",
        "samples from S3, 30 ms away, documents shuffled",
        short="shuffled samples from S3",
        peer="Megatron's S3 reader",
    ),
    Claim(
        "the same, each sample in one piece",
        "the same",
        "from_s3",
        "samples from S3, 30 ms away, contiguous",
        short="contiguous samples from S3",
        peer="Megatron's S3 reader",
    ),
    Claim(
        "25,000 samples from S3, 30 ms away, documents shuffled globally, an empty `cache_dir`; one process each",
        "fastest of MosaicML Streaming, LitData, OLMo-core, Lance and LanceDB, each in its own order",
        "peers_long",
        "first 25,000 samples, uint16, documents shuffled, cache_dir",
        short="25,000 samples, shuffled globally",
        peer="the fastest peer, in its own order",
    ),
    Claim(
        "the same, contiguous, samples shuffled globally",
        "the same",
        "peers_long",
        "first 25,000 samples, uint16, contiguous, cache_dir",
    ),
    Claim(
        "one epoch of the corpus, 128,000 samples, documents shuffled globally, an empty `cache_dir`",
        "the same",
        "peers_long",
        "first 128,000 samples, uint16, documents shuffled, cache_dir",
    ),
    Claim(
        "25,000 samples by ranges alone, without a `cache_dir`, documents shuffled globally",
        "the same",
        "peers_long",
        "first 25,000 samples, uint16, documents shuffled",
    ),
    Claim(
        "the same, contiguous, samples shuffled globally",
        "the same",
        "peers_long",
        "first 25,000 samples, uint16, contiguous",
    ),
    Claim(
        "1,000 prefixes in S3, 30 ms away, first start of all: no cache anywhere",
        f"{MEGATRON}, first start, data on a local disk",
        "cold_start",
        "1,000 prefixes in S3, 30 ms away, first start of all to first batch",
        short="first start, 1,000 prefixes in S3",
        peer="Megatron on a local disk",
    ),
    Claim(
        "1,000 prefixes in S3, start of a new machine: indices and bundle cached in the bucket",
        f"{MEGATRON}, data and caches on a local disk",
        "cold_start",
        "1,000 prefixes in S3, 30 ms away, start of a new machine to first batch",
        short="start of a new machine, the same",
        peer="Megatron on a local disk",
    ),
    Claim(
        "a step of 512 samples of 30 million documents in S3, on loopback, traced; indices in the bucket",
        "as many ranges fetched bare from the same SeaweedFS server; our goal was 1 s",
        "trace_s3",
        "a step of 512 samples traced over S3 on loopback, cold",
    ),
    Claim(
        "400 MB of jsonl to tokens, gigatoken's engine, a CPU-second, imports apart",
        "fastest of Megatron-LM's tools with the same engine; default: its Hugging Face pool",
        "text_to_tokens",
        "text to tokens, gigatoken's engine",
        short="text to tokens, same engine",
        peer="Megatron's fastest tool",
    ),
    Claim(
        "merge of 4 datasets, 2.2 GB of real documents, wall; files in the page cache",
        MEGATRON,
        "merge",
        "merge of 2.2 GB of real documents, wall",
        short="merge of 2.2 GB",
        peer="Megatron",
    ),
    Claim(
        "merge of 20 million documents of one token: the index alone, CPU",
        MEGATRON,
        "merge",
        "merge of 4 x 5 M documents of one token, CPU",
    ),
    Claim(
        "document and sample index of 10,000,000 documents, one core, a document",
        MEGATRON,
        "document_sample",
        "document and sample index, one core, 10,000,000 documents",
        short="index of 10,000,000 documents",
        peer="Megatron",
    ),
    Claim(
        "peak memory of these, a document",
        MEGATRON,
        "document_sample",
        "peak memory a document and epoch, 1 epochs",
        short="memory of this index",
        peer="Megatron",
    ),
    Claim(
        "blend of 2,048 datasets, 300,000 samples, one core, a sample",
        MEGATRON,
        "blend",
        "blend of 2,048 datasets, random weights, 300,000 samples",
        short="blend of 2,048 datasets",
        peer="Megatron",
    ),
    Claim(
        "the same, 10,000,000 samples, tied weights",
        MEGATRON,
        "blend",
        "blend of 2,048 datasets, tied weights",
    ),
    Claim(
        "a sample of 4,096 tokens from a local file, in a stacked micro-batch of 8, one core, page cache",
        MEGATRON,
        "item_time",
        "a sample of a stacked micro-batch of 8, against the same",
        short="a sample from a local file",
        peer="Megatron",
    ),
    Claim(
        "the same through 2 DataLoader workers, wall",
        MEGATRON,
        "item_time",
        "a sample of a micro-batch of 8, 2 DataLoader workers",
        short="the same through 2 DataLoader workers",
        peer="Megatron",
    ),
)

LIMITS = (
    Claim(
        "a sample of 4,096 tokens from a local file, in a stacked micro-batch of 8",
        "memory: the outputs written once, no more",
        "item_time",
        "a sample of a stacked micro-batch of 8, to the limit",
    ),
    Claim(
        "the same through 2 DataLoader workers",
        "memory and pipes: one shared row of int32 instead of data",
        "item_time",
        "a sample of a micro-batch of 8, 2 DataLoader workers, to the limit",
    ),
    Claim(
        "256 MiB of cached chunks compared with their checksums",
        "memory: XXH3 alone over the file",
        "disk_cache",
        "comparing 256 MiB with their sums, once a process",
    ),
    Claim(
        "ranges of 16 KiB from S3, signed URLs, 64 in flight, a second",
        "the same ranges by aiohttp, bare",
        "clients",
        "requests, s3, signed URLs, 64 in flight",
    ),
    Claim(
        "bytes moved for each byte of the samples, documents shuffled",
        "link: the bytes used",
        "ceiling",
        "bytes moved per byte used, uint16, documents shuffled, exact ranges",
    ),
    Claim(
        "the same, contiguous",
        "link: the bytes used",
        "ceiling",
        "bytes moved per byte used, uint16, contiguous, exact ranges",
    ),
    Claim(
        "filling a disk cache over a link of 25 MB/s, compressed tokens of uint16",
        "link: the plain bytes",
        "segments",
        "warming a disk cache with uint16 over 200 Mbit/s, plain bytes",
    ),
    Claim(
        "1.2 GB of tokens copied by `binidx convert` and verified, CPU",
        "disk: `cp`",
        "convert",
        "convert of 1.2 GB, verified, CPU",
    ),
    Claim(
        "a trainer that takes 400,000 tokens/s from S3, 30 ms away: share of the time spent waiting",
        "the goal",
        "step_wait",
        "of 400,000 tokens/s over 10 minutes, waiting for a batch from S3, 30 ms away",
    ),
)


@dataclass(frozen=True)
class Curve:
    """A curve of the page: the series of a row.

    Args:
        bench, row: name of the bench, and `work` of its row.
        title, subtitle: of the chart.
    """

    bench: str
    row: str
    title: str
    subtitle: str


CURVES = {
    "next": Curve(
        "item_time",
        "next() of a trainer, p50",
        "next() of a trainer, microseconds",
        "percentiles over micro-batches of 8 x 4,096 tokens, steps of 5 ms",
    ),
    "memory": Curve(
        "item_time",
        "most resident memory",
        "Memory over a million micro-batches, MiB",
        "after so many micro-batches of 4,096 tokens, one process",
    ),
}
