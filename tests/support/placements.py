"""Jobs in every placement: budgets that force where weights, gradients, states and activations live."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill.offload import AdamW, BudgetError, DiskMemory, Job, Memory, StateDictSource
from overspill.offload.measure import Rates
from overspill.swap_scheduler import Link

from . import families

MIB = 1 << 20
LARGE = 256 * MIB
ROWS, LENGTH = 2, 33

RATES = Rates(
    links={name: Link(bandwidth_bytes_per_s=1e9) for name in ("gpu>ram", "ram>gpu", "ram>disk", "disk>ram")},
    matmul_flops_per_s=1e10,
    update_numel_per_s=1e8,
)
"""Fixed, so that plans do not depend on the machine that runs the tests."""

PLACEMENTS = ("resident", "ram", "one layer", "three tiers", "disk")
"""All in the fast tier; weights and states in RAM behind a larger and behind the smallest possible fast tier; the
smallest fast tier and RAM before a disk; the smallest RAM alone before a disk."""


def build(
    family: str,
    placement: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    microbatches: int = 2,
    optimizer: AdamW | None = None,
    **options: Any,
) -> Job:
    """A job of `family`, seed 0, not loaded yet."""
    optimizer = optimizer or AdamW()
    memory = _budget(family, placement, str(folder), dtype, microbatches, optimizer)
    return _build(family, memory, dtype, microbatches, optimizer, **options)


def _build(family: str, memory: Memory, dtype: torch.dtype, microbatches: int, optimizer: AdamW, **options: Any) -> Job:
    model = options.pop("model", None) or families.make(family)
    source = StateDictSource({name: p.detach().clone() for name, p in model.named_parameters()})
    return Job.build(
        model, source, optimizer=optimizer, memory=memory, max_tokens=(ROWS, LENGTH), dtype=dtype,
        microbatches=microbatches, rates=RATES, part_numel=1 << 13, **options,
    )  # fmt: skip


def _budget(
    family: str, placement: str, folder: str, dtype: torch.dtype, microbatches: int, optimizer: AdamW
) -> Memory:
    disk = DiskMemory(path=folder, size_bytes=64 * MIB)
    if placement == "resident":
        return Memory(ram_bytes=LARGE)
    if placement == "ram":
        return Memory(gpu_bytes=_smallest(family, "gpu", dtype, microbatches, optimizer, LARGE) * 2, ram_bytes=LARGE)
    if placement == "disk":
        return Memory(ram_bytes=_smallest(family, "ram", dtype, microbatches, optimizer, None), disk=disk)
    gpu = _smallest(family, "gpu", dtype, microbatches, optimizer, LARGE)
    if placement == "one layer":
        return Memory(gpu_bytes=gpu, ram_bytes=LARGE)
    gpu += gpu // 4  # the smallest depends a little on the other tier
    return Memory(gpu_bytes=gpu, ram_bytes=_smallest(family, "ram", dtype, microbatches, optimizer, gpu), disk=disk)


@cache
def _smallest(
    family: str, tier: str, dtype: torch.dtype, microbatches: int, optimizer: AdamW, other: int | None
) -> int:
    """The smallest budget of `tier` that the planner says it needs, given the other one."""
    disk = DiskMemory(path="/nowhere", size_bytes=64 * MIB)
    if tier == "gpu":
        memory = Memory(gpu_bytes=4096, ram_bytes=other or LARGE)
    else:
        memory = Memory(gpu_bytes=other, ram_bytes=4096, disk=disk)
    with pytest.raises(BudgetError) as refusal:
        _build(family, memory, dtype, microbatches, optimizer)
    assert refusal.value.tier == tier
    return refusal.value.need_bytes
