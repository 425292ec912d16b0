"""The one place that knows what kind of device computes: memory, copies, and how to wait for a computation.

Both devices run the same plan through the same executor. On CUDA a transfer lane is a worker thread that
copies on a stream of its own and waits for it; a computation is finished when the event recorded after it is.
So a dependency is always "wait for that step", on the host, and never rests on the allocator's reference counts:
arenas are static, and the caching allocator is only touched by the compute stream.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from typing import Protocol

import torch

_HUGE_PAGE_BYTES = 2 << 20


class Done(Protocol):
    """The end of a computation that may still be running on the device."""

    def synchronize(self) -> None: ...


def anonymous(size_bytes: int) -> torch.Tensor:
    """Private page-aligned host memory (bytes,); pages cost nothing until they are written."""
    pages = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size_bytes]


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_RETURNED_BYTES = 4 << 20


def return_freed_memory() -> None:
    """Give what glibc's heap holds of freed tensors back to the system. Between two layers this keeps a heap that
    fragments from growing beside the budgets (measured: 0.4 to 0.7 GB in a 1.1B run; LOG.md, 2026-12-01). Milliseconds.
    Other C libraries have nothing to trim.
    """
    if _LIBC is not None:
        _LIBC.malloc_trim(0)


def hold_little_freed_memory() -> None:
    """Let glibc map large tensors one by one, so that freeing returns them at once."""
    if _LIBC is not None:
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _RETURNED_BYTES)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, _RETURNED_BYTES)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


_LIBC = _glibc()


def zeros_on(device: torch.device, size_bytes: int) -> torch.Tensor:
    """Zeros (size_bytes,) to read from."""
    return anonymous(size_bytes) if device.type == "cpu" else torch.zeros(size_bytes, dtype=torch.uint8, device=device)


class CpuDevice:
    """RAM computes. Every tier in memory is an anonymous mapping."""

    torch_device = torch.device("cpu")
    shares_processor_with_updates = True

    @property
    def generator(self) -> torch.Generator:
        """The default generator of the device. torch.manual_seed would also queue a call for every CUDA device."""
        return torch.default_generator

    def fast_arena(self, size_bytes: int) -> torch.Tensor:
        return anonymous(size_bytes)

    def host_arena(self, size_bytes: int) -> torch.Tensor:
        return anonymous(size_bytes)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy bytes between arenas, done on return. memmove drops the interpreter lock and wakes no thread pool."""
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())

    def mark(self) -> Done | None:
        """The end of what was just computed; None when that is already past."""
        return None

    def free_arena(self, arena: torch.Tensor) -> None:
        """Nothing to undo: the mapping goes with its last view."""


class CudaDevice:
    """A CUDA device computes; host arenas are page-locked where the system allows it."""

    shares_processor_with_updates = False

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("device: cuda, but torch sees no CUDA device here; use device: cpu")
        self.torch_device = torch.device("cuda", index)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._locked: dict[int, int] = {}

    @property
    def generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self.torch_device.index]

    def fast_arena(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.torch_device)

    def host_arena(self, size_bytes: int) -> torch.Tensor:
        """Exact-size page-locked memory by registering a mapping; torch's own pinned allocator rounds up to powers
        of two. Where locking is refused the arena stays pageable, and one warning says so.
        """
        arena = anonymous(size_bytes)
        if size_bytes:
            error = torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size_bytes, 0)
            if int(error) == 0:
                self._locked[arena.data_ptr()] = size_bytes
            else:
                warnings.warn(
                    f"could not page-lock {size_bytes} bytes of RAM (CUDA error {int(error)}); transfers will be "
                    "slower. Raise the memlock limit (ulimit -l) or lower memory.ram",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return arena

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy on the calling thread's own stream and wait for it."""
        stream = self._streams.setdefault(threading.get_ident(), torch.cuda.Stream(self.torch_device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def mark(self) -> Done | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def free_arena(self, arena: torch.Tensor) -> None:
        if arena.device.type == "cpu" and arena.data_ptr() in self._locked:
            del self._locked[arena.data_ptr()]
            torch.cuda.cudart().cudaHostUnregister(arena.data_ptr())


Device = CpuDevice | CudaDevice


def open_device(name: str) -> Device:
    """ "cpu", "cuda" or "cuda:1"; RuntimeError when it is not there."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        return CudaDevice(int(index or 0))
    raise RuntimeError(f"unknown device {name!r}: use cpu, cuda or cuda:N")
