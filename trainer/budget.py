"""What `auto` budgets come to on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import torch

from ..offload import DiskMemory, Memory
from .config import ConfigError, MemoryConfig

_RAM_SHARE = 0.8
_GPU_SHARE = 0.9
_DISK_MARGIN_BYTES = 2 << 30


def available_ram_bytes() -> int:
    """Free RAM, or what a control group leaves of its limit where that is less."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = Path(limit_file), Path(usage_file)
        if limit.is_file() and usage.is_file():
            text = limit.read_text().strip()
            if text != "max":
                available = min(available, max(0, int(text) - int(usage.read_text())))
    return int(available)


def resolve_device(device: str) -> str:
    """`auto` is a CUDA device where torch sees one, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_memory(config: MemoryConfig, device: str) -> Memory:
    """Budgets in bytes. Raises ConfigError for a disk folder that cannot be used."""
    ram = int(_RAM_SHARE * available_ram_bytes()) if config.ram == "auto" else config.ram
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
