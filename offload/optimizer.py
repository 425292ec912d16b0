"""AdamW's settings, and where the states of each parameter lie in the optimizer blocks.

A part is a run of a group's parameters, at most `PART_NUMEL` numbers, that is fetched, updated and written back as
one block:   exp_avg (N,) fp32 | exp_avg_sq (N,) fp32 | master (N,): int16 remainders for bf16 weights, fp32 for
fp16 weights, nothing for fp32 weights, which are their own master.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layers import GroupSpec, ParameterSpec

PART_NUMEL = 1 << 22
_CUT_NUMEL = 64
"""Parts are cut where a vector register ends, so that the cut never shows in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Decoupled weight decay. 1-D parameters and embeddings are not decayed unless asked. `max_grad_norm` clips by
    the exact global norm; None does not clip and lets updates run under the backward pass.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    decay_1d: bool = False
    decay_embeddings: bool = False


def master_bytes(dtype: torch.dtype) -> int:
    """Bytes a number beside the weight itself that hold the fp32 master."""
    return {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`numel` numbers of `parameter`, from `start` in the group's weight block, at `offset` in the part."""

    parameter: ParameterSpec
    start: int
    numel: int
    offset: int

    @property
    def is_first(self) -> bool:
        return self.start == self.parameter.offset_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLayout:
    segments: tuple[Segment, ...]
    numel: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return self.numel * (8 + master_bytes(self.dtype))

    def fields(self, part: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(exp_avg, exp_avg_sq, master) of the segment, views of the part's bytes."""
        n, run = self.numel, slice(segment.offset, segment.offset + segment.numel)
        exp_avg = part[: 4 * n].view(torch.float32)[run]
        exp_avg_sq = part[4 * n : 8 * n].view(torch.float32)[run]
        if self.dtype == torch.float32:
            return exp_avg, exp_avg_sq, None
        kind = torch.int16 if self.dtype == torch.bfloat16 else torch.float32
        return exp_avg, exp_avg_sq, part[8 * n : self.size_bytes].view(kind)[run]


def cut_into_parts(group: GroupSpec, dtype: torch.dtype, part_numel: int = PART_NUMEL) -> tuple[PartLayout, ...]:
    """The parts of a trainable group, parameters in order; empty parameters have no segment."""
    parts: list[PartLayout] = []
    segments: list[Segment] = []
    filled = 0
    for parameter in group.parameters:
        done = 0
        while done < parameter.numel:
            count = min(parameter.numel - done, part_numel - filled)
            segments.append(
                Segment(parameter=parameter, start=parameter.offset_numel + done, numel=count, offset=filled)
            )
            done += count
            filled += -(-count // _CUT_NUMEL) * _CUT_NUMEL
            if filled >= part_numel:
                parts.append(PartLayout(segments=tuple(segments), numel=filled, dtype=dtype))
                segments, filled = [], 0
    if segments:
        parts.append(PartLayout(segments=tuple(segments), numel=filled, dtype=dtype))
    return tuple(parts)
