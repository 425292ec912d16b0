from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from overspill.trainer.data import Row, collate
from overspill.trainer.loss import IGNORED, causal_lm_loss, trained_tokens


class Bigram(nn.Module):
    """The logits of a token depend on that token alone, so padding cannot reach other positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        assert input_ids.shape == attention_mask.shape
        return SimpleNamespace(logits=self.table(input_ids))


def row(length: int, *, trained: int | None = None) -> Row:
    ids = tuple((7 * length + 3 * position) % 32 for position in range(length))
    kept = length if trained is None else trained
    return Row(ids, (*[IGNORED] * (length - kept), *ids[length - kept :]))


def gradient(microbatches: list[list[Row]]) -> torch.Tensor:
    torch.manual_seed(0)
    model = Bigram()
    batches = [collate(rows, 0) for rows in microbatches]
    tokens = sum(map(trained_tokens, batches))
    for batch in batches:
        causal_lm_loss(model, batch, tokens).backward()
    assert model.table.weight.grad is not None
    return model.table.weight.grad


def test_every_token_of_the_window_weighs_the_same() -> None:
    short, long, one = row(11), row(101), row(9, trained=1)
    whole = gradient([[short, long, one]])
    for split in ([[short], [long], [one]], [[short, long], [one]], [[one, short], [long]]):
        torch.testing.assert_close(gradient(split), whole, rtol=0, atol=1e-6)


def test_a_microbatch_without_a_trained_token_adds_exactly_nothing() -> None:
    masked = row(9, trained=0)
    assert trained_tokens(collate([masked], 0)) == 0
    assert torch.equal(gradient([[row(11)], [masked]]), gradient([[row(11)]]))


def test_the_loss_is_torch_cross_entropy_of_the_next_token() -> None:
    model, batch = Bigram(), collate([row(6)], 0)
    ids = batch["input_ids"][0]
    expected = nn.functional.cross_entropy(model.table(ids[:-1]), ids[1:])
    assert causal_lm_loss(model, batch, 5).item() == pytest.approx(expected.item(), rel=1e-6)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    model, batch = Bigram().to(torch.bfloat16), collate([row(6)], 0)
    assert causal_lm_loss(model, batch, 5).dtype == torch.float32
