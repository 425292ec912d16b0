"""What the `auto` of a config comes to on this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..offload import PROCESS_BYTES, DiskMemory, Memory, matmul_flops_per_s, open_device
from .config import Auto, ConfigError, DtypeName, MemoryConfig

DTYPES: dict[DtypeName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_RAM_SHARE = 0.8
_GPU_SHARE = 0.9
_DISK_MARGIN_BYTES = 2 << 30


def available_ram_bytes() -> int:
    """Free RAM, or what a control group leaves of its limit where that is less."""
    available = int(psutil.virtual_memory().available)
    return min([available, *control_group_room()])


def control_group_room(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What each control group above this process leaves of its limit, versions 1 and 2; nothing where none is set.

    Inside a container the files of the mount's root are the container's own; elsewhere the limit may be set on any
    group between the root and the process.
    """
    lines = membership.read_text().splitlines() if membership.is_file() else []
    rooms = []
    for line in ["0::/", ":memory:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = groups / controllers
        names = ("memory.max", "memory.current") if not controllers else (
            "memory.limit_in_bytes", "memory.usage_in_bytes"
        )  # fmt: skip
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top.parent:
                break
            rooms += _room(folder, *names)
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> list[int]:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    # The page cache counts as used, but the kernel gives it back before it runs out.
    cache = int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return [] if limit == "max" else [max(0, int(limit) - max(0, usage - cache))]


def resolve_device(device: str) -> str:
    """`auto` is a CUDA device where torch sees one, else the CPU. Raises ConfigError for a device that is not there."""
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.partition(":")[2] or 0) >= count:
            raise ConfigError([f"device: {device} is asked, torch sees {count} CUDA devices; use auto or cpu"])
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Precision:
    """A dtype to compute in. `speedup`: the rate at which the device multiplies it, over that of fp32."""

    name: DtypeName
    speedup: float

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.name]


def resolve_dtype(dtype: DtypeName | Auto, device: str) -> Precision:
    """`auto` is bf16 where the device multiplies it at least as fast as fp32, else fp32."""
    name: DtypeName = "bf16" if dtype == "auto" else dtype
    if name == "fp32":
        return Precision("fp32", 1.0)
    opened = open_device(device)
    speedup = matmul_flops_per_s(opened, DTYPES[name]) / matmul_flops_per_s(opened, torch.float32)
    return Precision("fp32", 1.0) if dtype == "auto" and speedup < 1 else Precision(name, speedup)


def _auto_ram_bytes() -> int:
    available = available_ram_bytes()
    return max(0, min(int(_RAM_SHARE * available), available - PROCESS_BYTES))


def resolve_memory(config: MemoryConfig, device: str) -> Memory:
    """Budgets in bytes. Raises ConfigError for a disk folder that cannot be used."""
    ram = _auto_ram_bytes() if config.ram == "auto" else config.ram
    gpu = config.gpu
    if gpu == "auto":
        gpu = int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else None
    if gpu is None and device.startswith("cuda"):
        raise ConfigError(["memory.gpu: null makes RAM the fast tier, which only device: cpu can do"])
    disk = None
    if config.disk is not None:
        folder = _usable_folder(config.disk.path)
        free = shutil.disk_usage(folder).free
        asked = config.disk.size
        size = max(0, free - _DISK_MARGIN_BYTES) if asked == "auto" else asked
        if size > free:
            raise ConfigError([f"memory.disk.size: {size} bytes are asked and {folder} has {free} bytes free"])
        disk = DiskMemory(path=str(folder), size_bytes=size)
    return Memory(gpu_bytes=gpu, ram_bytes=ram, disk=disk)


def _usable_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"memory.disk.path: {path} cannot be made: {error.strerror}"]) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError([f"memory.disk.path: {path} is not writable for this user"])
    return path
