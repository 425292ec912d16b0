"""Learning rates by step, as transformers' schedulers give them."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["linear", "cosine", "constant"]


def learning_rate(step: int, *, kind: Kind, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0: linear warmup from 0 to `peak`, then constant, linear or
    half-cosine decay to 0 at `total_steps`. The order of the operations is transformers', so the bits are too.
    """
    if step < warmup_steps:
        return peak * (step / max(1, warmup_steps))
    if kind == "constant":
        return peak
    decay_steps = max(1, total_steps - warmup_steps)
    if kind == "linear":
        return peak * max(0.0, (total_steps - step) / decay_steps)
    progress = (step - warmup_steps) / decay_steps
    return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
