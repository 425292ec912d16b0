"""How long a plan takes: FIFO lanes, a step starts when its lane is free and all it waits for is done."""

from __future__ import annotations

from .plan import Compute, Plan, Transfer
from .trace import Event, Trace
from .workload import Costs


def simulate(plan: Plan, costs: Costs) -> Trace:
    """The trace of `plan` under `costs`. A backward without a kept graph recomputes its forward first."""
    sizes = {block.name: block.size_bytes for block in plan.blocks}
    free: dict[str, float] = {}
    done = [0.0] * len(plan.steps)
    kept = {(s.op.layer, s.op.index) for s in plan.steps if isinstance(s.op, Compute) and s.op.keep_graph}
    events = []
    for index, step in enumerate(plan.steps):
        if not step.lane:
            continue
        op = step.op
        if isinstance(op, Transfer):
            link = costs.links[f"{op.source}>{op.target}"]
            duration = link.latency_s + sizes[op.block] / link.bandwidth_bytes_per_s
        else:
            assert isinstance(op, Compute)
            duration = _seconds(op, costs, kept)
        start = max(free.get(step.lane, 0.0), max((done[other] for other in step.after), default=0.0))
        free[step.lane] = done[index] = start + duration
        events.append(Event(step=index, text=str(op), lane=step.lane, start_s=start, end_s=done[index]))
    return Trace(digest=plan.digest, source="simulated", events=tuple(events), peak_bytes=plan.peak_bytes())


def _seconds(op: Compute, costs: Costs, kept: set[tuple[int, int]]) -> float:
    if op.kind == "forward":
        return costs.forward_s[op.layer]
    if op.kind == "update":
        return costs.update_s[op.layer][op.index]
    recompute = 0.0 if (op.layer, op.index) in kept else costs.forward_s[op.layer]
    return costs.backward_s[op.layer] + recompute
