"""Strands: every microbatch runs the model's own forward in its own thread and parks at each layer.

Exactly one thread runs at a time: the baton is with the executor or with one strand. A strand that calls a swappable
module hands over the call and waits; `Strand.advance` gives it the outputs and the baton until it parks again or
returns its loss. Outputs handed back are leaves of the strand's outer graph, so that backward can go layer by layer:

    outer graph:   embedding out -> (model's own code) -> block 0 in | block 0 out -> ... -> loss
                                                          cut here

Threads and not coroutines, since grad mode, autocast and the current stream are thread-local in torch. They live
as long as the pool, since every new thread that computes makes a new team of OpenMP threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_current = threading.local()


class VisitError(RuntimeError):
    """The model called its layers in another order than the one that was planned."""


@dataclass(slots=True)
class Call:
    """One call of a swappable module, taken apart: `flat` are its flattened arguments as the strand passed them."""

    visit: int
    flat: list[Any]
    spec: TreeSpec
    needs: tuple[bool, ...]
    autocast: tuple[bool, torch.dtype] | None
    grad: bool
    outputs: list[Any] = field(default_factory=list)
    output_spec: TreeSpec | None = None
    kept: tuple[list[Any], list[Any]] | None = None
    main: int | None = None
    main_shape: torch.Size | None = None
    main_dtype: torch.dtype | None = None

    @contextmanager
    def context(self, *, grad: bool) -> Iterator[None]:
        """The thread-local state under which the strand made the call."""
        with ExitStack() as stack:
            if self.autocast is not None:
                stack.enter_context(torch.autocast(_device_type(self.flat), self.autocast[1], enabled=self.autocast[0]))
            stack.enter_context(torch.set_grad_enabled(grad))
            yield


def _device_type(flat: list[Any]) -> str:
    return next((value.device.type for value in flat if isinstance(value, torch.Tensor)), "cpu")


class _Stop(BaseException):
    """Raised inside a parked strand to unwind the model's forward; never reaches the user."""


class Strand:
    """One microbatch on its way through the forward pass."""

    def __init__(self, pool: StrandPool, number: int) -> None:
        self._pool = pool
        self.number = number
        self._go: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"overspill-strand-{number}", daemon=True)
        self._thread.start()
        self.reset()

    def reset(self) -> None:
        self.parked: Call | None = None
        self.calls: dict[int, Call] = {}
        self.pending: dict[int, list[Any]] = {}
        self.loss: torch.Tensor | None = None
        self.finished = True
        self._error: BaseException | None = None
        self._visit = 0

    def start(self, forward: Callable[[], torch.Tensor]) -> None:
        """Run `forward` until it parks at its first layer."""
        self.reset()
        self.finished = False
        self._hand_over("start", forward)

    def advance(self, outputs: Any) -> None:
        """Give the parked call its outputs; returns when the strand parks again or has its loss."""
        self.parked = None
        self._hand_over("advance", outputs)

    def stop(self) -> None:
        """Unwind a parked forward; the thread stays for the next start."""
        if not self.finished:
            self._go.put(("stop", None))
            self._back.get()
        self.reset()

    def quit(self) -> None:
        self.stop()
        self._go.put(("quit", None))
        self._thread.join()

    def _hand_over(self, what: str, value: Any) -> None:
        self._go.put((what, value))
        self._back.get()
        if self._error is not None:
            raise self._error

    def _loop(self) -> None:
        _current.strand = self
        while True:
            what, forward = self._go.get()
            if what == "quit":
                return
            try:
                self.loss = forward()
            except _Stop:
                pass
            except BaseException as error:
                self._error = error
            self.finished = True
            del forward
            self._back.put(None)

    def enter(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called on the strand's own thread by a wrapped module: park, wait, go on with the outputs."""
        visit = self._pool.find_visit(module, self._visit)
        self._visit = visit + 1
        flat, spec = tree_flatten((args, kwargs))
        kind = _device_type(flat)
        self.parked = Call(
            visit=visit,
            flat=flat,
            spec=spec,
            needs=tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in flat),
            autocast=(True, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            grad=torch.is_grad_enabled(),
        )
        del flat, args, kwargs
        self._back.put(None)
        what, outputs = self._go.get()
        if what == "stop":
            raise _Stop
        return outputs


class StrandPool:
    """The strands of an engine, and the wrapping of the model's swappable modules."""

    def __init__(self, modules: dict[str, nn.Module], visits: tuple[str, ...]) -> None:
        self._visits = visits
        self._strands: list[Strand] = []
        self._modules = modules
        self.originals: dict[str, Callable[..., Any]] = {name: m.forward for name, m in modules.items()}
        for name, module in modules.items():
            module.forward = self._wrap(name)

    def _wrap(self, name: str) -> Callable[..., Any]:
        original = self.originals[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if getattr(_current, "inside", False):
                return original(*args, **kwargs)
            strand: Strand | None = getattr(_current, "strand", None)
            if strand is None:
                raise RuntimeError(
                    f"{name} was called while its weights are away; run the model through the engine "
                    "(engine.step, engine.evaluate), or save it and load the saved folder"
                )
            return strand.enter(name, args, kwargs)

        return forward

    def find_visit(self, module: str, start: int) -> int:
        """The next planned visit of `module`, at `start` or later. Layers in between were skipped by the model."""
        for visit in range(start, len(self._visits)):
            if self._visits[visit] == module:
                return visit
        raise VisitError(
            f"the model called {module} after {self._visits[start - 1] if start else 'nothing'}, but the forward pass "
            f"that was probed does not; a model whose layer order depends on the data cannot be planned"
        )

    def get(self, number: int) -> Strand:
        while len(self._strands) <= number:
            self._strands.append(Strand(self, len(self._strands)))
        return self._strands[number]

    def call(self, call: Call, module: str, inputs: list[Any]) -> Any:
        """Run the module's own forward on `inputs`; nested swappable modules run inside it."""
        args, kwargs = tree_unflatten(inputs, call.spec)
        _current.inside = True
        try:
            return self.originals[module](*args, **kwargs)
        finally:
            _current.inside = False

    def stop(self) -> None:
        """Unwind whatever is parked (after an error, or a skipped step)."""
        for strand in self._strands:
            strand.stop()

    def close(self) -> None:
        for strand in self._strands:
            strand.quit()
        self._strands.clear()
        for module in self._modules.values():
            del module.forward
