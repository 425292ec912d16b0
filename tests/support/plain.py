"""Plain PyTorch training with fp32 masters: what every placement must reproduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from overspill.kernels.split_master import round_to_bf16
from overspill.offload import AdamW

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class PlainTrainer:
    """Everything resident: backward per microbatch, torch's own clipping and fused AdamW on fp32 masters.

    bf16 weights are the masters rounded to nearest with ties away from zero, as the split master rounds them. Buffers
    keep their dtype: casting rotary frequencies would change the model. fp16 losses are scaled, and the scale is taken
    out of the fp32 gradients again; a step whose gradient overflows is `skipped` and halves the scale.
    """

    def __init__(self, model: nn.Module, optimizer: AdamW, dtype: torch.dtype) -> None:
        self.model = model
        self.settings = optimizer
        self.loss_scale = 2.0**16 if dtype == torch.float16 else 1.0
        self.skipped = False
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self.masters: dict[str, torch.Tensor] = {}
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, parameter in self.parameters.items():
            master = parameter if dtype == torch.float32 else parameter.detach().clone()
            parameter.data = _rounded(parameter.data, dtype)
            self.masters[name] = master
            decay = (optimizer.decay_1d or parameter.ndim > 1) and (
                optimizer.decay_embeddings or id(parameter) not in embeddings
            )
            groups[decay].append(master)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": optimizer.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            fused=True,
        )

    def step(
        self, batches: Sequence[Any], loss_fn: LossFunction, learning_rate: float
    ) -> tuple[list[float], float | None]:
        losses = []
        for batch in batches:
            loss = loss_fn(self.model, batch)
            (loss * self.loss_scale).backward()
            losses.append(loss.item())
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float() / self.loss_scale
        norm = None
        if self.settings.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(list(self.masters.values()), self.settings.max_grad_norm).item()
        self.skipped = norm is not None and not math.isfinite(norm)
        if self.skipped:
            self.loss_scale /= 2
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter:
                with torch.no_grad():
                    parameter.copy_(_rounded(master, parameter.dtype))
            master.grad = parameter.grad = None
        return losses, norm


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_to_bf16(tensor) if dtype == torch.bfloat16 else tensor.to(dtype)
