"""The model as a Hugging Face folder, written shard by shard: never a second copy of it in memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .layers import Structure

SHARD_BYTES = 1 << 30


def save_pretrained(
    structure: Structure,
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: str | Path,
    *,
    use_cache: bool | None,
) -> None:
    """Write config, generation config and weights into `folder`, which is made. A tied weight is stored once.
    `use_cache`: the config's value to save.

    Peak memory: one shard of at most 1 GiB (or one larger tensor).
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, int]] = []
    shard: dict[str, torch.Tensor] = {}
    size = 0

    def write() -> None:
        nonlocal shard, size
        if shard:
            save_file(shard, target / f"part-{len(shards):05d}.safetensors", metadata={"format": "pt"})
            shards.append({name: tensor.numel() * tensor.element_size() for name, tensor in shard.items()})
        shard, size = {}, 0

    for name, tensor in weights:
        tensor_size = tensor.numel() * tensor.element_size()
        if size and size + tensor_size > SHARD_BYTES:
            write()
        shard[name] = tensor.contiguous()
        size += tensor_size
    write()
    weight_map: dict[str, str] = {}
    for index, content in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{index:05d}.safetensors").rename(target / name)
        weight_map |= dict.fromkeys(content, name)
    if len(shards) > 1:
        total = sum(sum(content.values()) for content in shards)
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (target / "model.safetensors.index.json").write_text(index_text + "\n", encoding="utf-8")
    model: Any = structure.model
    model.config.dtype = structure.dtype
    model.config.architectures = [type(model).__name__]
    config = copy.deepcopy(model.config)
    if use_cache is not None:
        config.use_cache = use_cache  # the user's value: it is off only while the weights are away
    config.save_pretrained(target)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(target)
