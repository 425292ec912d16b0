"""The floating part of one tier: copies and the holes between them, by address."""

from __future__ import annotations

import math
from collections.abc import Iterable
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

    def window_over(self, candidates: Iterable[str], size: int) -> tuple[int, int] | None:
        """Segment indices [i, j] of the first window of at least `size` that opens up as the copies of `candidates` are
        given up one by one, the fewest copies in it; None when all of them are not enough.

        Open segments form runs; a run is known by its two ends, so a candidate joins its neighbours in constant time.
        """
        segments = self.segments
        positions = {s.copy.block: k for k, s in enumerate(segments) if s.copy is not None}
        last: dict[int, int] = {}  # by the first segment of each run
        first: dict[int, int] = {}  # by its last
        for k, segment in enumerate(segments):
            if segment.copy is None:
                start = first.pop(k - 1, k)
                last[start], first[k] = k, start
        for block in candidates:
            k = positions[block]
            i, j = first.pop(k - 1, k), last.pop(k + 1, k)
            last[i], first[j] = j, i
            if segments[j].end - segments[i].start >= size:
                return self._narrowest(i, k, j, size)
        return None

    def _narrowest(self, first: int, middle: int, last: int, size: int) -> tuple[int, int]:
        """Of the windows around `middle` within a run that hold `size`, the one with the fewest copies."""
        segments = self.segments
        best, best_count = (first, last), math.inf
        for a in range(first, middle + 1):
            for b in range(middle, last + 1):
                if segments[b].end - segments[a].start >= size:
                    count = sum(segment.copy is not None for segment in segments[a : b + 1])
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
