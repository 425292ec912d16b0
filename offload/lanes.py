"""Lanes: one worker thread for every lane that is not the caller's, kept from run to run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence


class Lanes:
    def __init__(self) -> None:
        self._work: dict[str, queue.SimpleQueue[Callable[[str], None] | None]] = {}
        self._done: dict[str, queue.SimpleQueue[None]] = {}
        self._threads: dict[str, threading.Thread] = {}

    def start(self, lanes: Sequence[str], walk: Callable[[str], None]) -> None:
        """Let every lane's thread call `walk(lane)`, which must not raise."""
        for lane in lanes:
            if lane not in self._threads:
                self._work[lane], self._done[lane] = queue.SimpleQueue(), queue.SimpleQueue()
                thread = threading.Thread(target=self._loop, args=(lane,), name=f"overspill-{lane}", daemon=True)
                self._threads[lane] = thread
                thread.start()
            self._work[lane].put(walk)

    def join(self, lanes: Sequence[str]) -> None:
        for lane in lanes:
            self._done[lane].get()

    def close(self) -> None:
        for work in self._work.values():
            work.put(None)
        for thread in self._threads.values():
            thread.join()
        self._threads.clear()
        self._work.clear()
        self._done.clear()

    def _loop(self, lane: str) -> None:
        while (walk := self._work[lane].get()) is not None:
            walk(lane)
            del walk
            self._done[lane].put(None)
