"""Every placement trains to the weights of plain PyTorch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from support import families
from support.placements import PLACEMENTS, build
from support.plain import PlainTrainer

from overspill.offload import AdamW

STEPS = 10
LEARNING_RATE = 3e-3


def assert_parity(family, placement, folder, *, dtype, microbatches, optimizer, tolerance=None, shuffle=None) -> None:
    plain = PlainTrainer(families.make(family), optimizer, dtype)
    job = build(family, placement, folder, dtype=dtype, microbatches=microbatches, optimizer=optimizer)
    with job:
        job.load()
        job.shuffle = shuffle
        skipped = 0
        for number in range(STEPS):
            batches = families.batches(microbatches, number)
            losses, norm = plain.step(batches, families.loss, LEARNING_RATE)
            result = job.step(batches, families.loss, LEARNING_RATE)
            assert result.skipped == plain.skipped
            skipped += result.skipped
            if tolerance is None:
                assert list(result.losses) == losses
                assert result.skipped or result.grad_norm == norm
            else:
                assert list(result.losses) == pytest.approx(losses, abs=tolerance)
        assert skipped == 0 or (dtype == torch.float16 and skipped < STEPS // 2)
        weights = dict(job.named_weights())
        assert weights.keys() == dict(plain.model.named_parameters()).keys()
        for name, parameter in plain.model.named_parameters():
            if tolerance is None:
                assert torch.equal(weights[name], parameter), name
                assert torch.equal(job.master_weight(name), plain.masters.get(name, parameter)), name
            else:
                torch.testing.assert_close(weights[name], parameter, rtol=0, atol=tolerance)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_llama_is_bit_identical_everywhere(placement, dtype, microbatches, tmp_path: Path) -> None:
    clip = AdamW(weight_decay=0.1, max_grad_norm=0.5)
    assert_parity("llama", placement, tmp_path, dtype=dtype, microbatches=microbatches, optimizer=clip)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_updates_under_backward_are_bit_identical(placement, dtype, tmp_path: Path) -> None:
    no_clip = AdamW(weight_decay=0.1, max_grad_norm=None)
    assert_parity("llama", placement, tmp_path, dtype=dtype, microbatches=2, optimizer=no_clip)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", families.BIT_IDENTICAL[1:])
def test_families_without_ties_are_bit_identical(family, placement, tmp_path: Path) -> None:
    assert_parity(family, placement, tmp_path, dtype=torch.float32, microbatches=2, optimizer=AdamW(weight_decay=0.1))


@pytest.mark.parametrize("placement", ["one layer", "disk"])
@pytest.mark.parametrize("family", families.BIT_IDENTICAL[1:])
def test_families_without_ties_are_bit_identical_without_clipping(family, placement, tmp_path: Path) -> None:
    no_clip = AdamW(weight_decay=0.1, max_grad_norm=None)
    assert_parity(family, placement, tmp_path, dtype=torch.float32, microbatches=2, optimizer=no_clip)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fp16_with_a_loss_scale_is_bit_identical(placement, tmp_path: Path) -> None:
    """The scale is a power of two: taking it out before or after the norm and the clip gives the same bits. The first
    steps overflow and are skipped, until the scale fits.
    """
    clip = AdamW(weight_decay=0.1, max_grad_norm=0.5)
    assert_parity("llama", placement, tmp_path, dtype=torch.float16, microbatches=2, optimizer=clip)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in families.BIT_IDENTICAL])
def test_ties_and_encoders_agree_to_a_millionth(family, placement, tmp_path: Path) -> None:
    """A tied weight gets the head's gradients of all microbatches first and the embedding's after, where plain
    PyTorch alternates (untied, the same families are bit-identical); an encoder's output gets its cotangents in
    another order. Sums in another order differ in the last bits. A small epsilon would blow them up where a gradient
    is zero but for rounding, so it is 1e-4 here.
    """
    optimizer = AdamW(weight_decay=0.1, epsilon=1e-4)
    assert_parity(family, placement, tmp_path, dtype=torch.float32, microbatches=2, optimizer=optimizer, tolerance=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clip", [0.5, None])
def test_shuffled_execution_is_bit_identical(seed, clip, tmp_path: Path) -> None:
    assert_parity(
        "llama", "three tiers", tmp_path, dtype=torch.bfloat16, microbatches=2,
        optimizer=AdamW(weight_decay=0.1, max_grad_norm=clip), shuffle=random.Random(seed),
    )  # fmt: skip
