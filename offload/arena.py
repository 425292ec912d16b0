"""One arena a tier: memory that is reserved once, and the view of a slot in it."""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ..swap_scheduler.plan import ALIGNMENT_BYTES, aligned
from .device import Device

REQUEST_BYTES = 8 << 20
REQUEST_THREADS = 4
SWAP_SUFFIX = ".overspill-swap"


class SwapError(OSError):
    """The swap file could not be made, read or written; the message names the file and the place in it."""


class MemoryArena:
    """A tier in memory, `size_bytes` of it."""

    def __init__(self, device: Device, size_bytes: int, *, fast: bool) -> None:
        self._device = device
        self.bytes = device.fast_arena(size_bytes) if fast else device.host_arena(size_bytes)
        self._start = self.bytes.storage_offset()

    def view(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """The slot's bytes (size_bytes,) on the tier's device.

        Not a slice: slices of one tensor share a version counter, and autograd would take every write to the arena
        for a change of whatever it saved from it.
        """
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.bytes.numel():
            raise IndexError(
                f"slot [{offset_bytes}, +{size_bytes}] lies outside an arena of {self.bytes.numel()} bytes"
            )
        empty = torch.empty(0, dtype=torch.uint8, device=self.bytes.device)
        return empty.set_(self.bytes.untyped_storage(), self._start + offset_bytes, (size_bytes,), (1,))

    def close(self) -> None:
        self._device.free_arena(self.bytes)
        self.bytes = torch.empty(0, dtype=torch.uint8)  # a slice would keep the memory


class DiskArena:
    """A tier in one preallocated file of a directory, read and written in large requests by a few threads.

    Direct I/O where the file system allows it, else through the page cache. The file belongs to one run (a lock and
    a record of pid and run id say which), has mode 0600 and goes when the arena closes. Files that a dead run
    left behind are removed when the next run opens the directory; files of other programs are never touched.
    """

    def __init__(self, directory: str, size_bytes: int) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.reclaimed_bytes = _reclaim(folder)
            self.path = folder / f"{self.run_id}{SWAP_SUFFIX}"
            self._lock = os.open(
                self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise SwapError(f"memory.disk.path {folder}: cannot make a swap file there: {error.strerror}") from error
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps({"pid": os.getpid(), "run": self.run_id}).encode())
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                self._file = os.open(self.path, flags | os.O_DIRECT, 0o600)
                self.direct = True
            except OSError:  # a file system without direct I/O (tmpfs): the page cache is the documented fallback
                self.path.unlink(missing_ok=True)
                self._file = os.open(self.path, flags, 0o600)
                self.direct = False
            if size_bytes:
                os.posix_fallocate(self._file, 0, size_bytes)
        except OSError as error:
            self._remove()
            raise SwapError(
                f"memory.disk.path {folder}: cannot reserve {size_bytes} bytes for the swap file: {error.strerror}"
            ) from error
        self._threads = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="overspill-disk")

    def read(self, offset_bytes: int, target: torch.Tensor) -> None:
        """Fill `target` (host bytes, from a slot: page-aligned, padded behind its end) from the file."""
        self._run(os.preadv, offset_bytes, target, "read")

    def write(self, offset_bytes: int, source: torch.Tensor) -> None:
        self._run(os.pwritev, offset_bytes, source, "write")

    def _run(
        self, call: Callable[[int, list[memoryview], int], int], offset_bytes: int, memory: torch.Tensor, verb: str
    ) -> None:
        buffer = memoryview(memory.numpy())  # type: ignore[arg-type]

        def request(start: int) -> None:
            part = buffer[start : start + REQUEST_BYTES]
            position = offset_bytes + start
            while part:
                try:
                    count = call(self._file, [part], position)
                except OSError as error:
                    raise SwapError(f"{self.path}: cannot {verb} at byte {position}: {error.strerror}") from error
                if count <= 0:
                    raise SwapError(f"{self.path}: {verb} stopped at byte {position}, {len(part)} bytes missing")
                part, position = part[count:], position + count

        starts = range(0, len(buffer), REQUEST_BYTES)
        if len(starts) == 1:
            request(0)
        else:
            for _ in self._threads.map(request, starts):
                pass

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)
        self._remove()

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(self._lock)


def _reclaim(folder: Path) -> int:
    """Remove swap files whose owner is gone (its lock is free); the bytes they held."""
    freed = 0
    for lock_path in folder.glob("*.lock"):
        swap = lock_path.with_suffix(SWAP_SUFFIX)
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # its owner just closed it
            continue
        try:
            record = os.read(lock, 4096)
            if b'"run": "' + lock_path.stem.encode() + b'"' not in record:
                continue  # not ours
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # alive
                continue
            if swap.exists():
                freed += swap.stat().st_size
                swap.unlink()
            lock_path.unlink(missing_ok=True)
        finally:
            os.close(lock)
    return freed


Arena = MemoryArena | DiskArena


def padded(arena: MemoryArena, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """The slot's bytes with the padding behind them, as direct I/O needs them."""
    assert offset_bytes % ALIGNMENT_BYTES == 0
    return arena.view(offset_bytes, aligned(size_bytes))
