"""The plan of a job as a table a person can read, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..offload import Job
from ..swap_scheduler import Compute, show_bytes
from .budget import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """`home_bytes` by role: what lives there between steps. `peak_bytes`: the highest address a step uses."""

    name: str
    capacity_bytes: int
    peak_bytes: int
    home_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A step, predicted. `binding`: the busiest lane. `workspace_bytes` lies beside the arena of the fast tier.
    `speedup_over_fp32`: of products in `dtype`, measured on the device.
    """

    tiers: tuple[TierReport, ...]
    workspace_bytes: int
    moved_bytes: Mapping[str, int]
    plan_steps: int
    digest: str
    predicted_step_s: float
    binding: str
    busy_s: Mapping[str, float]
    total_steps: int
    tokens_per_step: float
    dtype: str
    speedup_over_fp32: float
    recomputed_layers: int
    layers: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def __str__(self) -> str:
        roles = ("weight", "frozen", "grad", "optim")
        lines = ["tier        budget       peak  " + "".join(f"{role:>12}" for role in roles)]
        for tier in self.tiers:
            homes = "".join(f"{show_bytes(tier.home_bytes.get(role, 0)):>12}" for role in roles)
            lines.append(
                f"{tier.name:6}{show_bytes(tier.capacity_bytes):>12}{show_bytes(tier.peak_bytes):>11}  {homes}"
            )
        moved = ", ".join(f"{link} {show_bytes(size)}" for link, size in sorted(self.moved_bytes.items())) or "nothing"
        seconds = max(self.predicted_step_s, 1e-9)
        lines += [
            f"beside the fast tier: {show_bytes(self.workspace_bytes)} of workspace",
            f"moved a step: {moved}",
            self._arithmetic(),
            f"layers: {self.layers}, of which {self.recomputed_layers} are recomputed in the backward pass",
            f"predicted: {self.predicted_step_s:.2f} s a step ({self.binding} binds), "
            f"{self.tokens_per_step / seconds:.0f} tok/s, {self.total_steps} steps "
            f"in {_duration(self.total_steps * seconds)}",
        ]
        return "\n".join(lines)

    def _arithmetic(self) -> str:
        if self.dtype == "fp32":
            return "computes in fp32"
        text = (
            f"computes in {self.dtype}, which this device multiplies at {self.speedup_over_fp32:.2g} x its rate in fp32"
        )
        return text if self.speedup_over_fp32 >= 1 else f"{text}; model.dtype: fp32 computes faster"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan_report(job: Job, *, precision: Precision, total_steps: int, tokens_per_step: float) -> PlanReport:
    """The report of an ordinary step of `job`."""
    plan, trace = job.plan(), job.simulate()
    peaks = plan.peak_bytes()
    homes: dict[str, dict[str, int]] = {tier.name: {} for tier in job.machine.tiers}
    for block in plan.blocks:
        if block.home is not None:
            homes[block.home][block.role] = homes[block.home].get(block.role, 0) + block.size_bytes
    kept = {step.op.layer for step in plan.steps if isinstance(step.op, Compute) and step.op.keep_graph}
    busy = trace.busy_s()
    tiers = tuple(
        TierReport(
            name=tier.name,
            capacity_bytes=tier.capacity_bytes,
            peak_bytes=peaks[tier.name],
            home_bytes=homes[tier.name],
        )
        for tier in job.machine.tiers
    )
    return PlanReport(
        tiers=tiers,
        workspace_bytes=job.workspace_bytes + peaks[job.machine.graph_tier.name],
        moved_bytes=plan.moved_bytes(),
        plan_steps=len(plan.steps),
        digest=plan.digest,
        predicted_step_s=trace.total_s,
        binding=max(busy, key=lambda lane: busy[lane]),
        busy_s=busy,
        total_steps=total_steps,
        tokens_per_step=tokens_per_step,
        dtype=precision.name,
        speedup_over_fp32=precision.speedup,
        recomputed_layers=len(job.structure.visits) - len(kept),
        layers=len(job.structure.visits),
    )
