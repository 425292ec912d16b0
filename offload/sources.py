"""Where weights come from when a run starts: one tensor at a time, by the model's parameter names."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn


class WeightError(ValueError):
    """A weight is missing or has the wrong shape; the message names it and the file."""


class WeightSource(Protocol):
    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        """The weight called `name`, of `shape`, in the dtype it is stored in, on the CPU. WeightError otherwise."""
        ...


def _checked(tensor: torch.Tensor, name: str, shape: torch.Size, where: str) -> torch.Tensor:
    if tensor.shape != shape:
        raise WeightError(f"{where}: {name} has shape {tuple(tensor.shape)}, the model wants {tuple(shape)}")
    return tensor


class StateDictSource:
    """Weights from a mapping in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name not in self._tensors:
            raise WeightError(f"the state dict has no weight called {name}")
        return _checked(self._tensors[name], name, shape, "the state dict")


class SafetensorsSource:
    """Weights from a Hugging Face folder: `model.safetensors`, or shards with their index.

    Names are looked up as they are, then with the base model's prefix added or taken off, as `from_pretrained` does.
    """

    def __init__(self, folder: str | Path, *, base_model_prefix: str = "") -> None:
        self._folder = Path(folder)
        self._prefix = base_model_prefix

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file of every stored name. Looked up at the first weight, so that a plan needs no weights."""
        index = self._folder / "model.safetensors.index.json"
        single = self._folder / "model.safetensors"
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self._folder / file for name, file in weight_map.items()}
        if single.is_file():
            with self._open(single) as file:
                return dict.fromkeys(file.keys(), single)
        raise WeightError(f"{self._folder}: no model.safetensors and no model.safetensors.index.json there")

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(str(path), framework="pt", device="cpu")
        except Exception as error:  # safetensors raises its own class for a damaged header, OSError otherwise
            raise WeightError(f"{path}: not a readable safetensors file: {error}") from error

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        names = [name]
        if self._prefix:
            names += [f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}.")]
        for stored in names:
            if stored in self._files:
                with self._open(self._files[stored]) as file:
                    return _checked(file.get_tensor(stored), name, shape, str(self._files[stored]))
        raise WeightError(
            f"{self._folder}: no weight called {name} in its safetensors files; an architecture whose files use other "
            "names must be loaded with from_pretrained, saved with save_pretrained, and passed as a state dict"
        )


class RandomSource:
    """Weights drawn by the model's own initialisation, one module at a time, seeded by its name."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._parents = {}
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    self._parents[name] = (
                        module,
                        attribute,
                        {k: None if p is None else p.shape for k, p in module._parameters.items()},
                    )
        self._initialize: Callable[[nn.Module], None] = model._init_weights  # type: ignore[assignment]

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name not in self._parents:
            raise WeightError(f"the model has no parameter called {name}")
        module, attribute, shapes = self._parents[name]
        fresh = copy.copy(module)
        fresh._parameters = {k: None if own is None else nn.Parameter(torch.zeros(own)) for k, own in shapes.items()}
        digest = hashlib.blake2b(f"{self._seed}/{name.rpartition('.')[0]}".encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            self._initialize(fresh)
        return _checked(fresh._parameters[attribute].detach(), name, shape, type(module).__name__)
