"""Simulated files of node locks: inodes, links, and the flocks of open descriptions, which forked children share.

    disk = LockDisk("boot")                        # of a node; numbers of removed inodes are used again
    descriptors = Descriptors(process, disk)       # carries out the effects of `node_lock` in a process
    child = descriptors.fork(other_process)        # until the hook of the fork has closed them

A kill closes the descriptors of its process. A description ends with its last descriptor, and its lock with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulation.processes import Process, Task

from binidx.storage.cache import node_lock


@dataclass(eq=False)
class Inode:
    """File: its number, content, whether it has a name, and the locks on it."""

    number: int
    content: bytes = b""
    is_linked: bool = True
    open: int = 0
    locks: dict[Description, bool] = field(default_factory=dict)


@dataclass(eq=False)
class Description:
    """Open file, with the number of descriptors of it in all processes."""

    inode: Inode
    num_descriptors: int = 1


class LockDisk:
    """Files of a node.

    Args:
        boot: boot ID of the machine, empty where there is none.
        has_locks: whether its file system has locks.
        can_open: whether files can be made at all.
    """

    def __init__(self, boot: str, *, has_locks: bool = True, can_open: bool = True) -> None:
        self.boot, self.has_locks, self.can_open = boot, has_locks, can_open
        self.files: dict[str, Inode] = {}
        self.numbers: set[int] = set()

    def open(self, path: str) -> Description:
        """Open a file, made if it is missing."""
        if path not in self.files:
            number = next(number for number in range(len(self.numbers) + 1) if number not in self.numbers)
            self.numbers.add(number)
            self.files[path] = Inode(number)
        self.files[path].open += 1
        return Description(self.files[path])

    def unlink(self, path: str) -> None:
        self.files.pop(path).is_linked = False

    def close(self, description: Description) -> None:
        description.num_descriptors -= 1
        if not description.num_descriptors:
            inode = description.inode
            inode.locks.pop(description, None)
            inode.open -= 1
            if not inode.open and not inode.is_linked:
                self.numbers.discard(inode.number)

    def lock(self, description: Description, is_shared: bool) -> bool | None:
        """Lock a file without waiting: an exclusive lock excludes all others."""
        if not self.has_locks:
            return None
        others = [shared for holder, shared in description.inode.locks.items() if holder is not description]
        if not all(is_shared and shared for shared in others):
            return False
        description.inode.locks[description] = is_shared
        return True


class Descriptors:
    """Open lock files of a process."""

    def __init__(self, process: Process, disk: LockDisk) -> None:
        self.process, self.disk = process, disk
        self.opened: dict[int, Description] = {}
        process.on_kill.append(self.close_all)
        process.performers |= {
            node_lock.OpenLockFile: self._open,
            node_lock.TryLock: self._try_lock,
            node_lock.NameLockFile: self._name,
            node_lock.ReadMessage: self._read,
            node_lock.LeaveMessage: self._leave_message,
            node_lock.CloseLockFile: self._close,
        }

    def fork(self, child: Process) -> Descriptors:
        """Return those of a forked child, which shares the descriptions."""
        descriptors = Descriptors(child, self.disk)
        descriptors.opened = dict(self.opened)
        for description in self.opened.values():
            description.num_descriptors += 1
        return descriptors

    def close_all(self) -> None:
        for description in self.opened.values():
            self.disk.close(description)
        self.opened.clear()

    def _open(self, effect: node_lock.OpenLockFile, task: Task) -> None:
        if not self.disk.can_open:
            return self.process.answer(task, None)
        descriptor = next(number for number in range(len(self.opened) + 1) if number not in self.opened)
        self.opened[descriptor] = self.disk.open(effect.path)
        return self.process.answer(task, descriptor)

    def _try_lock(self, effect: node_lock.TryLock, task: Task) -> None:
        self.process.answer(task, self.disk.lock(self.opened[effect.descriptor], effect.is_shared))

    def _name(self, effect: node_lock.NameLockFile, task: Task) -> None:
        inode = self.opened[effect.descriptor].inode
        name = f"{self.disk.boot}:{inode.number}" if self.disk.boot else ""
        self.process.answer(task, name if inode.is_linked else None)

    def _read(self, effect: node_lock.ReadMessage, task: Task) -> None:
        self.process.answer(task, self.opened[effect.descriptor].inode.content)

    def _leave_message(self, effect: node_lock.LeaveMessage, task: Task) -> None:
        """Write: a kill within the next moment cuts the message."""
        description, random = self.opened[effect.descriptor], self.process.world.random
        assert description.inode.locks.get(description) is False, "only the holder writes"
        description.inode.content = effect.data[: random.randint(0, len(effect.data))]

        def finish() -> None:
            if self.process.is_alive:
                description.inode.content = effect.data
                self.process.answer(task, None)

        self.process.world.later(1e-4 * random.random(), self.process.name, f"{task.name}: written", finish)

    def _close(self, effect: node_lock.CloseLockFile, task: Task) -> None:
        """Close: a kill may come between the removal and the end of the lock."""
        description, process = self.opened[effect.descriptor], self.process
        if effect.removed is not None:
            assert self.disk.files[effect.removed] is description.inode, "a process removes the file of another one"
            self.disk.unlink(effect.removed)

        def finish() -> None:
            if process.is_alive:
                self.disk.close(self.opened.pop(effect.descriptor))
                process.answer(task, None)

        process.world.later(1e-4 * process.world.random.random(), process.name, f"{task.name}: closed", finish)
