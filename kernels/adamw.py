"""One pass of AdamW over a run of parameters: join the master, scale the gradient, Adam, decay, split, cast.

    g <- gradient * gradient_scale
    p <- p - learning_rate * weight_decay * p
    m <- beta1 m + (1 - beta1) g
    v <- beta2 v + (1 - beta2) g^2
    p <- p - learning_rate / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + epsilon)

Decoupled weight decay, Loshchilov & Hutter 2019 (arXiv:1711.05101); the arithmetic is torch's fused AdamW, in fp32.
Bytes per parameter, bf16: 2+2+8+2 read, 2+2+8 written. The run is cut into chunks that stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .split_master import join_master, split_master

CHUNK_NUMEL = 1 << 18
"""Numbers a chunk. A multiple of 64, so that a chunk ends where a vector register does and the result does not
depend on the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWStep:
    """The numbers of one update. `step` counts from 1."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    step: int
    gradient_scale: float


@dataclass(frozen=True, slots=True)
class Scratch:
    """Room for one chunk on the device that updates: fp32 master and fp32 gradient."""

    master: torch.Tensor
    gradient: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Scratch:
        return cls(torch.empty(CHUNK_NUMEL, device=device), torch.empty(CHUNK_NUMEL, device=device))


@torch.no_grad()
def adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    settings: AdamWStep,
    scratch: Scratch,
) -> None:
    """Update `weight` (N,) in place. `master` is None for fp32 weights, int16 remainders (N,) for bf16 ones (split
    master), fp32 (N,) for fp16 ones. Moments are fp32 (N,); `gradient` (N,) has the weight's dtype.
    """
    step = torch.tensor(float(settings.step), device=weight.device)
    for start in range(0, weight.numel(), CHUNK_NUMEL):
        end = min(start + CHUNK_NUMEL, weight.numel())
        w = weight[start:end]
        g = scratch.gradient[: end - start]
        g.copy_(gradient[start:end]).mul_(settings.gradient_scale)
        if master is None:
            p = w
        elif master.dtype == torch.int16:
            p = scratch.master[: end - start]
            join_master(w, master[start:end], p)
        else:
            p = master[start:end]
        torch._fused_adamw_(
            [p], [g], [exp_avg[start:end]], [exp_avg_sq[start:end]], [], [step],
            lr=settings.learning_rate, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay,
            eps=settings.epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip
        if master is not None and master.dtype == torch.int16:
            split_master(p, w, master[start:end])
        elif master is not None:
            w.copy_(p)
