from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.kernels.adamw import CHUNK_NUMEL, AdamWStep, Scratch, adamw
from overspill.kernels.split_master import join_master, round_to_bf16, split_master

SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF,
    0x3F808001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFF8000,
]  # fmt: skip


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >= 1 << 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def round_trip(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.full(master.shape, float("nan"), dtype=torch.bfloat16)
    remainder = torch.full(master.shape, -1, dtype=torch.int16)
    split_master(master.clone(), weight, remainder)
    joined = torch.full_like(master, float("nan"))
    join_master(weight, remainder, joined)
    return weight, joined


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_any_bits_come_back(bits: list[int]) -> None:
    master = from_bits(bits + SPECIAL)
    _, joined = round_trip(master)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_the_half_that_computes_is_the_nearest_bf16(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, _ = round_trip(master)
    assert torch.equal(weight, round_to_bf16(master))
    even = master.to(torch.bfloat16)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~tie], even[~tie])
    assert (weight[tie].abs() >= even[tie].abs()).all()


@pytest.mark.parametrize("numel", [1, 63, 1000, 4097, CHUNK_NUMEL + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_is_torch_adamw_on_the_master(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    start = torch.randn(numel, generator=generator)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, weight_decay=0.1, fused=True)
    weight, moments = torch.empty(numel, dtype=dtype), torch.zeros(2, numel)
    master = None
    if dtype == torch.bfloat16:
        master = torch.empty(numel, dtype=torch.int16)
        split_master(start.clone(), weight, master)
    elif dtype == torch.float16:
        master = start.clone()
        weight.copy_(start)
    else:
        weight.copy_(start)
    scratch = Scratch.on(torch.device("cpu"))
    for step in range(1, 4):
        gradient = torch.randn(numel, generator=generator).to(dtype)
        reference.grad = gradient.float() * 0.25
        optimizer.step()
        settings = AdamWStep(
            learning_rate=1e-2, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, step=step, gradient_scale=0.25
        )
        adamw(weight, gradient, moments[0], moments[1], master, settings, scratch)
    expected = reference.detach()
    if dtype == torch.bfloat16:
        joined = torch.empty(numel)
        assert master is not None
        join_master(weight, master, joined)
        assert torch.equal(joined, expected)
        assert torch.equal(weight, round_to_bf16(expected))
    else:
        assert torch.equal(weight, expected.to(dtype))
        assert master is None or torch.equal(master, expected)
