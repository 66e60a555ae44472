"""Datasets whose blend or sequence length changes during a run: see `binidx.order.staged`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from binidx.dataset.blend_arguments import Blend, parse_blend
from binidx.dataset.config import BlendedMegatronDatasetConfig, Split, check_num_samples, split_indices
from binidx.dataset.megatron.blended import BlendedDataset
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import building, current_build, own_methods
from binidx.dataset.split_requests import WHOLE, sizes_per_dataset
from binidx.dataset.token_dataset import Assemble
from binidx.errors import BlendError, ConfigError
from binidx.index.blend import normalize
from binidx.index.cache.index_files import recorded_name
from binidx.order.requests import Request, SourceRequest
from binidx.order.staged.staged_order import BlendStage, Seam, StagedRequest
from binidx.order.staged.window_order import MIXED_WINDOWS, LengthStage, WindowRequest


@dataclass(frozen=True)
class Stage:
    """One stage of a `StagedBlendedDataset`.

    Args:
        blend: prefixes and weights; weights may be None for a single prefix.
        num_samples: number of samples before the next stage begins.
        planned_samples: number of samples for which this stage was planned when it was started, if more than
            num_samples; the order is then that of so many samples. By default num_samples.

    Raises:
        ConfigError: weights are missing, a prefix repeats, or a number is out of range.

    Example:
        >>> binidx.Stage((["s3://corpus/en", "s3://corpus/code"], [0.7, 0.3]), num_samples=1_000_000)

    Source: ours.
    """

    blend: Blend
    num_samples: int
    planned_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "blend", parse_blend("stage", self.blend))
        if self.blend[1] is None and len(self.blend[0]) > 1:
            raise ConfigError(f"stage of {list(self.blend[0])}: found no weights, need one per prefix")
        if len(set(self.blend[0])) < len(self.blend[0]):
            raise ConfigError(f"stage of {list(self.blend[0])}: a prefix repeats; give each once")
        check_num_samples("stage: num_samples, planned_samples", self.planned)
        if self.num_samples < 1 or self.planned < self.num_samples:
            raise ConfigError(f"stage: num_samples is {self.num_samples}, need 1 to {self.planned} (planned_samples)")

    @property
    def planned(self) -> int:
        return self.num_samples if self.planned_samples is None else self.planned_samples

    @property
    def shares(self) -> list[float]:
        return normalize(list(self.blend[1] or [1.0]))


def request_stages(
    cls: type[MegatronDataset],
    stages: Sequence[Stage],
    config: BlendedMegatronDatasetConfig,
    split: Split = Split.train,
    **more: Any,
) -> StagedRequest:
    """Return the request of Megatron's order of a blend in stages.

    Args:
        cls: class of the datasets.
        stages: stages in their order.
        config: options of the run; its own blend is ignored.
        split: split of the sources.
        more: further arguments of `StagedRequest`.

    Raises:
        ConfigError: there are no stages.
        BlendError: the config has no such split.
    """
    if not stages:
        raise ConfigError("stages: found none, need at least one")
    bookends = (config.split_matrix or [WHOLE] * len(Split))[split.value]
    if bookends is None:
        raise BlendError(f"{stages[0].blend[0][0]}: has no {split.name} split in {config.split}")

    def request_round(prefix: str, number: int, num_samples: int) -> SourceRequest:
        return cls.request_source(prefix, num_samples, split, config_of_round(config, number), bookends)

    drawn = []
    for stage in stages:
        prefixes, shares = stage.blend[0], stage.shares
        sizes: Sequence[Any] = [[stage.planned]]  # as the builder would request in a run of this blend
        if len(shares) > 1 or not (stage.blend[1] is None or config.blend_per_split):
            sizes = sizes_per_dataset(len(shares), shares, [stage.planned], config.mid_level_dataset_surplus)
        names = [str(config.as_written(prefix)) for prefix in prefixes]
        drawn.append(BlendStage(prefixes, names, shares, [size for [size] in sizes], stage.num_samples, stage.planned))
    return StagedRequest(drawn, request_round, split.name, config.cache_directory, **more)


def config_of_round(config: BlendedMegatronDatasetConfig, number: int) -> BlendedMegatronDatasetConfig:
    """Return the config of a round of a source: its random_seed is greater by the number of the round."""
    return replace(config, random_seed=config.random_seed + number) if number else config


class StagedBlendedDataset(BlendedDataset):
    """Blend in stages: a `BlendedDataset` whose datasets are the rounds of its sources (passes over them).

    Args:
        cls: kind of dataset, such as `GPTDataset`.
        stages: stages in their order.
        config: options of the run; its own blend is ignored. With `blend_per_split` a source is served whole.
        split: split of the sources.

    Attributes:
        seams, proof: start of each stage; and a description of the checked stages.

    Raises:
        BlendError: a source has no sample in this split.
        ConfigError: there are no stages.

    Example:
        >>> binidx.StagedBlendedDataset(binidx.GPTDataset, [
        ...     binidx.Stage((["en", "code"], [0.7, 0.3]), 1_000_000),
        ...     binidx.Stage((["en", "code", "math"], [0.5, 0.3, 0.2]), 500_000)], config)

    Source: ours; the first stage's samples are Megatron Core's for `planned_samples`.
    """

    RECORDED_NAME: ClassVar[str] = "StagedBlendedDataset"

    def __init__(
        self,
        cls: type[MegatronDataset],
        stages: Sequence[Stage],
        config: BlendedMegatronDatasetConfig,
        split: Split = Split.train,
    ) -> None:
        hooks = {"open_round": self._open_round, "open_index": self._open_index}
        asked = request_stages(cls, stages, config, split, kind=recorded_name(type(self)), **hooks)
        self.stages, self.config, self.split = tuple(stages), config, split
        self.build_context, self.index_digests = current_build(), {}
        self._cls, self.datasets = cls, []
        self.request = self.request_order(asked)
        self._opened_order = self.opener.open(self.request)
        if self.request is not asked:  # the class of the rounds is known now
            self.check_takes_order()
        self.weights, self.size = self.blend_request.shares, self.blend_request.size
        self.seams: Sequence[Seam] = self._order.seams
        self.proof: str = self._order.proof

    def _open_round(self, source: SourceRequest, number: int) -> Request:
        """Return the request of a round, whose dataset is built."""
        config = config_of_round(self.config, number)
        with building(self.build_context):
            low_level = self._cls.build_low_level_dataset(source.prefix, config)
            elements = split_indices(source.bookends or WHOLE, self._cls.numel_low_level_dataset(low_level))
            arguments = low_level, source.prefix, elements, source.num_samples, self.split, config
            self.datasets.append(self._cls(*arguments))
        return self.datasets[-1].opened


class LengthStagedDataset(BlendedDataset):
    """Samples of several lengths, stage after stage: a blend of the sources of the windows, cut to each length.

    Its `datasets` are those of the windows, once for each length.

    Args:
        windows: a `GPTDataset`, or a blend of them, built for the longest length; its samples are the windows.
        stages: stages in their order; together they may use no more windows than there are.
        mixed_windows: number of windows whose parts are interleaved, so that parts of a window are not neighbours.

    Raises:
        ConfigError: a length does not divide that of the windows, a stage ends inside a window, there are too few
            windows, or methods of the user make their samples.

    Example:
        >>> stages = [binidx.LengthStage(2048, 4_000_000), binidx.LengthStage(8192, 1_000_000)]
        >>> dataset = binidx.LengthStagedDataset(train, stages)

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "LengthStagedDataset"

    def __init__(
        self, windows: GPTDataset | BlendedDataset, stages: Sequence[LengthStage], *, mixed_windows: int = MIXED_WINDOWS
    ) -> None:
        for part in windows.parts:
            if part.reads_by_itself or own_methods(type(part), "assemble"):
                raise ConfigError(f"windows: found {part!r}, whose own methods make samples of one length")
        self.config: Any = windows.config
        self.stages, self.windows, self.mixed_windows = tuple(stages), windows, mixed_windows
        self.split, self.index_digests = windows.parts[0].index_split, {}
        self.request = WindowRequest(
            windows.request, self.stages, mixed_windows, self.config.cache_directory, recorded_name(type(self))
        )
        sources = [part.source_request for part in windows.parts]
        blend, cut = self.request.cut(windows.order, sources, self.opener)
        self.datasets, self._lengths = [part for _ in blend.first_of for part in windows.parts], [*blend.first_of]
        self.weights, self.size = blend.shares, blend.size
        self._opened_order = self._open_index(blend, cut, self.opener)

    @property
    def _assembles(self) -> Sequence[Assemble]:
        return [
            cast(GPTDataset, part).assemble_for(replace(part.config, sequence_length=length))
            for length in self._lengths
            for part in self.windows.parts
        ]
