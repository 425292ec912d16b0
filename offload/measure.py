"""Links and layers of this machine, in seconds: what the planner scores plans with. About two seconds in all."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from ..kernels.adamw import AdamWStep, Scratch, adamw
from ..swap_scheduler.plan import Machine
from ..swap_scheduler.workload import Costs, Link
from .arena import DiskArena
from .device import CpuDevice, Device, anonymous
from .layers import Structure
from .optimizer import PartLayout

_PROBE_BYTES = 64 << 20
_MATMUL_ROWS = 256
_REPEATS = 5
_ENOUGH_S = 0.5


def _median_s(call: Callable[[], object]) -> float:
    """Of `_REPEATS` calls, or of as many as `_ENOUGH_S` allows."""
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What this machine does in a second. Bytes for links, multiply-adds x 2 for matmul, parameters for updates."""

    links: dict[str, Link]
    matmul_flops_per_s: float
    update_numel_per_s: float

    def costs(self, structure: Structure, parts: dict[str, tuple[PartLayout, ...]], *, rows: int, length: int) -> Costs:
        """Seconds by layer for microbatches of (rows, length): matrix products at the measured rate, the backward
        twice the forward. Attention's own products are left out; they are small for length < hidden size.
        """
        tokens = rows * length
        forward = tuple(visit.flops_per_token * tokens / self.matmul_flops_per_s for visit in structure.visits)
        return Costs(
            links=self.links,
            forward_s=forward,
            backward_s=tuple(2 * seconds for seconds in forward),
            update_s=tuple(
                tuple(part.numel / self.update_numel_per_s for part in parts.get(group, ()))
                for group in structure.groups
            ),
        )


def measure(device: Device, machine: Machine, arena_of_disk: str | None, dtype: torch.dtype) -> Rates:
    """Time each link of `machine`, a matrix product in `dtype`, and a host update. The disk is timed on a file of
    its own in `arena_of_disk`, which is gone afterwards.
    """
    links: dict[str, Link] = {}
    for upper, lower in zip(machine.tiers, machine.tiers[1:], strict=False):
        if lower.name == "disk":
            assert arena_of_disk is not None
            links |= raw_disk_links(arena_of_disk)
            continue
        fast = device.fast_arena(2 * _PROBE_BYTES).fill_(1)
        host, back = (anonymous(_PROBE_BYTES).fill_(1) for _ in range(2))
        links[f"{upper.name}>{lower.name}"], links[f"{lower.name}>{upper.name}"] = _links(
            partial(device.copy, fast[:_PROBE_BYTES], host), partial(device.copy, back, fast[_PROBE_BYTES:])
        )
    return Rates(
        links=links,
        matmul_flops_per_s=matmul_flops_per_s(device, dtype),
        update_numel_per_s=_update_rate(machine, device, dtype),
    )


def raw_disk_links(directory: str) -> dict[str, Link]:
    """Direct I/O of the disk tier at its own request size, both directions at once."""
    host, back = (anonymous(_PROBE_BYTES).fill_(1) for _ in range(2))
    disk = DiskArena(directory, 2 * _PROBE_BYTES)
    try:
        disk.write(_PROBE_BYTES, host)
        down, up = _links(partial(disk.write, 0, host), partial(disk.read, _PROBE_BYTES, back))
    finally:
        disk.close()
    return {"ram>disk": down, "disk>ram": up}


def _links(down: Callable[[], object], up: Callable[[], object]) -> tuple[Link, Link]:
    """Both directions while the other one is busy too, as they are in a step: a disk shares its bandwidth."""
    down_s: list[float] = []
    up_s: list[float] = []
    over = threading.Event()

    def repeat(move: Callable[[], object], seconds: list[float]) -> None:
        try:
            while not over.is_set():
                start = time.perf_counter()
                move()
                seconds.append(time.perf_counter() - start)
                if min(len(down_s), len(up_s)) >= _REPEATS:
                    break
        finally:
            over.set()  # after an error too, or the other direction would never end

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(repeat, down, down_s), threads.submit(repeat, up, up_s)]:
            done.result()
    return _link(down_s), _link(up_s)


def _link(seconds: list[float]) -> Link:
    return Link(bandwidth_bytes_per_s=_PROBE_BYTES / statistics.median(seconds))


def matmul_flops_per_s(device: Device, dtype: torch.dtype) -> float:
    """The rate of a linear layer's three products, forward and backward: a processor without instructions for a
    dtype may multiply one layout at a fifth of the speed of the other.
    """
    size = 1024 if isinstance(device, CpuDevice) else 8192
    x = torch.ones(_MATMUL_ROWS, size, dtype=dtype, device=device.torch_device, requires_grad=True)
    w = torch.ones(size, size, dtype=dtype, device=device.torch_device, requires_grad=True)
    grad = torch.ones_like(x)

    def products() -> None:
        torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), grad)
        if mark := device.mark():
            mark.synchronize()

    products()
    return 3 * 2 * _MATMUL_ROWS * size * size / _median_s(products)


def _update_rate(machine: Machine, device: Device, dtype: torch.dtype) -> float:
    count = 1 << 20
    where = device.torch_device if machine.update_tier == machine.compute_tier else torch.device("cpu")
    weight = torch.ones(count, dtype=dtype, device=where)
    moments = torch.ones(2, count, device=where)
    kinds = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    master = torch.zeros(count, dtype=kinds[dtype], device=where) if dtype in kinds else None
    settings = AdamWStep(
        learning_rate=1e-4, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, step=1, gradient_scale=1.0
    )
    scratch = Scratch.on(where)

    def update() -> None:
        adamw(weight, weight, moments[0], moments[1], master, settings, scratch)
        if mark := device.mark():
            mark.synchronize()

    update()
    return count / _median_s(update)
