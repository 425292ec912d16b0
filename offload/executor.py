"""The only loop over the steps of a plan.

Each lane walks its own steps in plan order; before a step it waits for the steps of other lanes named in `after`. The
computing lane is the calling thread, every link has a worker thread. `run(plan, work, shuffle=rng)` walks the same
lanes from one thread in a random legal order instead: what must not change any result.
"""

from __future__ import annotations

import random
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..swap_scheduler.plan import COMPUTE_LANE, Compute, Plan, Release, Slot, Transfer, aligned
from ..swap_scheduler.trace import Event, Trace
from .arena import Arena, DiskArena, MemoryArena, padded
from .compute import Work
from .device import Device, Done
from .lanes import Lanes


class _Aborted(Exception):
    """Another lane failed; this one stops too."""


@dataclass(frozen=True, slots=True)
class _Place:
    tier: str
    offset_bytes: int
    size_bytes: int


class _Resolved:
    """A plan with every slot looked up: what the loop touches while it runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan  # also keeps its id from being given to another
        self.digest = plan.digest
        self.sizes = {block.name: block.size_bytes for block in plan.blocks}
        self.lanes: dict[str, list[int]] = {}
        slots: dict[tuple[str, str], list[Slot]] = {}
        for slot in sorted(plan.slots, key=lambda slot: slot.first):
            slots.setdefault((slot.block, slot.tier), []).append(slot)
        self._slots = slots
        self._firsts = {key: [slot.first for slot in run] for key, run in slots.items()}
        arenas = {tier.name for tier in plan.machine.tiers}
        self.places: list[dict[str, _Place]] = []
        self.links: list[tuple[_Place, _Place] | None] = []
        for index, step in enumerate(plan.steps):
            if step.lane:
                self.lanes.setdefault(step.lane, []).append(index)
            places: dict[str, _Place] = {}
            link = None
            if isinstance(step.op, Compute):
                for access in step.op.accesses:
                    if access.tier in arenas:
                        places[access.block] = self.place(access.block, access.tier, index)
            elif isinstance(step.op, Transfer):
                op = step.op
                link = self.place(op.block, op.source, index), self.place(op.block, op.target, index)
            self.places.append(places)
            self.links.append(link)

    def place(self, block: str, tier: str, index: int) -> _Place:
        run = self._slots[block, tier]
        slot = run[bisect_right(self._firsts[block, tier], index) - 1]
        if not slot.first <= index <= slot.last:
            raise KeyError(f"{block} has no slot in {tier} at step {index}")
        return _Place(tier, slot.offset_bytes, self.sizes[block])


class Executor:
    """Runs plans over a set of arenas; one at a time."""

    def __init__(self, device: Device, arenas: Mapping[str, Arena]) -> None:
        self._device = device
        self._arenas = arenas
        self._lanes = Lanes()
        self._resolved: dict[int, _Resolved] = {}
        self.moved_bytes: dict[str, int] = {}
        """Bytes that really crossed each link since the executor was made; counted where they are copied."""
        self.peak_bytes = dict.fromkeys(arenas, 0)
        """Highest address of each arena that a step touched."""

    def run(self, plan: Plan, work: Work, *, shuffle: random.Random | None = None) -> Trace:
        """Carry out every step; the trace says when each ran. The first error of any lane stops all and is raised."""
        resolved = self._resolved.get(id(plan))
        if resolved is None:
            resolved = self._resolved[id(plan)] = _Resolved(plan)
        run = _Run(self, resolved, work)
        if shuffle is not None:
            run.shuffled(shuffle)
        else:
            others = [lane for lane in resolved.lanes if lane != COMPUTE_LANE]
            self._lanes.start(others, run.walk)
            run.walk(COMPUTE_LANE)
            self._lanes.join(others)
        if run.error is not None:
            raise run.error
        events = tuple(event for event in run.events if event is not None)
        peaks = dict(self.peak_bytes)
        return Trace(digest=resolved.digest, source="measured", events=events, peak_bytes=peaks)

    def close(self) -> None:
        self._lanes.close()


class _Run:
    """One execution of one plan."""

    def __init__(self, executor: Executor, resolved: _Resolved, work: Work) -> None:
        self._executor = executor
        self._resolved = resolved
        self._work = work
        self._changed = threading.Condition()
        self._finished = bytearray(len(resolved.plan.steps))
        self._marks: dict[int, Done] = {}
        self._origin = time.perf_counter()
        self.events: list[Event | None] = [None] * len(resolved.plan.steps)
        self.error: BaseException | None = None

    def walk(self, lane: str) -> None:
        """All steps of one lane, in order."""
        try:
            for index in self._resolved.lanes.get(lane, ()):
                self._wait(index)
                self._perform(index, lane)
        except _Aborted:
            return
        except BaseException as error:
            with self._changed:
                self.error = self.error or error
                self._changed.notify_all()

    def shuffled(self, rng: random.Random) -> None:
        """Every step, one at a time, in a random order that respects only the lanes and `after`."""
        heads = dict.fromkeys(self._resolved.lanes, 0)
        try:
            while heads:
                ready = [lane for lane in heads if self._is_ready(self._resolved.lanes[lane][heads[lane]])]
                lane = rng.choice(ready)
                self._perform(self._resolved.lanes[lane][heads[lane]], lane)
                heads[lane] += 1
                if heads[lane] == len(self._resolved.lanes[lane]):
                    del heads[lane]
        except BaseException as error:
            self.error = error

    def _is_ready(self, index: int) -> bool:
        return all(self._finished[other] for other in self._resolved.plan.steps[index].after)

    def _wait(self, index: int) -> None:
        with self._changed:
            while not self._is_ready(index):
                if self.error is not None:
                    raise _Aborted
                self._changed.wait()
            if self.error is not None:
                raise _Aborted
        for other in self._resolved.plan.steps[index].after:
            if mark := self._marks.get(other):
                mark.synchronize()

    def _perform(self, index: int, lane: str) -> None:
        op = self._resolved.plan.steps[index].op
        start = time.perf_counter()
        if isinstance(op, Compute):
            places = self._resolved.places[index]
            self._touch(places.values())
            self._work(op, lambda block: self._view(places[block]))
            if mark := self._executor._device.mark():
                self._marks[index] = mark
        elif isinstance(op, Transfer):
            self._transfer(index)
        else:
            assert isinstance(op, Release)
        end = time.perf_counter()
        self.events[index] = Event(
            step=index, text=str(op), lane=lane, start_s=start - self._origin, end_s=end - self._origin
        )
        with self._changed:
            self._finished[index] = 1
            self._changed.notify_all()

    def _view(self, place: _Place) -> torch.Tensor:
        arena = self._executor._arenas[place.tier]
        assert isinstance(arena, MemoryArena)
        return arena.view(place.offset_bytes, place.size_bytes)

    def _transfer(self, index: int) -> None:
        link = self._resolved.links[index]
        assert link is not None
        source, target = link
        arenas = self._executor._arenas
        a, b = arenas[source.tier], arenas[target.tier]
        self._touch(link)
        if isinstance(a, DiskArena):
            assert isinstance(b, MemoryArena)
            a.read(source.offset_bytes, padded(b, target.offset_bytes, target.size_bytes))
        elif isinstance(b, DiskArena):
            b.write(target.offset_bytes, padded(a, source.offset_bytes, source.size_bytes))
        else:
            self._executor._device.copy(self._view(source), self._view(target))
        moved = self._executor.moved_bytes
        name = f"{source.tier}>{target.tier}"  # one lane a link, so nobody else adds to this key
        moved[name] = moved.get(name, 0) + source.size_bytes

    def _touch(self, places: Iterable[_Place]) -> None:
        peaks = self._executor.peak_bytes
        for place in places:
            peaks[place.tier] = max(peaks[place.tier], place.offset_bytes + aligned(place.size_bytes))
