"""What happened when: the same form for a simulated and for a measured run of a plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Source = Literal["simulated", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One step, by its position in the plan and its text."""

    step: int
    text: str
    lane: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """`digest` is that of the plan; `peak_bytes` the highest address used, by tier."""

    digest: str
    source: Source
    events: tuple[Event, ...]
    peak_bytes: Mapping[str, int]

    @property
    def total_s(self) -> float:
        return max((event.end_s for event in self.events), default=0.0)

    def busy_s(self) -> dict[str, float]:
        """Seconds each lane was at work."""
        busy: dict[str, float] = {}
        for event in self.events:
            busy[event.lane] = busy.get(event.lane, 0.0) + event.end_s - event.start_s
        return busy

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        raw = json.loads(text)
        return cls(**raw | {"events": tuple(Event(**event) for event in raw["events"])})
