"""One real execution of a forward, cut into segments and breaks, written down as a `Tape`.

Each segment is launched as soon as it is closed, so that a break sees real data, state that is
written in place moves once, and the result of a capture is the answer to the call. A capture knows
nothing of signatures, of other recordings or of models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph import breaks
from dit_graph.capture.caller import CallersModes
from dit_graph.capture.compiled import Changes
from dit_graph.capture.homes import result_leaf
from dit_graph.capture.operations import Watch, undisturbed
from dit_graph.capture.steps import Steps
from dit_graph.devices.base import Device, Memory
from dit_graph.errors import CaptureError
from dit_graph.tape.guards import plain, same
from dit_graph.tape.trees import is_size, tensors_of


class Capture(Steps):
    """Records one call. Use `watching()` around the forward, then `finish` with its result.

    Args:
        device, memory: where the segments go.
        static: the staged arguments that the forward is called with.
        module: whose forward it is.
        breakable: False raises CaptureError at the first thing that one graph cannot hold.
        patterns: of what is a break, submodules by path and torch functions by name.
        path: of the module in the one that is enabled, which paths start from.
    """

    watch: Watch

    def __init__(
        self, device: Device, memory: Memory, static: list[torch.Tensor], module: torch.nn.Module,
        breakable: bool, patterns: tuple[str, ...], path: str = "",
    ) -> None:  # fmt: skip
        super().__init__(device, memory, static, module, breakable, path)
        self.module = module
        self.patterns = patterns
        self.placed: set[str] = set()  # These patterns match a submodule.
        self.matched: set[str] = set()  # These became a break, of a submodule or a torch function.
        self.originals: Changes = []  # A capture changes these places of the model for a while.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything that runs inside; on an error the open segment is thrown away."""
        if breaks.capturing():
            raise CaptureError("a capture is already running on this thread")
        with undisturbed() as autocast_cache:  # This also covers closing the last segment.
            breaks.local.capture = self
            self.watch = Watch(self, self.patterns, self.matched, autocast_cache)
            try:
                with self.watch:
                    self.modes = CallersModes()
                    yield
                if self.no_segment_takes is not None:  # The forward caught it and went another way.
                    raise CaptureError("the forward catches that an operation cannot be captured")
                self.close()
            except BaseException:
                self.abort()
                raise
            finally:
                breaks.local.capture = None
                # It refers back to this capture, whose memory must not wait for the collector.
                del self.watch

    def finish(self, out: Any) -> Any:
        """Complete the tape with the result `out`, and return it as Python should see it."""
        if not all(same(array, before) for array, before in self.arrays):
            raise CaptureError("a tensor is written through its numpy array")
        self.arrays.clear()
        tape, out = self.tape, pytree.tree_map(plain, out, is_leaf=is_size)
        leaves, tape.spec = pytree.tree_flatten(out, is_size)
        self.refuse_hidden(tensors_of(leaves))
        tape.leaves = [result_leaf(leaf, self.known, self.static) for leaf in leaves]
        self.effects.finish()
        return out

    # ---- what model code asks for, through `dit_graph.breaks`

    def marked(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool, reason: str
    ) -> Any:
        """Run and write down a marked break; what it writes and makes is noted while it runs."""
        if not self.breakable:
            return fn(*args, **kwargs)
        self.modes.refuse_others(reason)
        self.effects.restart_point()  # A changed result must find the call's start again.
        out = self.eager(fn, args, kwargs, reason=reason, marked=True)
        self.effects.impure = self.effects.impure or ("" if pure else reason)
        return out

    def split(self) -> None:
        """End the current segment where a graph may be cut at all."""
        if self.breakable:
            self.close()
