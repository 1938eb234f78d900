"""One real execution of a forward, cut into segments and breaks, written down as a `Tape`.

Each segment is launched as soon as it is closed, so that a break sees real data, state that is
written in place moves once, and the result of a capture is the answer to the call. Knows nothing of
keys, entries or models.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.call.context import Context, context
from dit_graph.capture.effects import Effects
from dit_graph.capture.frames import module_path, source_line
from dit_graph.capture.homes import is_fresh, place, result_leaf
from dit_graph.capture.kinds import Kind, Known, storage_of
from dit_graph.capture.operations import Watch, undisturbed
from dit_graph.capture.writes import writes
from dit_graph.devices.base import Device, Memory, Segment, is_about_capturing
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import Guard, plain, same
from dit_graph.tape.tape import Break, Tape
from dit_graph.tape.trees import is_size, tensors_of


class Capture:
    """Records one call. Use `recording()` around the forward, then `finish` with its result.

    Args:
        device, memory: where the segments go.
        static: the staged arguments that the forward is called with.
        module: the parameters and buffers of the module.
        eager_functions: patterns of torch functions, by name, that are breaks.
        breakable: False raises CaptureError at the first thing that one graph cannot hold.
        names: the paths of the module and its submodules by their ids.
    """

    watch: Watch

    def __init__(
        self,
        device: Device,
        memory: Memory,
        static: list[torch.Tensor],
        module: Sequence[torch.Tensor] = (),
        breakable: bool = True,
        eager_functions: tuple[str, ...] = (),
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.device = device
        self.tape = Tape()
        self.arrays: list[tuple[Any, Any]] = []
        self.in_break = False
        self._memory = memory
        self._static = static
        self.placed: set[str] = set()  # patterns of breaks that match a module
        self.matched: set[str] = set()  # those of them that became a break, and of functions
        self.originals: list[Any] = []  # what the model has where a capture changes it
        self.refused: tuple[Any, str] | None = None  # an operation that no segment takes, where
        self.stays_out: Collection[Any] = ()  # operations that did so in an earlier capture
        self.breakable = breakable
        self._eager_functions = eager_functions
        self._names = names or {}
        self._observing = False
        self._segment: Segment | None = None
        self.known = Known(device, static, module)
        self.effects = Effects(device, static, module, self.known, self.tape)

    # ---- the capture as a whole

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch everything that runs inside; on an error the open segment is thrown away."""
        if breaks.capturing():
            raise CaptureError("a capture is already running on this thread")
        with undisturbed() as autocast_cache:  # until the last segment is closed
            breaks.local.capture = self
            self.watch = Watch(self, autocast_cache)
            self._context = context()
            try:
                with self.watch:
                    self._function_modes = torch._C._len_torch_function_stack()
                    self._dispatch_modes = torch._C._len_torch_dispatch_stack()
                    yield
                if self.refused is not None:  # the forward caught it, and went another way
                    raise CaptureError("the forward catches that an operation cannot be captured")
                self.close()
            except BaseException:
                if self._segment is not None:
                    self._segment.abort()
                    self._segment = None
                raise
            finally:
                breaks.local.capture = None
                del self.watch  # it refers back; memory must not wait for the garbage collector

    def finish(self, out: Any) -> Any:
        """Complete the tape with the result `out`; returns it as Python should see it."""
        if any(not same(array, before) for array, before in self.arrays):
            raise CaptureError("a tensor is written through its numpy array")
        self.arrays.clear()
        tape, out = self.tape, pytree.tree_map(plain, out, is_leaf=is_size)
        leaves, tape.spec = pytree.tree_flatten(out, is_size)
        self.refuse_hidden(tensors_of(leaves))
        tape.leaves = [result_leaf(leaf, self.known, self._static) for leaf in leaves]
        self.effects.finish()
        return out

    # ---- values that a launch freezes

    def freeze_scalar(self, t: torch.Tensor) -> bool:
        """Whether a launch may freeze this 0-dim host tensor; from outside, a guard watches it."""
        if self.known.is_outside(t):
            what = f"the CPU scalar tensor read at {source_line()}"
            if all(guard.source is not t for guard in self.tape.guards):
                self.tape.guards.append(Guard(what, t.detach().clone(), t))
            return True
        return self.known.is_constant(t)

    def draws(self, leaves: list[Any]) -> None:
        """A random operation: only the default generators replay."""
        self.effects.draws = True
        known = self.device.generators()
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and not any(leaf is g for g in known):
                raise CaptureError(f"a generator of the caller's is drawn from at {source_line()}")

    # ---- where an operation can go

    def stays_eager(self, func: Any) -> str:
        """The pattern of the config that a torch function matches, or an empty string."""
        if not self.breakable or not self._eager_functions:
            return ""
        name = getattr(func, "__name__", "")
        pattern = next((p for p in self._eager_functions if fnmatch.fnmatchcase(name, p)), "")
        self.matched |= {pattern} - {""}
        return pattern

    def observe(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation inside a marked break: what it writes and makes is noted, no more."""
        if not self._observing:
            return func(*args, **kwargs)
        self.effects.note(func, args, kwargs)
        self.effects.draws |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        out = func(*args, **kwargs)
        given = set(map(storage_of, tensors_of((args, kwargs))))
        for t in tensors_of(out):
            if self.known.kind(t) is None and storage_of(t) not in given:
                self.known.mark(t, Kind.BREAK)
        return out

    def in_segment(self, func: Any, args: Any, kwargs: Any) -> Any:
        segment = self._open()
        return self.alone(self._in_segment, (segment, func, args, kwargs), {})

    def refuse_hidden(self, tensors: list[torch.Tensor]) -> None:
        """What a marked break made and did not return is made anew where no replay sees it."""
        if any(self.known.kind(t) is Kind.BREAK for t in tensors):
            where = source_line()
            raise CaptureError(f"a tensor made in a marked break, no result of it, at {where}")

    def _in_segment(self, segment: Segment, func: Any, args: Any, kwargs: Any) -> Any:
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
                self.refused = func, source_line()
            raise
        for t in tensors_of(out):
            if self.known.kind(t) is None and storage_of(t) not in self.tape.held:
                self.known.mark(t, Kind.POOL)
        return out

    def on_host(self, func: Any, args: Any, kwargs: Any, random: bool) -> Any:
        """Host work: done anew at replay where it depends on anything, without ending a segment."""
        if random or not self.follows_from_constants(func, args, kwargs):
            return self.eager(func, args, kwargs, reason=f"{func} on the host", host=True)
        return self.constant(func(*args, **kwargs))

    def follows_from_constants(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether it makes something new from constants alone; a write must stay in its place."""
        return not writes(func) and all(
            self.known.is_constant(t) for t in tensors_of((args, kwargs))
        )

    def make_constant(self, func: Any, args: Any, kwargs: Any, device: Any) -> Any:
        """Something that follows from Python data alone: made once, outside of the segments."""
        if torch.device(device).type != self.device.host_type:
            if self._segment is not None:
                self._require_breaks(f"{getattr(func, '__name__', func)} from Python data")
            self.close()
        return self.constant(self.alone(func, args, kwargs))

    def constant(self, out: Any) -> Any:
        for t in tensors_of(out):
            if self.known.kind(t) is None:
                self.known.mark(t, Kind.CONSTANT)
        return out

    def alone(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run it with nothing recorded."""
        before, self.in_break = self.in_break, True
        try:
            return func(*args, **kwargs)
        finally:
            self.in_break = before

    def marked(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool, reason: str
    ) -> Any:
        """A break that somebody marked; what it writes and makes is noted while it runs."""
        if not self.breakable:
            return fn(*args, **kwargs)
        self.refuse_modes(reason)
        self.effects.restart_point()  # a changed result must find the call's start again

        now = self._observed(fn)
        out = self.eager(fn, args, kwargs, reason=reason, marked=True, now=now)
        self.effects.impure = self.effects.impure or ("" if pure else reason)
        return out

    def learned(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch function that could not be captured before, as a break."""
        reason = f"{func.__name__} could not be captured"
        return self.eager(func, args, kwargs, reason=reason, now=self._observed(func))

    def _observed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`, with what it writes and makes noted."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            self._observing = True
            try:
                return fn(*args, **kwargs)
            finally:
                self._observing = False

        return observed

    def refuse_modes(self, reason: str) -> None:
        """A replay runs a break under the caller's modes, not under those of its place here."""
        pairs = zip(Context._fields, context(), self._context)
        differ = [name for name, here, outside in pairs if here != outside]
        if not torch.is_grad_enabled():  # the caller may have them on: nothing here needs any
            differ = [name for name in differ if name != "grad_mode"]
        what = [name.replace("_", " ") for name in differ]
        if torch._C._len_torch_function_stack() > self._function_modes:
            what.append("a torch function mode")
        if torch._C._len_torch_dispatch_stack() > self._dispatch_modes:
            what.append("a torch dispatch mode")
        if what:
            raise CaptureError(
                f"the forward sets {', '.join(what)} around {reason}, which a replay of this break"
                f" would not have, at {source_line()}"
            )

    def split(self) -> None:
        """End the current segment where a graph may be cut at all."""
        if self.breakable:
            self.close()

    def eager(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, *, reason: str, host: bool = False,
        to_host: bool = False, marked: bool = False, now: Callable[..., Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a call between segments (`host`: beside them) and write it down as a break."""
        if not host:
            self._require_breaks(reason)
            self.close()
        return self.alone(
            self._eager, (fn, args, kwargs, reason, to_host or host, marked, now or fn), {}
        )

    def _eager(
        self, fn: Any, args: Any, kwargs: Any, reason: str, to_host: bool, marked: bool, now: Any
    ) -> Any:
        self.effects.note(fn, args, kwargs)
        operands = tensors_of((args, kwargs))
        self.refuse_hidden(operands)
        leaves, spec = pytree.tree_flatten((args, kwargs), is_size)
        held = [self.known.hold(x) if isinstance(x, torch.Tensor) else plain(x) for x in leaves]
        result = now(*args, **kwargs)
        outs, results = pytree.tree_flatten(result, is_size)
        guarded = not marked and _is_guard(fn, outs)
        if guarded:  # before the step: a restart repeats what was
            self.effects.guarded(reason)
        step = Break(fn, held, spec, [], results, reason, source_line(), marked)
        step.module = module_path(self._names)
        step.guarded = guarded
        self.tape.steps.append(step)
        is_new = [is_fresh(out, operands, self.known, reason, marked) for out in outs]
        fresh = [i for i, new in enumerate(is_new) if new]
        step.in_place = {i for i, new in enumerate(is_new) if not new}
        for i, home in zip(fresh, self._place([outs[i] for i in fresh], to_host)):
            outs[i] = home
        step.homes = [self.known.hold(x) if isinstance(x, torch.Tensor) else x for x in outs]
        return pytree.tree_unflatten(outs, results)

    def stand_in(self, value: Any) -> Any:
        """Replace the value that the last break compares with."""
        step = self.tape.steps[-1]
        assert isinstance(step, Break)
        step.homes = [value]
        return value

    def close(self) -> None:
        """End the open segment and launch it."""
        segment, self._segment = self._segment, None
        if segment is not None:
            self.alone(segment.end, (), {})
            if segment.ops:
                self.tape.steps.append(segment)

    def _open(self) -> Segment:
        if self._segment is None:
            segment = self.device.segment(self._memory, self.known.hold_operand)
            segment.begin()
            self._segment = segment
        return self._segment

    def _place(self, outs: list[torch.Tensor], to_host: bool) -> list[torch.Tensor]:
        hosts = [to_host or self.known.is_host(out) for out in outs]
        return place(outs, hosts, self.known, self.device, self._open)

    def _require_breaks(self, reason: str) -> None:
        if not self.breakable:
            raise CaptureError(f"one graph cannot hold this: {reason} at {source_line()}")


def _is_guard(fn: Any, outs: list[Any]) -> bool:
    dynamic = torch.Tag.dynamic_output_shape in getattr(fn, "tags", ())
    return dynamic or any(not isinstance(out, torch.Tensor) for out in outs)
