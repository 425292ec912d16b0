from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from overspill.trainer.schedule import learning_rate


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup, total", [(0, 12), (3, 12), (1, 1), (12, 12)])
def test_the_rates_are_transformers_rates(kind, warmup: int, total: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-4)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    for step in range(total):
        ours = learning_rate(step, kind=kind, peak=2e-4, warmup_steps=warmup, total_steps=total)
        assert ours == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
