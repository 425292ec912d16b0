"""Every file in configs/ is valid, and what it costs on a machine of round numbers is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.placements import RATES
from transformers import LlamaConfig, LlamaForCausalLM

from overspill.offload import AdamW, DiskMemory, Job, Memory, RandomSource, skeleton
from overspill.swap_scheduler import check
from overspill.trainer.budget import DTYPES
from overspill.trainer.config import DtypeName, load_config, parse_bytes

CONFIGS_FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(CONFIGS_FOLDER.glob("*.yaml"))
MODELS = {
    "smollm2_kjv": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )
}  # fmt: skip
"""The shape of each file's model: the files themselves name weights that are not here."""
SIMULATED_S: dict[tuple[str, str, DtypeName], float] = {
    ("smollm2_kjv", "360MiB", "bf16"): 105.306646,
    ("smollm2_kjv", "360MiB", "fp32"): 106.765767,
    ("smollm2_kjv", "300MiB", "bf16"): 105.313726,
}
"""One step on a CPU: links of 1 GB/s, 10 GFLOP/s, 100 million updates a second. By file, fast tier and dtype."""


def test_the_step_of_every_file_is_known_with_each_dtype_that_it_may_use() -> None:
    for file in CONFIGS:
        config = load_config(file)
        asked = config.model.dtype
        for dtype in ("bf16", "fp32") if asked == "auto" else (asked,):
            assert any(
                name == file.stem and known == dtype and parse_bytes(gpu) == config.memory.gpu
                for name, gpu, known in SIMULATED_S
            )


@pytest.mark.parametrize("name, gpu, dtype", SIMULATED_S)
def test_simulated_seconds_of_a_step(name: str, gpu: str, dtype: DtypeName) -> None:
    config = load_config(CONFIGS_FOLDER / f"{name}.yaml", [f"memory.gpu={gpu}"])
    settings, memory = config.train, config.memory
    assert isinstance(memory.ram, int)
    assert memory.gpu is None or isinstance(memory.gpu, int)
    disk = None
    if memory.disk is not None:
        assert isinstance(memory.disk.size, int)
        disk = DiskMemory(path=str(memory.disk.path), size_bytes=memory.disk.size)
    model = skeleton(lambda: LlamaForCausalLM(MODELS[name]))
    job = Job.build(
        model,
        RandomSource(model, 0),
        optimizer=AdamW(weight_decay=settings.weight_decay, max_grad_norm=settings.max_grad_norm),
        memory=Memory(ram_bytes=memory.ram, gpu_bytes=memory.gpu, disk=disk),
        max_tokens=(settings.per_device_train_batch_size, config.data.max_length),
        dtype=DTYPES[dtype],
        microbatches=settings.gradient_accumulation_steps,
        rates=RATES,
    )
    with job:
        plan = job.plan()
        check(plan)
        used = {tier: size for tier, size in plan.peak_bytes().items() if size}
        assert {tier.name for tier in plan.machine.tiers} <= used.keys()
        assert job.simulate().total_s == pytest.approx(SIMULATED_S[name, gpu, dtype], abs=1e-6)
