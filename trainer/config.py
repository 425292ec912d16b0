"""The config of one training job: strict, typed, every fault at once, before any model is loaded.

Keys follow Hugging Face's names where the meaning is the same. Paths are relative to the folder of the config file.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from .yaml_file import YamlFault, dump, parse

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("iB", 1024))
}


class ConfigError(ValueError):
    """One line a fault; `str()` is what the user reads."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


def parse_bytes(value: Any) -> int:
    """`20GiB`, `512 MiB`, `20GB`, or a whole number of bytes. ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value) if isinstance(value, str) else None
    if not match or match[2] not in _UNITS:
        raise ValueError("not a size; write it like 20GiB, 512MiB or 20GB")
    return math.floor(float(match[1]) * _UNITS[match[2]])


Auto = Literal["auto"]
DtypeName = Literal["bf16", "fp16", "fp32"]


def _size_or_auto(value: Any) -> int | Auto:
    return "auto" if value == "auto" else parse_bytes(value)


def _size_auto_or_null(value: Any) -> int | Auto | None:
    return None if value is None else _size_or_auto(value)


SizeOrAuto = Annotated[int | Auto, PlainValidator(_size_or_auto)]
SizeAutoOrNull = Annotated[int | Auto | None, PlainValidator(_size_auto_or_null)]
Flag = Annotated[bool, Field(strict=True)]


def _strict_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("not a number")
    return value


Number = Annotated[float, BeforeValidator(_strict_number), Field(allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]
Index = Annotated[int, Field(strict=True, ge=0)]
FilePath = Annotated[Path, PlainSerializer(str)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """`path`: a local folder, or a Hub name where there is internet. `frozen`: patterns of parameter names. `dtype`,
    that of the arithmetic: `auto` is bf16 where the device multiplies it at least as fast as fp32, else fp32.
    """

    path: str
    dtype: Literal["auto", DtypeName] = "auto"
    init: Literal["pretrained", "random"] = "pretrained"
    frozen: tuple[str, ...] = ()
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"


class DataConfig(_Section):
    """.txt: one text a line. .jsonl: one object a line, with `text_column`, or `prompt` and `response` columns."""

    train: FilePath
    eval: FilePath | None = None
    text_column: str = "text"
    max_length: Annotated[int, Field(strict=True, ge=2)] = 512
    overlength: Literal["truncate", "drop", "error"] = "truncate"
    packing: Flag = False


class TrainConfig(_Section):
    output_dir: FilePath
    max_steps: Count | None = None
    num_train_epochs: Count | None = None
    per_device_train_batch_size: Count = 1
    gradient_accumulation_steps: Count = 1
    learning_rate: Annotated[Number, Field(gt=0)] = 2e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "cosine"
    warmup_steps: Index = 0
    weight_decay: Annotated[Number, Field(ge=0)] = 0.0
    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[Number, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    decay_1d: Flag = False
    decay_embeddings: Flag = False
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    eval_steps: Count | None = None
    max_skipped_steps: Index = 10

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.max_steps is None and self.num_train_epochs is None:
            raise ValueError("give max_steps or num_train_epochs")
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ValueError("give max_steps or num_train_epochs, not both")
        return self


class DiskConfig(_Section):
    path: FilePath
    size: SizeOrAuto = "auto"


class MemoryConfig(_Section):
    """Caps. On a CPU, `gpu` is a separate RAM arena that stands for the fast tier; null makes RAM itself fast."""

    gpu: SizeAutoOrNull = "auto"
    ram: SizeOrAuto = "auto"
    disk: DiskConfig | None = None


class Config(_Section):
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    memory: MemoryConfig = MemoryConfig()
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"

    def to_yaml(self) -> str:
        """The resolved config: every key, paths absolute. Loads back to an equal config."""
        return dump(self.model_dump(mode="json"))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, check and resolve a config file; `overrides` are `dotted.key=value` texts. Raises ConfigError."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{file}: cannot be read: {reason}"]) from error
    try:
        data, lines, yaml_faults = parse(text)
    except YamlFault as fault:
        raise ConfigError([f"{file}:{fault.line}: {fault.message}"]) from fault
    faults = [f"{file}:{fault.line}: {fault.message}" for fault in yaml_faults]
    if data is None:
        raise ConfigError([f"{file}: the file is empty; a config needs the sections model, data and train"])
    if not isinstance(data, dict):
        raise ConfigError([f"{file}:1: a config is a mapping of sections, not {_kind(data)}"])
    for override in overrides:
        faults += _apply(data, override, lines)
    config, more = _validate(data, lambda key: _place(file, lines, key))
    faults += more
    if config is None or faults:
        raise ConfigError(faults)
    return _resolve(config, file.parent.resolve())


def make_config(data: dict[str, Any], base: str | Path = ".") -> Config:
    """The same from a mapping; paths are relative to `base`."""
    config, faults = _validate(data, lambda key: "config")
    if config is None:
        raise ConfigError(faults)
    return _resolve(config, Path(base).resolve())


def _place(file: Path, lines: dict[str, int], key: str) -> str:
    while key and key not in lines:
        key = key.rpartition(".")[0]
    line = lines.get(key)
    if line == 0:
        return "--set"
    return f"{file}:{line}" if line is not None else str(file)


def _apply(data: dict[str, Any], override: str, lines: dict[str, int]) -> list[str]:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        return [f"--set {override}: write it as --set dotted.key=value"]
    try:
        value, _, faults = parse(text)
    except YamlFault as fault:
        return [f"--set {override}: {fault.message}"]
    target = data
    *parents, last = key.split(".")
    for parent in parents:
        if target.get(parent) is None:
            target[parent] = {}
        following = target[parent]
        if not isinstance(following, dict):
            return [f"--set {override}: {parent} is not a section"]
        target = following
    target[last] = value
    for known in [name for name in lines if name.startswith(f"{key}.")]:
        del lines[known]  # what the file says below this key is no longer what counts
    lines[key] = 0
    for depth in range(1, len(parents) + 1):
        lines.setdefault(".".join(parents[:depth]), 0)
    return [f"--set {override}: {fault.message}" for fault in faults]


def _validate(data: dict[str, Any], place: Any) -> tuple[Config | None, list[str]]:
    try:
        return Config.model_validate(data), []
    except ValidationError as error:
        faults = []
        for item in error.errors():
            key = ".".join(map(str, item["loc"]))
            faults.append(f"{place(key)}: {_explain(key, item)}")
        return None, faults


_IN_OTHER_WORDS = {
    "tuple_type": "a list is wanted",
    "path_type": "a path is wanted, as text",
    "string_pattern_mismatch": "not a device; it is auto, cpu, cuda or cuda:0 and so on",
}
"""Where pydantic names Python's types or a pattern."""


def _explain(key: str, item: Any) -> str:
    kind, value = item["type"], item.get("input")
    if kind == "extra_forbidden":
        known = _known_keys(key.rpartition(".")[0])
        near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.5)
        elsewhere = [name for name in _all_keys() if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"; did you mean {near[0]}?" if near else f"; did you mean {elsewhere[0]}?" if elsewhere else ""
        return f"{key}: unknown key{hint}" + ("" if hint else f"; known here: {', '.join(known)}")
    if kind == "missing":
        return f"{key}: missing"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{key}: a section with keys is wanted, not {_kind(value)}"
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.findall(r"'[^']*'", item["ctx"]["expected"])]
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
        return f"{key}: {value!r} is not one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    message = _IN_OTHER_WORDS.get(kind, item["msg"].removeprefix("Value error, "))
    if kind == "value_error" and isinstance(value, dict):
        return f"{key}: {message}"
    return f"{key}: {value!r}: {message[0].lower()}{message[1:]}"


def _known_keys(section: str) -> list[str]:
    model: Any = Config
    for part in section.split(".") if section else []:
        model = _section_of(model.model_fields[part].annotation)
    return list(model.model_fields)


def _section_of(annotation: Any) -> Any:
    options = getattr(annotation, "__args__", (annotation,))
    return next((o for o in options if isinstance(o, type) and issubclass(o, _Section)), None)


def _all_keys() -> list[str]:
    found = []
    for name, field in Config.model_fields.items():
        section = _section_of(field.annotation)
        found += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return found


def _kind(value: Any) -> str:
    return {list: "a list", dict: "a section", str: "text", type(None): "nothing"}.get(type(value), f"{value!r}")


def _resolve(config: Config, base: Path) -> Config:
    """Paths absolute. A model path that names no folder is left as it is: a Hub name."""

    def absolute(path: Path) -> Path:
        return Path(os.path.normpath(base / path))

    folder = absolute(Path(config.model.path))
    model = config.model.model_copy(update={"path": str(folder)} if folder.is_dir() else {})
    evaluation = config.data.eval
    data = config.data.model_copy(
        update={"train": absolute(config.data.train), "eval": absolute(evaluation) if evaluation else None}
    )
    train = config.train.model_copy(update={"output_dir": absolute(config.train.output_dir)})
    disk = config.memory.disk
    memory = config.memory.model_copy(
        update={"disk": disk.model_copy(update={"path": absolute(disk.path)}) if disk else None}
    )
    return config.model_copy(update={"model": model, "data": data, "train": train, "memory": memory})
