"""Next-token cross-entropy, weighted by the trained tokens of the whole accumulation window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

IGNORED = -100


def trained_tokens(batch: Mapping[str, torch.Tensor]) -> int:
    """How many labels of `batch` count: the first of a row predicts nothing."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def causal_lm_loss(model: nn.Module, batch: Mapping[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
    """Sum of the token losses of `batch` (input_ids, attention_mask, labels: (B, T)), in fp32, divided by
    `num_tokens`. With the count of the whole window, microbatches of any length add up to the mean over its tokens.
    """
    output: Any = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    logits_NV = output.logits[:, :-1].float().flatten(0, 1)
    labels_N = batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum") / num_tokens
