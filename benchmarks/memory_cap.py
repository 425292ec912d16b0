"""Run a command under a hard memory limit, with whatever this machine offers: cgroup v2, cgroup v1, or RLIMIT_DATA."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


def mechanism() -> str:
    """One of "v2", "v1", "rlimit"; the last limits anonymous memory alone and fails allocations instead of killing."""
    controllers = _V2 / "cgroup.subtree_control"
    if controllers.is_file() and "memory" in controllers.read_text().split() and os.access(_V2, os.W_OK):
        return "v2"
    if (_V1 / "memory.limit_in_bytes").is_file() and os.access(_V1, os.W_OK):
        return "v1"
    return "rlimit"


Report = dict[str, Any]


def run_capped(limit_bytes: int, command: list[str]) -> tuple[subprocess.CompletedProcess[str], Report]:
    """The finished process, and what the mechanism counts: peak `anonymous` and `cache` bytes, `oom_kills`."""
    kind = mechanism()
    report: Report = {"mechanism": kind, "limit_bytes": limit_bytes, "anonymous": 0, "cache": 0, "oom_kills": 0}
    group = _make_group(kind, limit_bytes)
    try:
        pipe = subprocess.PIPE
        enter = _enter(group, limit_bytes)
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=enter)
        watcher_end = [False]

        def watch() -> None:
            while not watcher_end[0]:
                _sample(group, report)
                time.sleep(0.02)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        out, err = process.communicate()
        watcher_end[0] = True
        thread.join()
        report["oom_kills"] = _kills(group, kind)
        return subprocess.CompletedProcess(command, process.returncode, out, err), report
    finally:
        _remove(group)


def _make_group(kind: str, limit_bytes: int) -> Path | None:
    if kind == "rlimit":
        return None
    group = (_V2 if kind == "v2" else _V1) / f"overspill-{os.getpid()}"
    group.mkdir()
    if kind == "v2":
        (group / "memory.max").write_text(str(limit_bytes))
        (group / "memory.swap.max").write_text("0")
    else:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    return group


def _enter(group: Path | None, limit_bytes: int) -> Callable[[], None]:
    def enter() -> None:
        if group is None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        else:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return enter


def _sample(group: Path | None, report: dict[str, Any]) -> None:
    if group is None:
        return
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    report["anonymous"] = max(report["anonymous"], int(stat.get("total_rss") or stat.get("anon") or 0))
    report["cache"] = max(report["cache"], int(stat.get("total_cache") or stat.get("file") or 0))


def _kills(group: Path | None, kind: str) -> int:
    if group is None:
        return 0
    text = (group / ("memory.events" if kind == "v2" else "memory.oom_control")).read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


def _remove(group: Path | None) -> None:
    for _ in range(100):
        if group is None or not group.exists():
            return
        try:
            group.rmdir()
            return
        except OSError:  # the kernel still holds the last process for a moment
            time.sleep(0.05)
