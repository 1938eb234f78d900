"""The steps of one recording while they are written down: segments, breaks and constants.

The watchers (`operations.py`, `calls.py`) say which of these something is and ask for it here.
What brackets them, from the first step to the result, is `capture.py`.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph.capture.caller import CallersModes
from dit_graph.capture.effects import Effects
from dit_graph.capture.frames import module_path, source_line
from dit_graph.capture.homes import is_fresh, place
from dit_graph.capture.kinds import Kind, Known, storage_of
from dit_graph.capture.verdicts import is_random
from dit_graph.devices.base import Device, Memory, Segment, is_about_capturing
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import Guard, plain
from dit_graph.tape.tape import Break, Tape
from dit_graph.tape.trees import is_size, tensors_of


class Steps:
    """Writes steps down on `tape`, and launches each segment as soon as it is closed."""

    modes: CallersModes

    def __init__(
        self, device: Device, memory: Memory, static: list[torch.Tensor], module: torch.nn.Module,
        breakable: bool, path: str = "",
    ) -> None:  # fmt: skip
        self.device = device
        self.static = static
        self.breakable = breakable
        self.in_break = False  # While it is True nothing is recorded.
        self.tape = Tape()
        own = [*module.parameters(), *module.buffers()]
        self.known = Known(device, static, own)
        self.effects = Effects(device, static, own, self.known, self.tape)
        # No segment takes this operation, met at this line.
        self.no_segment_takes: tuple[Any, str] | None = None
        self.stays_out: Collection[Any] = ()  # No segment took these in an earlier capture.
        self.arrays: list[tuple[Any, Any]] = []  # Python got these by `numpy()`; each with a copy.
        self._memory = memory
        self.submodules = dict(module.named_modules(prefix=path))  # by path
        self._names = {id(child): name for name, child in self.submodules.items()}
        self._observing = False
        self._segment: Segment | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Record nothing of what runs inside."""
        before, self.in_break = self.in_break, True
        try:
            yield
        finally:
            self.in_break = before

    # ---- segments

    def in_segment(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation into the open segment, or into a new one."""
        segment = self._open()
        with self.alone():
            operands = tensors_of((args, kwargs))
            self.refuse_hidden(operands)
            self.effects.note(func, args, kwargs, segment.before_launch)
            for t in operands:
                if self.known.kind(t) in (None, Kind.CONSTANT):
                    self.tape.held[storage_of(t)] = t
            try:
                out = segment.call(func, args, kwargs)
            except Exception as error:
                if is_about_capturing(error):
                    self.no_segment_takes = func, source_line()
                raise
            for t in tensors_of(out):
                if self.known.kind(t) is None and storage_of(t) not in self.tape.held:
                    self.known.mark(t, Kind.POOL)
            return out

    def close(self) -> None:
        """End the open segment and launch it."""
        segment, self._segment = self._segment, None
        if segment is not None:
            with self.alone():
                segment.end()
            if segment.ops:
                self.tape.steps.append(segment)

    def abort(self) -> None:
        """Throw the open segment away."""
        if self._segment is not None:
            self._segment.abort()
            self._segment = None

    def _open(self) -> Segment:
        if self._segment is None:
            segment = self.device.segment(self._memory, self.known.hold_operand)
            segment.begin()
            self._segment = segment
        return self._segment

    # ---- values that a launch keeps as they are now

    def freeze_scalar(self, t: torch.Tensor) -> None:
        """Have a guard watch a 0-dim host tensor from outside, whose value a launch keeps."""
        if self.known.is_outside(t) and all(guard.source is not t for guard in self.tape.guards):
            what = f"the CPU scalar tensor read at {source_line()}"
            self.tape.guards.append(Guard(what, t.detach().clone(), t))

    def draws(self, leaves: list[Any]) -> None:
        """Note a random operation; only the default generators are moved by a replay."""
        self.effects.draws = True
        defaults = self.device.generators()
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and not any(leaf is g for g in defaults):
                raise CaptureError(f"a generator of the caller's is drawn from at {source_line()}")

    def make_constant(self, func: Any, args: Any, kwargs: Any, on: Any) -> Any:
        """Make what follows from Python data or constants alone, once and outside of the segments.

        Where it is made on the host, or without a device `on`, the open segment stays open.
        """
        if on is not None and torch.device(on).type != self.device.host_type:
            if self._segment is not None:
                self._require_breaks(f"{getattr(func, '__name__', func)} from Python data")
            self.close()
        with self.alone():
            out = func(*args, **kwargs)
        for t in tensors_of(out):
            if self.known.kind(t) is None:
                self.known.mark(t, Kind.CONSTANT)
        return out

    # ---- breaks

    def eager(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, *, reason: str, host: bool = False,
        to_host: bool = False, marked: bool = False, observed: bool = False,
    ) -> Any:  # fmt: skip
        """Run a call between two segments and write it down as a break.

        Args:
            reason: what the report says of it.
            host: it runs on the host alone, so the open segment stays open.
            to_host: its results lie on the host.
            marked: somebody marked it; a value that it returns is no guard.
            observed: what it writes and makes is noted while it runs, as of a marked one. Of any
                other only what its schema says is known.
        """
        if not host:
            self._require_breaks(reason)
            self.close()
        with self.alone():
            if marked:
                self.effects.before_users_code()
            self.effects.note(fn, args, kwargs)
            operands = tensors_of((args, kwargs))
            self.refuse_hidden(operands)
            leaves, spec = pytree.tree_flatten((args, kwargs), is_size)
            hold = self.known.hold if marked else self.known.hold_weakly
            held = [hold(plain(leaf)) for leaf in leaves]
            self._observing = marked or observed
            try:
                result = fn(*args, **kwargs)
            finally:
                self._observing = False
            outs, results = pytree.tree_flatten(result, is_size)
            guarded = not marked and _is_guard(fn, outs)
            if guarded:  # A restart repeats what came before this step.
                self.effects.guarded(reason)
            fresh = [is_fresh(out, operands, self.known, reason, marked) for out in outs]
            hosts = [
                new and (to_host or host or self.known.is_host(o)) for o, new in zip(outs, fresh)
            ]
            outs = place(outs, fresh, hosts, self.known, self.device, self._open)
            step = Break(
                fn, held, spec, list(map(self.known.hold, outs)), results, reason, source_line(),
                module_path(self._names), marked, guarded,
                in_place={i for i, new in enumerate(fresh) if not new},
            )  # fmt: skip
            self.tape.steps.append(step)
            return pytree.tree_unflatten(outs, results)

    def stand_in(self, value: Any) -> Any:
        """Replace the value that the last break compares with."""
        step = self.tape.steps[-1]
        assert isinstance(step, Break)
        step.homes = [value]
        return value

    def observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation inside something that is not recorded itself.

        Of an observed break it is noted what the operation writes and makes, and no more.
        """
        if not self._observing:
            return func(*args, **kwargs)
        self.effects.note(func, args, kwargs)
        self.effects.draws |= is_random(func)
        out = func(*args, **kwargs)
        given = set(map(storage_of, tensors_of((args, kwargs))))
        for t in tensors_of(out):
            if self.known.kind(t) is None and storage_of(t) not in given:
                self.known.mark(t, Kind.BREAK)
        return out

    def refuse_hidden(self, tensors: list[torch.Tensor]) -> None:
        """Raise CaptureError for a tensor of a marked break that only a result may bring out."""
        if any(self.known.kind(t) is Kind.BREAK for t in tensors):
            why = "a tensor made in a marked break, no result of it"
            raise CaptureError(f"{why}, at {source_line()}")

    def _require_breaks(self, reason: str) -> None:
        if not self.breakable:
            raise CaptureError(f"one graph cannot hold this: {reason} at {source_line()}")


def _is_guard(fn: Any, outs: list[Any]) -> bool:
    """Tell whether Python gets a value or a shape that another call may change."""
    dynamic = torch.Tag.dynamic_output_shape in getattr(fn, "tags", ())
    return dynamic or any(not isinstance(out, torch.Tensor) for out in outs)
