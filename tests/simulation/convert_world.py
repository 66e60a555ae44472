"""Worlds of converts to one target: calls that replace each other, are killed, and are given again.

A call copies as `convert_dataset` does without workers, in pieces: it claims the target, writes pieces and records,
joins them as `.bin`, publishes `.idx`, and cleans up; before each of these it checks that it is still the owner. It
removes an `.idx` only to replace another dataset. Claim, check and removal are the shells of `convert_owner`; the rest
is of this module, and sends the same requests for the files of the work: `simulation.real.convert` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulation.job_world import Folder, SimulatedPart
from simulation.processes import Node, Objects, Process, Task
from simulation.world import World

from binidx import errors
from binidx.corpus.copies.convert_owner import ConvertOwner, DiscardParts
from binidx.storage.effects import AtOnce, DeleteObject, ReadObject, Steps, WriteObject
from binidx.storage.location import Location

TARGET = Location("s3://bucket/en")
FAULTS_SECONDS, END_SECONDS = 100.0, 200.0


@dataclass(frozen=True)
class Source:
    """Dataset that is copied; `overwrite`: it replaces another one."""

    name: str
    num_parts: int
    overwrite: bool = False

    @property
    def parts(self) -> list[SimulatedPart]:
        return [SimulatedPart(f"{self.name}-{n}", f"{self.name} {n};".encode(), 1.0) for n in range(self.num_parts)]

    @property
    def index_part(self) -> SimulatedPart:
        """Return the part of the `.idx`, a slice of an upload: it has a record, and no object of its own."""
        return SimulatedPart(f"{self.name}-idx", b"", 1.0)

    @property
    def all_parts(self) -> list[SimulatedPart]:
        return [*self.parts, self.index_part]

    @property
    def folder(self) -> Folder:
        return Folder(TARGET + "-parts", {"job": "convert", "source": self.name, "form": "slices"})

    @property
    def tokens(self) -> bytes:
        return b"".join(part.content for part in self.parts)

    @property
    def index(self) -> bytes:
        return f"index of {self.name}".encode()

    def is_complete(self) -> Steps[bool]:
        """Return whether the target is this dataset."""
        found = yield from AtOnce([ReadObject(TARGET + suffix) for suffix in (".bin", ".idx")])
        return found == [self.tokens, self.index]

    def check_free(self, resumed: bool) -> Steps[None]:
        """Raise ObjectExistsError if a dataset stands at the target."""
        tokens, index = yield from AtOnce([ReadObject(TARGET + suffix) for suffix in (".bin", ".idx")])
        if self.overwrite:
            return
        if index is not None or (tokens is not None and not resumed):
            raise errors.ObjectExistsError(f"{TARGET}: taken")

    def convert(self) -> Steps[str]:
        """Copy the dataset, as far as it is not there."""
        owner, folder, parts = ConvertOwner(TARGET), self.folder, self.parts
        objects = [folder.object(part) for part in parts]
        yield from folder.is_claimed_steps()  # which decides the form of the parts
        if (yield from self.is_complete()):
            yield from owner.clean_up_steps(folder, self.all_parts, objects)
            return "complete"
        yield from owner.claim_steps(folder, by_workers=False, check_free=self.check_free, say=len)
        try:
            known = yield from folder.read_all_steps(parts)
            for part in parts:
                if part.name not in known:
                    yield from WriteObject(folder.object(part), part.content)
                    yield from ReadObject(folder.object(part))  # its identity, for the record
                    yield from owner.check_steps()
                    yield from folder.write_steps(part, {})
            pieces = yield from AtOnce([ReadObject(piece) for piece in objects])
            lost = [part for part, piece in zip(parts, pieces, strict=True) if piece is None]
            yield from AtOnce([DeleteObject(folder.file(part)) for part in lost])  # of a call that was late
            if lost:
                raise errors.ObjectNotFoundError(f"{TARGET}: a piece is gone")
            yield from owner.check_steps()
            if self.overwrite:
                yield from DeleteObject(TARGET + ".idx")
            elif (yield from ReadObject(TARGET + ".idx")) is not None:
                raise errors.ObjectExistsError(f"{TARGET}: taken")
            yield from WriteObject(TARGET + ".bin", b"".join(filter(None, pieces)))
            yield from owner.save_steps("idx", "upload")
            if (yield from folder.read_steps(self.index_part)) is None:
                yield from owner.check_steps()
                yield from folder.write_steps(self.index_part, {})
            yield from owner.check_steps()
            yield from owner.save_steps("idx", "upload", published=True)
            yield from WriteObject(TARGET + ".idx", self.index)
        except errors.BinidxError:  # of pieces that a later owner has removed
            yield from owner.check_steps()
            raise
        yield from owner.clean_up_steps(folder, self.all_parts, objects)
        return "copied"


class ConvertWorld(World):
    """World of one seed: calls of one dataset, or at first those of another one that is given up."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        self.objects = Objects(self, lost_share=draw.choice([0.0, 0.02, 0.1]), slow_share=draw.choice([0.0, 0.05]))
        self.outcomes, self.processes = list[str | BaseException](), list[Process]()
        first, other = Source("a", draw.randrange(1, 5)), Source("b", draw.randrange(1, 5), overwrite=True)
        self.last = draw.choice([first, other])
        if first is not self.last:
            for _ in range(draw.randrange(1, 4)):
                self.later(draw.uniform(0, 20), "user", "convert a", self.begin, first, 30.0)
        for _ in range(draw.randrange(1, 4)):
            self.later(draw.uniform(32, 40), "user", "convert", self.begin, self.last, FAULTS_SECONDS)

    def begin(self, source: Source, end: float) -> None:
        """Begin a call, which may be killed; until `end` it is given again."""
        process = Process(self, Node(f"node {len(self.processes)}"), self.objects)
        process.performers[DiscardParts] = lambda effect, task: process.answer(task, None)
        self.processes.append(process)
        task = process.start(source.convert(), f"convert {source.name}")
        task.ended.waiting.append(lambda: self.ended(task))
        if self.now < FAULTS_SECONDS and self.random.random() < 0.7:
            seconds = self.random.uniform(0, self.random.choice([0.5, 3.0]))
            self.later(seconds, process.name, "kill", self.kill, process, source, end)
        self.later(max(0.0, end - self.now), process.name, "given up", process.kill)

    def kill(self, process: Process, source: Source, end: float) -> None:
        """Kill a call, unless it has ended; give it again."""
        if process.tasks:
            process.kill()
            if self.now < end - 10:
                self.later(self.random.uniform(0.01, 2.0), process.name, "again", self.begin, source, end)

    def ended(self, task: Task) -> None:
        """Note the outcome of a call, of which each is allowed but an unknown error."""
        assert task.error is None or isinstance(task.error, errors.StorageError | errors.ObjectExistsError), task.error
        self.outcomes.append(task.error or task.result)

    def play(self) -> None:
        """Let the calls end or be killed; then give the last command once more without faults, and again."""
        self.run(FAULTS_SECONDS)
        self.objects.lost_share = self.objects.slow_share = 0.0
        for _ in range(3):
            self.outcomes.clear()
            self.begin(self.last, END_SECONDS)
            self.run(self.now + 20.0)
        assert self.outcomes == ["complete"], self.outcomes
        # A late write of a call for another dataset, whose parts have other names, stays.
        prefix = f"{TARGET}-parts/{'a' if self.last.name == 'b' else '-'}"
        names = {uri: data for uri, data in self.objects.data.items() if not uri.startswith(prefix)}
        assert names == {f"{TARGET}.bin": self.last.tokens, f"{TARGET}.idx": self.last.index}


def play(seed: int) -> ConvertWorld:
    """Play the world of a seed, and check it."""
    world = ConvertWorld(seed)
    try:
        world.play()
    finally:
        for process in world.processes:
            process.kill()
    return world
