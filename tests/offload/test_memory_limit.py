from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.offload import PROCESS_BYTES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "larger_than_memory.py"
MIB = 1 << 20


def _check(size: str, ram_bytes: int, folder: Path) -> dict[str, float]:
    """Train under a hard limit of budget + PROCESS_BYTES, and again without one."""
    file = folder / "report.json"
    limit = ram_bytes + PROCESS_BYTES
    command = [sys.executable, str(SCRIPT), "--size", size, "--ram", str(ram_bytes), "--limit", str(limit)]
    command += ["--steps", "2", "--folder", str(folder), "--json", str(file)]
    # Otherwise `memory_cap`, which lies beside the script, is not found.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["memory"]["oom_kills"] == 0
    assert report["memory"]["anonymous"] <= limit
    assert report["losses_equal"]
    capped = report["capped"]
    assert capped["measured_peak_bytes"] == {t: capped["planned_peak_bytes"][t] for t in capped["measured_peak_bytes"]}
    assert capped["measured_peak_bytes"]["ram"] <= ram_bytes
    return capped


@pytest.mark.soak  # half an hour, 15 GiB of disk
def test_memory_stays_under_the_budget_while_the_model_grows_four_times(tmp_path: Path) -> None:
    small, large = (_check(size, 450 * MIB, tmp_path) for size in ("0.2b", "0.9b"))
    assert large["parameters"] > 4 * small["parameters"]
