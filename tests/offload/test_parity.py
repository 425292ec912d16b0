"""Every placement trains to the weights of plain PyTorch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import families
from support.plain import PlainTrainer

from overspill.offload import AdamW, DiskMemory, Engine, Memory, StateDictSource
from overspill.offload.measure import Rates
from overspill.swap_scheduler import Link, parse_op

MIB = 1 << 20
RATES = Rates(
    links={name: Link(bandwidth_bytes_per_s=1e9) for name in ("gpu>ram", "ram>gpu", "ram>disk", "disk>ram")},
    matmul_flops_per_s=1e10,
    update_numel_per_s=1e8,
)
STEPS = 10


def memory(placement: str, folder, need: dict[str, int]) -> Memory:
    """Budgets that force the placement: room for all, one layer of room on the fast tier, RAM alone, disk alone."""
    disk = DiskMemory(path=str(folder), size_bytes=64 * MIB)
    if placement == "resident":
        return Memory(ram_bytes=256 * MIB)
    if placement == "one layer":
        return Memory(gpu_bytes=need["gpu"], ram_bytes=256 * MIB)
    if placement == "three tiers":
        return Memory(gpu_bytes=need["gpu"], ram_bytes=need["ram"], disk=disk)
    return Memory(ram_bytes=need["ram"], disk=disk)


PLACEMENTS = ("resident", "one layer", "three tiers", "disk")


def smallest(build, which: str, others: Memory) -> int:
    """The smallest budget of one tier, to 64 KiB, that the planner accepts with the others given."""
    from overspill.offload import BudgetError

    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        try:
            build(dataclasses.replace(others, **{which: middle << 16})).close()
            high = middle
        except BudgetError:
            low = middle
    return high << 16


def test_debug(tmp_path):
    m = families.make("llama")
    src = StateDictSource({k: v.clone() for k, v in m.state_dict().items()})
    opt = AdamW(weight_decay=0.1, max_grad_norm=1.0)
    plain = PlainTrainer(families.make("llama"), opt, torch.float32)
    with Engine.build(
        m,
        src,
        optimizer=opt,
        memory=Memory(ram_bytes=256 * MIB),
        max_tokens=(2, 33),
        dtype=torch.float32,
        microbatches=2,
        rates=RATES,
    ) as e:
        e.load()
        for i in range(3):
            b = families.batches(2, i)
            print(plain.step(b, families.loss, 1e-3), e.step(b, families.loss, 1e-3))
        w = dict(e.named_weights())
        for n, p in plain.parameters.items():
            assert torch.equal(w[n], p), n
