"""Split master: an fp32 number as a bf16 number that computes, plus a signed 16-bit remainder.

    bits(fp32) = (bits(bf16) << 16) + remainder,   -2^15 <= remainder < 2^15

so bf16 = fp32 rounded to nearest, ties away from zero, and the pair gives back every bit of the fp32 number.
Ties go away from zero because no 16-bit remainder can serve ties-to-even: there an even bf16 number would be
the rounding of 65,537 fp32 numbers. The two roundings differ for one fp32 number in 65,536.
NaNs whose payload is all ones in the high half round to a zero (the pair is still exact); torch never makes them.

Bytes per number: 4 read + 4 written each way, no third copy of the weight anywhere.
"""

from __future__ import annotations

import torch


def split_master(master: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write fp32 `master` (N,) into bf16 `weight` (N,) and int16 `remainder` (N,). `master` is used as scratch:
    its content is lost.
    """
    bits = master.view(torch.int32)
    remainder.copy_(bits)  # keeps the low 16 bits: exactly the signed remainder
    bits.add_(0x8000).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(bits)


def join_master(weight: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Write the fp32 numbers of bf16 `weight` (N,) and int16 `remainder` (N,) into `master` (N,)."""
    bits = master.view(torch.int32)
    bits.copy_(weight.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(remainder)


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """`master` in bf16 as `split_master` rounds it: to nearest, ties away from zero. Any shape, contiguous."""
    bits = master.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
