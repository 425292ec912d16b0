from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overspill.offload import PROCESS_BYTES
from overspill.trainer import budget
from overspill.trainer.budget import (
    Precision,
    available_ram_bytes,
    control_group_room,
    resolve_device,
    resolve_dtype,
    resolve_memory,
)
from overspill.trainer.config import Auto, ConfigError, DiskConfig, DtypeName, MemoryConfig


def group(folder: Path, limit: str, used: int, cache: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{key} {cache}\n")


def test_limits_of_every_group_above_count_and_the_page_cache_does_not(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/slice/job\n")
    group(tmp_path / "fs" / "slice", "1000", 700, 300)
    group(tmp_path / "fs" / "slice" / "job", "max", 700, 0)
    assert set(control_group_room(tmp_path / "fs", membership)) == {600}
    group(tmp_path / "fs", "500", 450, 0)
    assert min(control_group_room(tmp_path / "fs", membership)) == 50
    group(tmp_path / "fs", "500", 900, 0)
    assert min(control_group_room(tmp_path / "fs", membership)) == 0


def test_version_1_groups_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/docker/abc\n3:cpu:/docker/abc\n")
    group(tmp_path / "fs" / "memory", "4000", 1000, 500, version=1)
    assert set(control_group_room(tmp_path / "fs", membership)) == {3500}


def test_no_groups_no_limit(tmp_path: Path) -> None:
    assert control_group_room(tmp_path, tmp_path / "membership") == []
    assert available_ram_bytes() > 0


@pytest.mark.parametrize(("free_bytes", "ram_bytes"), [(100 << 30, 80 << 30), (PROCESS_BYTES + 1000, 1000), (1000, 0)])
def test_auto_ram_leaves_room_for_the_process(free_bytes: int, ram_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_ram_bytes", lambda: free_bytes)
    memory = resolve_memory(MemoryConfig(), "cpu")
    assert (memory.ram_bytes, memory.gpu_bytes, memory.disk) == (ram_bytes, None, None)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="cuda is asked, torch sees 0 CUDA devices"):
        resolve_device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert resolve_device("cuda") == resolve_device("auto") == "cuda"
    with pytest.raises(ConfigError, match="cuda:3 is asked, torch sees 1"):
        resolve_device("cuda:3")


@pytest.mark.parametrize(
    "asked, bf16_rate, expected",
    [
        ("auto", 20e9, Precision("bf16", 2.0)), ("auto", 10e9, Precision("bf16", 1.0)),
        ("auto", 9e9, Precision("fp32", 1.0)), ("bf16", 1e9, Precision("bf16", 0.1)),
        ("fp32", 20e9, Precision("fp32", 1.0)),
    ],
)  # fmt: skip
def test_auto_computes_in_bf16_where_that_is_not_slower(
    asked: DtypeName | Auto, bf16_rate: float, expected: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {torch.bfloat16: bf16_rate, torch.float32: 10e9}
    monkeypatch.setattr(budget, "matmul_flops_per_s", lambda device, dtype: rates[dtype])
    assert resolve_dtype(asked, "cpu") == expected


def test_a_disk_smaller_than_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory\.disk\.size: \d+ bytes are asked"):
        resolve_memory(MemoryConfig(disk=DiskConfig(path=tmp_path, size=1 << 60)), "cpu")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"memory\.disk\.path: .* cannot be made"):
        resolve_memory(MemoryConfig(disk=DiskConfig(path=tmp_path / "file" / "swap", size=1)), "cpu")
