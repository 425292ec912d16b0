"""One arena a tier: memory that is reserved once, and the view of a slot in it."""

from __future__ import annotations

import errno
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

    Direct I/O where the file system allows it, else through the page cache. The file loses its name once it is open:
    no other run can take it for its own, and its space goes back to the system when the process ends, however it ends.
    """

    def __init__(self, directory: str, size_bytes: int) -> None:
        folder = Path(directory)
        self.path = folder / f"overspill-{os.getpid()}-{uuid.uuid4().hex[:12]}.swap"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._file = os.open(self.path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A file system without direct I/O (tmpfs): the page cache is the documented fallback.
                self.path.unlink(missing_ok=True)
                self._file = os.open(self.path, flags, 0o600)
            self.path.unlink()
        except OSError as error:
            raise SwapError(f"memory.disk.path {folder}: cannot make a swap file there: {error.strerror}") from error
        try:
            if size_bytes:
                os.posix_fallocate(self._file, 0, size_bytes)
        except OSError as error:
            os.close(self._file)
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


Arena = MemoryArena | DiskArena


def padded(arena: MemoryArena, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """The slot's bytes with the padding behind them, as direct I/O needs them."""
    assert offset_bytes % ALIGNMENT_BYTES == 0
    return arena.view(offset_bytes, aligned(size_bytes))
