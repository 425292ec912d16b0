"""Strands: every microbatch runs the model's own forward on a stack of its own and parks at each layer.

A strand that calls a swappable module hands over the call and waits; `Strand.advance` gives it the outputs and runs it
until it parks again or has its loss. Outputs handed back are leaves of the strand's outer graph, so that backward
can go layer by layer:

    outer graph:   embedding out -> (model's own code) -> block 0 in | block 0 out -> ... -> loss
                                                          cut here

Strands are greenlets on the executor's thread, not threads: every thread that computes owns a team of OpenMP threads,
and with more of them than cores libgomp stops spinning, which makes every parallel loop of the process slower
(measured: an update 3.3 times; LOG.md, 2026-12-01). What torch keeps per thread (grad mode, inference mode, autocast)
is saved and restored at every switch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import GreenletExit, greenlet
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class VisitError(RuntimeError):
    """The model called its layers in another order than the one that was planned."""


@dataclass(slots=True)
class Call:
    """One call of a swappable module, taken apart: `flat` are its flattened arguments as the strand passed them."""

    visit: int
    flat: list[Any]
    spec: TreeSpec
    needs: tuple[bool, ...]
    autocast: tuple[str, torch.dtype] | None
    grad: bool
    outputs: list[Any] = field(default_factory=list)
    kept: tuple[list[Any], list[Any]] | None = None
    main: int | None = None
    main_shape: torch.Size | None = None
    main_dtype: torch.dtype | None = None

    @contextmanager
    def context(self, *, grad: bool) -> Iterator[None]:
        """The thread-local state under which the strand made the call."""
        with ExitStack() as stack:
            if self.autocast is not None:
                # No cache of cast weights: it would outlive their stay in the slot.
                stack.enter_context(torch.autocast(*self.autocast, cache_enabled=False))
            stack.enter_context(torch.set_grad_enabled(grad))
            yield


class _TorchState:
    """What torch keeps per thread and a `with` statement in a model's forward may change."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind)

    def restore(self) -> None:
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_enabled(self._kind, self._autocast)
        torch.set_autocast_dtype(self._kind, self._dtype)


class Strand:
    """One microbatch on its way through the forward pass."""

    def __init__(self, pool: StrandPool) -> None:
        self._pool = pool
        self._reset()

    def _reset(self) -> None:
        self.parked: Call | None = None
        self.calls: dict[int, Call] = {}
        self.pending: dict[int, list[Any]] = {}
        self.loss: torch.Tensor | None = None
        self._stack: greenlet | None = None
        self._state: _TorchState | None = None
        self._visit = 0

    def start(self, forward: Callable[[], torch.Tensor]) -> None:
        """Run `forward` until it parks at its first layer, or to its end."""
        self._reset()

        def run(_: None) -> None:
            self.loss = forward()

        self._stack = greenlet(run)
        self._switch(None)

    def advance(self, outputs: Any) -> None:
        """Give the parked call its outputs; returns when the strand parks again or has its loss."""
        self.parked = None
        self._switch(outputs)

    def stop(self) -> None:
        """Unwind a parked forward."""
        if self._stack is not None and not self._stack.dead:
            self._switch(None, unwind=True)
        self._reset()

    def _switch(self, value: Any, *, unwind: bool = False) -> None:
        assert self._stack is not None
        outer = _TorchState(self._pool.device_type)
        if self._state is not None:
            self._state.restore()
        self._pool.current = self
        try:
            if unwind:
                self._stack.throw(GreenletExit)
            else:
                self._stack.switch(value)
        finally:
            self._pool.current = None
            self._state = _TorchState(self._pool.device_type)
            outer.restore()

    def enter(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called on the strand's stack by a wrapped module: park, wait, go on with the outputs."""
        visit = self._pool.find_visit(module, self._visit)
        self._visit = visit + 1
        flat, spec = tree_flatten((args, kwargs))
        kind = self._pool.device_type
        self.parked = Call(
            visit=visit,
            flat=flat,
            spec=spec,
            needs=tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in flat),
            autocast=(kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None,
            grad=torch.is_grad_enabled(),
        )
        del flat, args, kwargs
        assert self._stack is not None
        assert self._stack.parent is not None
        return self._stack.parent.switch()


class StrandPool:
    """The strands of a job, and the wrapping of the model's swappable modules."""

    def __init__(self, modules: dict[str, nn.Module], visits: tuple[str, ...], device_type: str) -> None:
        self.device_type = device_type
        self.current: Strand | None = None
        self._inside = False
        self._visits = visits
        self._strands: list[Strand] = []
        self._modules = modules
        self.originals: dict[str, Callable[..., Any]] = {name: m.forward for name, m in modules.items()}
        for name, module in modules.items():
            module.forward = self._wrap(name)

    def _wrap(self, name: str) -> Callable[..., Any]:
        original = self.originals[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            strand = self.current
            if strand is None:
                raise RuntimeError(
                    f"{name} was called while its weights are away; run the model through the job "
                    "(job.step, job.evaluate), or save it and load the saved folder"
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
            self._strands.append(Strand(self))
        return self._strands[number]

    def call(self, call: Call, module: str, inputs: list[Any]) -> Any:
        """Run the module's own forward on `inputs`; nested swappable modules run inside it."""
        args, kwargs = tree_unflatten(inputs, call.spec)
        self._inside = True
        try:
            return self.originals[module](*args, **kwargs)
        finally:
            self._inside = False

    def stop(self) -> None:
        """Unwind whatever is parked and forget every graph."""
        for strand in self._strands:
            strand.stop()

    def close(self) -> None:
        self.stop()
        self._strands.clear()
        for module in self._modules.values():
            del module.forward
