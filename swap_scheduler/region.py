"""The floating part of one tier: copies and the holes between them, by address."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Copy:
    """A copy in the floating region. `used` is the compute at which it was last touched."""

    block: str
    start: int
    end: int
    first: int
    used: int


@dataclass(slots=True)
class Segment:
    """A stretch of the floating region: a copy, or free since compute `freed`."""

    start: int
    end: int
    copy: Copy | None
    freed: int = -1


class Region:
    """The floating part of one tier, as a list of segments without gaps."""

    def __init__(self, start: int, end: int) -> None:
        self.segments = [Segment(start, end, None)] if end > start else []
        self.copies: dict[str, Copy] = {}

    def free_window(self, size: int) -> tuple[int, int] | None:
        """Segment indices [i, j] of the free window of at least `size` that has been free for longest."""
        best: tuple[int, int] | None = None
        best_key = (math.inf, math.inf)
        segments = self.segments
        for i, segment in enumerate(segments):
            if segment.copy is not None:
                continue
            room, freed = 0, -1
            for j in range(i, len(segments)):
                other = segments[j]
                if other.copy is not None:
                    break
                room += other.end - other.start
                freed = max(freed, other.freed)
                if room >= size:
                    if (freed, segment.start) < best_key:
                        best, best_key = (i, j), (freed, segment.start)
                    break
        return best

    def window_around(self, middle: int, size: int, soft: set[str]) -> tuple[int, int] | None:
        """Segment indices [i, j] around `middle` that are free or soft and hold `size`, fewest copies first."""
        segments = self.segments

        def is_open(k: int) -> bool:
            held = segments[k].copy
            return held is None or held.block in soft

        i = j = middle
        while i > 0 and is_open(i - 1):
            i -= 1
        while j + 1 < len(segments) and is_open(j + 1):
            j += 1
        if segments[j].end - segments[i].start < size:
            return None
        best: tuple[int, int] | None = None
        best_count = math.inf
        for a in range(i, middle + 1):
            for b in range(middle, j + 1):
                if segments[b].end - segments[a].start >= size:
                    count = sum(segments[k].copy is not None for k in range(a, b + 1))
                    if count < best_count:
                        best, best_count = (a, b), count
                    break
        return best

    def take(self, i: int, j: int, size: int, copy_block: str, first: int, now: int) -> Copy:
        """Put a copy at the start of free segments [i, j]; what is over stays free."""
        segments = self.segments
        start, end = segments[i].start, segments[i].start + size
        copy = Copy(copy_block, start, end, first, now)
        rest = [Segment(max(s.start, end), s.end, None, s.freed) for s in segments[i : j + 1] if s.end > end]
        segments[i : j + 1] = [Segment(start, end, copy), *rest]
        self.copies[copy_block] = copy
        return copy

    def merge_free(self) -> None:
        """Each hole becomes one segment, so that what comes next is packed from its start."""
        merged: list[Segment] = []
        for segment in self.segments:
            if merged and merged[-1].copy is None and segment.copy is None:
                merged[-1] = Segment(merged[-1].start, segment.end, None, max(merged[-1].freed, segment.freed))
            else:
                merged.append(segment)
        self.segments = merged

    def give_back(self, copy: Copy, now: int) -> None:
        for segment in self.segments:
            if segment.copy is copy:
                segment.copy, segment.freed = None, now
                break
        del self.copies[copy.block]
