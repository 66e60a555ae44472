"""A run in one JSON file: its data, order and step sizes.

    {"config": {"random_seed": 1234, "sequence_length": 4096, "split": "969,30,1",
                "blend": [["s3://corpus/en", "gs://corpus/code"], [0.7, 0.3]],
                "tokenizer": {"unique_identifiers": {"class": "...", ...}, "eod": 0, "pad": 1},
                "reset_position_ids": false, "reset_attention_mask": false, "eod_mask_loss": false},
     "sizes": [1000000, 1000, 1000], "micro_batch_size": 8, "data_parallel_size": 64, "library": "0.2.0"}

The order of samples is a function of this file. It contains no options of stores, which may hold secrets. A run with
relative paths also has `"directory"`; they stay as they were written, as the names of Megatron's caches depend on them.
`library` is the version that wrote the file; nothing compares it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass, replace
from typing import Any, get_type_hints

import binidx
from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.split_requests import SplitRequests
from binidx.dataset.staged import Stage
from binidx.errors import ConfigError, redacted, trims_traceback
from binidx.forks import cached_property
from binidx.format.virtual import check_named
from binidx.html_table import format_html_table
from binidx.json_models import JsonFile
from binidx.loader.samplers import DataloaderType
from binidx.run.global_order import GlobalOrder
from binidx.run.run_kind import ANY_RUN, describes_packed, read_run_file
from binidx.run.saved_tokenizer import SavedTokenizer
from binidx.run.schedule import BatchSchedule, Rampup, divide_phases, parse_thresholds
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object


@dataclass(frozen=True)
class Run:
    """Description of a run: its datasets, their order, and the samples consumed so far.

    Args:
        config: config of the run's datasets.
        sizes: minimum numbers of samples of train, valid and test, or None, as for the builder.
        micro_batch_size: number of samples that a rank reads at a time.
        data_parallel_size: number of ranks that read different samples.
        dataloader_type, data_sharding: as in `build_pretraining_data_loader`.
        consumed_samples: number of samples served before, over all ranks.
        global_batch_size: number of samples of a step; by default one micro-batch of each rank.
        rampup_batch_size, decrease_batch_size_if_needed: growth of the step, as in `BatchSchedule`.
        step_batch_size_schedule: sizes of the steps instead of one: Megatron's text "0:768 250B:1536", whose thresholds
            count tokens, or pairs (samples, size).
        iterations_to_skip: iterations, counted from 1, whose samples are read and not trained.
        phase_transition_iterations: iterations after which the datasets are built anew, as `phases` describes.
        first_step: number of iterations before this run: its own steps are `first_step` and those after it.
        stop_step: number of iterations after which the run ends; None: where its samples end.
        earlier_samples: samples that were consumed from earlier datasets; `step_batch_size_schedule` counts them, too.
        previous: path or URI of the file of the run before `first_step`, also over packed files: this one resumes it
            there, or forks from it, with other ranks, data or steps. A relative path in a file begins in its folder.
        stages: stages of a `StagedBlendedDataset` instead of the config's blend. The size of train is then 0.
        directory: absolute path from which relative prefixes and a relative path_to_cache are opened, by default the
            current directory. None, as in files of earlier versions: the directory that is current at each opening. A
            config that is derived from that of another run keeps the directory of that run.
        same_data: prefix of this run -> prefix under which an earlier run has the same data, of which this is a copy.
        other_fields: fields of the run's file that this version does not know, without effect; `save` keeps them.

    Raises:
        ConfigError: an invalid value, or a config that is no `GPTDatasetConfig`.

    Example:
        binidx.Run(config, [1_000_000, 1000, 1000], micro_batch_size=8, data_parallel_size=64).save("run.json")

    Source: ours; samplers and batch sizes as in Megatron-LM.
    """

    config: GPTDatasetConfig
    sizes: Sequence[int | None]
    micro_batch_size: int
    data_parallel_size: int = 1
    dataloader_type: DataloaderType = "single"
    data_sharding: bool = True
    consumed_samples: int = 0
    global_batch_size: int | None = None
    rampup_batch_size: Rampup | None = None
    decrease_batch_size_if_needed: bool = False
    step_batch_size_schedule: str | Sequence[Sequence[int]] | None = None
    iterations_to_skip: Sequence[int] = ()
    phase_transition_iterations: Sequence[int] = ()
    first_step: int = 0
    stop_step: int | None = None
    earlier_samples: int = 0
    previous: str | None = None
    stages: Sequence[Stage] | None = None
    directory: str | None = field(default_factory=os.getcwd)
    same_data: Mapping[str, str] = field(default_factory=dict)
    other_fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.config) is not GPTDatasetConfig:
            raise ConfigError(f"config: found {type(self.config).__name__}, a run needs a GPTDatasetConfig")
        if self.config.mock:
            raise ConfigError("blend: found none, a run needs blend or blend_per_split")
        if self.dataloader_type not in ("single", "cyclic"):
            raise ConfigError(f"dataloader_type: found {self.dataloader_type!r}, needs 'single' or 'cyclic'")
        for name in ("micro_batch_size", "data_parallel_size", "consumed_samples", "global_batch_size"):
            value, least = getattr(self, name), 0 if name == "consumed_samples" else 1
            if name == "global_batch_size" and value is None:
                continue
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: found {value!r}, needs a whole number from {least}")
        self._open_relative_paths()
        self.builder()  # checks the sizes
        if self.stages is not None and self.sizes[0] != 0:
            raise ConfigError(f"sizes: found {self.sizes[0]} for train, stages have sizes of their own; needs 0")
        if self.step_batch_size_schedule is not None and self.global_batch_size is not None:
            raise ConfigError("step_batch_size_schedule: found global_batch_size, too; needs one of them")
        self._check_iterations()
        if unknown := self.same_data.keys() - {*self.paths, *self.config.written_paths.opened.values()}:
            raise ConfigError(f"same_data: found {min(unknown)}, needs prefixes of this run: {', '.join(self.paths)}")
        self.schedule  # noqa: B018 - checks the steps

    @classmethod
    @trims_traceback
    def load(cls, uri: str, storage_options: Mapping[str, Any] | None = None) -> Run:
        """Return the run of a file at any URI.

        Args:
            uri: path or URI of the file.
            storage_options: options of the stores of the file and of the run's data.

        Returns:
            The run, equal to the one that was saved.

        Raises:
            ConfigError: the URI names a dataset; the file is not a JSON object, lacks a field, has an invalid value, or
                an unknown field that may change the samples; or a file read over HTTP names data elsewhere, which the
                setting `parts_from` does not allow.
            ObjectNotFoundError: there is no such file.
        """
        file = Location.of(uri, storage_options)
        text = read_run_file(file)
        try:
            run = parse_run(text, storage_options)
        except ConfigError as error:
            raise ConfigError(f"{uri}: {error}") from error
        check_named([*run.paths, *filter(None, [run.previous])], file)
        inside = run.previous is not None and "://" not in run.previous and not os.path.isabs(run.previous)
        return replace(run, previous=f"{_folder(file)}{run.previous}") if inside else run

    @trims_traceback
    def save(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Write the file atomically.

        Args:
            uri: path or URI of the file.
            storage_options: options of its store.

        Raises:
            ConfigError: the tokenizer has no `unique_identifiers`.
            StorageError: the store refuses a request.
        """
        file = Location.of(uri, storage_options)
        with create_object(file) as out:
            previous = self.previous and Location.of(self.previous).absolute.removeprefix(_folder(file))
            out.write(format_run(replace(self, previous=previous)))

    def builder(
        self, *, pinned: bool = True, planned: bool = False, warns: bool = True
    ) -> BlendedMegatronDatasetBuilder:
        """Return the builder of the datasets, for one phase.

        Args:
            pinned, planned, warns: as for `build`.
        """
        planned = planned and self.stages is None
        options: Any = {"stages": self.stages, "pinned": pinned, "planned": planned, "warns": warns}
        config = replace(self.config, read_plan=planned and self.config.read_plan)
        return BlendedMegatronDatasetBuilder(GPTDataset, self.sizes, lambda: True, config, **options)

    def build(
        self,
        *,
        on_outcome: Callable[[Any], None] | None = None,
        pinned: bool = True,
        planned: bool = True,
        warns: bool = True,
    ) -> list[Any]:
        """Return the datasets of train, valid and test, as the builder returns them, of the first phase.

        Built once for each value of `pinned` and `planned`, with the other arguments of the first call.

        Args:
            on_outcome: called with the outcome of each index while they are built, by any thread.
            pinned: open the objects in the versions of the run's pinned file, if there is one.
            planned: serve a split by the read plan of `binidx prepare read-plan` in `path_to_cache`, if there is one:
                then it is a `PlannedDataset`, which reads no `.idx` and knows no documents.
            warns: as in `BuildContext`.

        Returns:
            Three datasets; None for a split without samples.

        Raises:
            ObjectNotFoundError, FormatError, StorageError: the data is absent, malformed or unreachable.
        """
        if self.phase_transition_iterations:
            return self._phase.build(on_outcome=on_outcome, pinned=pinned, planned=planned, warns=warns)
        built: dict[tuple[bool, bool], list[Any]] = vars(self).setdefault("_built", {})
        found = built.get((pinned, False)) or built.get((pinned, planned))
        if found is None:
            builder = self.builder(pinned=pinned, planned=planned, warns=warns)
            found = built[pinned, planned] = builder.build(on_outcome=on_outcome)
        return found

    def requests(self) -> SplitRequests:
        """Return what the run asks for of each split, before anything is opened; of a run in phases, of the first."""
        return self._phase.builder().requests()

    @property
    def schedule(self) -> BatchSchedule:
        """The sizes of the run's steps."""
        steps, skipped = self.step_batch_size_schedule, sorted({*self.iterations_to_skip})
        return BatchSchedule(
            self.global_batch_size or self.micro_batch_size * self.data_parallel_size,
            self.micro_batch_size,
            self.data_parallel_size,
            self.rampup_batch_size and (*self.rampup_batch_size,),
            self.decrease_batch_size_if_needed,
            self.consumed_samples,
            None if steps is None else parse_thresholds(steps, self.config.sequence_length),
            self.earlier_samples,
            self.first_step,
            tuple(number - 1 for number in skipped if number > self.first_step),
            self.stop_step,
        )

    @property
    def phases(self) -> list[Run]:
        """The run of each phase: the run itself, unless `phase_transition_iterations` divide it.

        The train split of a phase is a dataset of its own, read from its first sample: as many samples as lie between
        the two transitions, in iterations of `global_batch_size`; the last phase has the rest of `sizes[0]`.

        Source: Megatron-LM (main), `get_train_valid_test_num_samples` and `build_train_valid_test_data_loaders`.
        """
        if not self.phase_transition_iterations:
            return [self]
        parts = divide_phases(self.schedule, self.phase_transition_iterations, self.sizes[0] or 0)
        return [
            replace(
                self,
                sizes=[part.num_samples, *self.sizes[1:]],
                phase_transition_iterations=(),
                first_step=part.first_step,
                stop_step=part.stop_step,
                consumed_samples=part.position,
                earlier_samples=part.total - part.position,
            )
            for part in parts
        ]

    @cached_property
    def reading_order(self) -> GlobalOrder:
        """The global order of the train split's samples; step `first_step` is the first after `consumed_samples`."""
        if self.phase_transition_iterations:
            return self._phase.reading_order
        train = self.build()[0]
        if train is None:
            raise ConfigError("run: has no train split to take samples from")
        return self.order_samples(len(train))

    def order_samples(self, num_samples: int) -> GlobalOrder:
        """Return the global order of a train split with a number of samples."""
        return GlobalOrder(self.schedule, num_samples, self.dataloader_type, self.data_sharding)

    def _repr_html_(self) -> str:
        blend, schedule = self.config.blend or (self.config.blend_per_split or [None])[0], self.schedule
        sources = ", ".join(map(redacted, blend[0][:3])) + ", …" * (len(blend[0]) > 3) if blend else "of its stages"
        names = ("train samples", "samples a step", "tokens a sample", "ranks", "order", "sources")
        order = f"{self.dataloader_type}, seed {self.config.random_seed}"
        sizes = (self.sizes[0], schedule.global_batch_size, self.config.sequence_length, self.data_parallel_size)
        return format_html_table("Run", [*zip(names, (*sizes, order, sources), strict=True)])

    def samples_of_step(self, step: int, rank: int | None = None) -> list[int]:
        """Return the samples of the train split that a rank reads at a step.

        Args:
            step: `first_step`, by default 0, is the first step after `consumed_samples`.
            rank: a data parallel rank; None for all ranks, in their order.

        Returns:
            Sample numbers; empty after the end of the run.
        """
        return next(self.samples_of_steps(range(step, step + 1), rank), [])

    def samples_of_steps(self, steps: range, rank: int | None = None) -> Iterator[list[int]]:
        """Yield the samples of consecutive steps, up to the end of the run; a cyclic run has no end.

        Args:
            steps: steps; `first_step` is the first after the run's `consumed_samples`.
            rank: a data parallel rank; None for all ranks, in their order.

        Returns:
            Sample numbers, a list for each step.
        """
        count = self.reading_order.num_steps()
        for step in steps if count is None else range(steps.start, min(steps.stop, count)):
            yield self.reading_order.readings(range(step, step + 1), rank).sample.tolist()

    @property
    def paths(self) -> list[str]:
        """The path of the caches, if there is one, the objects that the order reads, and the prefixes of all blends."""
        config, order = self.config, self.config.order
        blends = [config.blend, *(config.blend_per_split or ()), *(stage.blend for stage in self.stages or ())]
        prefixes = [prefix for blend in blends if blend for prefix in blend[0]]
        return [*filter(None, [config.path_to_cache]), *(order.paths if order else ()), *prefixes]

    @cached_property
    def _phase(self) -> Run:
        return self.phases[0]

    def _check_iterations(self) -> None:
        """Raise ConfigError unless the numbers of iterations are possible."""
        for name in ("iterations_to_skip", "phase_transition_iterations"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, needs iterations, counted from 1")
        if self.first_step < 0 or (self.stop_step is not None and self.stop_step < self.first_step):
            raise ConfigError(f"first_step, stop_step: found {self.first_step}, {self.stop_step}, need them in order")
        if self.phase_transition_iterations and (self.stages is not None or self.sizes[0] is None):
            raise ConfigError("phase_transition_iterations: needs the number of train samples in sizes, and no stages")

    def _open_relative_paths(self) -> None:
        """Replace relative paths by those below `directory`, and keep them as `written_paths` of the config."""
        written = self.config.written_paths
        directory = written.directory or self.directory  # a config of another run has that run's directory
        relative = [path for path in self.paths if "://" not in path and not os.path.isabs(path)]
        if directory is not None and not os.path.isabs(directory):
            raise ConfigError(f"directory: found {directory!r}, needs an absolute path")
        if directory is not None and relative:
            config, stages = _rename_paths(self, {path: f"{directory}/{path}" for path in relative})
            opened = {**written.opened, **{f"{directory}/{path}": path for path in relative}}
            written = config.written_paths = replace(written, directory=directory, opened=opened)
            vars(self).update(config=config, stages=stages)
        vars(self)["directory"] = written.directory

    def __getstate__(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in fields(self)}  # and not what was built


def _folder(file: Location) -> str:
    """Return the URI of the folder of a file, with a slash at its end."""
    return file.absolute.removesuffix(file.absolute.rpartition("/")[2])


def format_run(run: Run) -> bytes:
    """Return the file of a run; `parse_run` is the inverse."""
    written, stages = _rename_paths(run, run.config.written_paths.opened)
    config = {option.name: getattr(written, option.name) for option in saved_fields(GPTDatasetConfig)}
    if (order := config.pop("order")) is not None:
        config["order"] = order.pinned(run.config.storage_options).to_json()
    tokenizer = vars(SavedTokenizer.of(run.config.tokenizer))
    config["tokenizer"] = {name: value for name, value in tokenizer.items() if value not in (None, {})}
    described = {option.name: getattr(run, option.name) for option in fields(run)}
    steps = {name: described.pop(name) for name in STEPS}
    if steps := {name: value for name, value in steps.items() if value != STEPS[name]}:
        config["steps"] = steps
    described |= {**described.pop("other_fields"), "config": config, "library": binidx.__version__}
    if stages is not None:
        described["stages"] = [asdict(stage) for stage in stages]
    for name in [name for name in ("directory", "previous", "same_data") if not described[name]]:
        del described[name]
    return RUN_FILE.encode(described, "\n", indent=1, default=_in_json)


def parse_run(text: bytes, storage_options: Mapping[str, Any] | None = None) -> Run:
    """Return the run of a file's text.

    Args:
        text: the bytes of the file.
        storage_options: options of the stores of the run's data.

    Raises:
        ConfigError: it is no JSON object, or a field is missing, invalid, or unknown and may change the samples.
    """
    values = ANY_RUN.parse(text, "")
    if describes_packed(values):
        raise ConfigError(
            "a run over packed files; trace, where, account and order take it, and binidx.packed.load_packed_run"
        )
    RUN_FILE.convert(values, "")
    config, steps = values["config"], values["config"].get("steps") or {}
    blends = {"blend": (blend := config.get("blend")) and tuple(blend)}
    if config.get("blend_per_split") is not None:
        blends["blend_per_split"] = [blend and tuple(blend) for blend in config["blend_per_split"]]
    tokenizer = SavedTokenizer(**config["tokenizer"]) if "tokenizer" in config else None
    known = {option.name for option in fields(GPTDatasetConfig)}
    config = {name: value for name, value in config.items() if name in known}
    built = GPTDatasetConfig(**{**config, "tokenizer": tokenizer, "storage_options": storage_options, **blends})
    stages = [Stage(**{**stage, "blend": tuple(stage["blend"])}) for stage in values.get("stages") or []]
    made = {"config": built, "stages": stages if values.get("stages") is not None else None}
    known = {option.name for option in fields(Run)} - {*STEPS, "other_fields"}
    others = {name: value for name, value in values.items() if name not in {*known, "library"}}
    return Run(
        **{"directory": None, **{name: values[name] for name in values.keys() & known}, **made, **steps},
        other_fields=others,
    )


def _rename_paths(run: Run, names: Mapping[str, str]) -> tuple[GPTDatasetConfig, Sequence[Stage] | None]:
    """Return the config and the stages of a run with other paths: `names` has the new path of each old one."""

    def rename(blend: Any) -> Any:
        return blend and ([names.get(prefix, prefix) for prefix in blend[0]], blend[1])

    config, stages, cache = run.config, run.stages, run.config.path_to_cache
    blends = config.blend_per_split and [rename(blend) for blend in config.blend_per_split]
    cache, order = cache and names.get(cache, cache), config.order and config.order.with_paths(names)
    config = replace(config, blend=rename(config.blend), blend_per_split=blends, path_to_cache=cache, order=order)
    return config, stages and [replace(stage, blend=rename(stage.blend)) for stage in stages]


def saved_fields(kind: type) -> list[Field[Any]]:
    """Return the fields that the file of a run has."""
    return [option for option in fields(kind) if option.init and option.metadata.get("saved", True)]


def _model_of_file(kind: type, left_out: Sequence[str] = (), **types: Any) -> type:
    """Return a dataclass of the saved fields of `kind`, without `left_out`, some with other `types`."""
    hints = {**get_type_hints(kind), **types}
    described = [
        (option.name, hints[option.name], field(default=option.default, default_factory=option.default_factory))
        for option in saved_fields(kind)
        if option.name not in left_out
    ]
    added = [(name, types[name] | None, None) for name in types.keys() - {option.name for option in fields(kind)}]
    return make_dataclass(kind.__name__, [*described, *added], kw_only=True)


STEPS = {
    option.name: option.default
    for option in fields(Run)
    if option.name
    in (
        *("step_batch_size_schedule", "iterations_to_skip", "phase_transition_iterations"),
        *("first_step", "stop_step", "earlier_samples"),
    )
}
"""Fields with their defaults that stand in `config.steps` of the file, and only if they are set: there an earlier
version refuses them, while it ignores an unknown field of the run."""


def tolerates_in_run(path: str, similar: str) -> bool:
    """Return whether a run with an unknown field reads the same samples without it.

    A run itself: unless the field is a misspelt option, since all options of a run change what its ranks read. Newer
    versions add fields here only as notes. In the config, where they add options that change the order, only the
    misspelt options that affect only places or the start. In a tokenizer, a stage or a blend never.
    """
    return not similar if path == "$" else path == "$.config" and similar in GPTDatasetConfig.harmless_options()


# Its values are checked as the file has them: a model's floats would write another file than the one that was read.
RUN_FILE = JsonFile[Any](
    _model_of_file(
        Run,
        [*STEPS, "other_fields"],
        config=_model_of_file(
            GPTDatasetConfig,
            tokenizer=SavedTokenizer,
            trust_cache=str | None,
            steps=_model_of_file(Run, [option.name for option in fields(Run) if option.name not in STEPS]),
        ),
        dataloader_type=str,
        library=str,
    ),
    error=ConfigError,
    tolerates=tolerates_in_run,
)


def _in_json(thing: Any) -> Any:
    """Convert NumPy's numbers to Python's, and nested tokenizers to their identity, as in the names of caches."""
    return thing.item() if hasattr(thing, "item") else SavedTokenizer.of(thing).unique_identifiers
