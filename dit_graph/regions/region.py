"""One block, below all hooks of its forward, with a runner of its own."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dit_graph.call.key import Signature
from dit_graph.capture.compiled import opaque
from dit_graph.links import COMPILED, compiled_alike, innermost
from dit_graph.regions.operations import Operations
from dit_graph.runner.runner import Runner
from dit_graph.runner.tally import Heard, Tally, listening
from dit_graph.runner.target import Shared, Target
from dit_graph.slot import InnerSlot, plain_method


@dataclass(eq=False)
class CallOfAll:
    """One call of the whole module that its regions answer.

    Args:
        of: what these have in common.
        plain: it is eager in full, to be timed.
        outside: counts what runs around them; None in most calls.
    """

    of: Shared
    plain: bool
    outside: Operations | None
    heard: Heard = field(default_factory=Heard)


class _Local(threading.local):
    call: CallOfAll | None = None


current = _Local()


class Region:
    """A part of a module that is recorded for itself.

    Args:
        path: of it, in the module.
        whole: that module's.
    """

    def __init__(self, path: str, module: torch.nn.Module, whole: Target, shared: Shared) -> None:
        self.path, self.module = path, module
        self.active = True
        self.tally = Tally()
        self._shared = shared
        self._compiled: Any = None  # what stood before the hooks, around them
        self._slot = InnerSlot(module, "forward", self)
        self._original = self._slot.original
        self.put_in()
        config = replace(whole.config, on_new_shape="capture", regions="off", gate="always")
        if config.extra_key is not None:
            config = replace(config, extra_key=lambda module, arguments: shared.now.extra)
        signature = Signature(plain_method(module, "forward"))
        name = f"{whole.name}.{path}"
        self.runner = Runner(
            Target(
                name, module, self._eager, signature, config, whole.pool, self.tally, path, shared
            )
        )

    def _eager(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = current.call
        if call is None or call.of is not self._shared or not self.active:
            return self._original(*args, **kwargs)
        call.heard.ran += 1
        if call.plain:
            return self._original(*args, **kwargs)
        if call.outside is not None:
            call.outside.pause()
        before, listening.to = listening.to, call.heard
        try:
            return self.runner(*args, **kwargs)
        finally:
            listening.to = before
            if call.outside is not None:
                call.outside.go_on()

    def put_in(self) -> None:
        """Go below the hooks that there are now.

        Where the module was compiled, hooks and all, the hooks run in Python from now on, and what
        they stand around is compiled in the same way.
        """
        own = self.module.__dict__
        space, key = innermost(self.module)
        if space.get(key) is not self._slot:
            self._slot.remove()
            self._slot = InnerSlot(self.module, "forward", self)
            self._slot.install()
            space, key = innermost(self.module)
        self._original = self._slot.original
        if key == COMPILED:
            self._original = opaque(self._original)
        elif (compiled := own.get(COMPILED)) is not None:
            self._compiled, own[COMPILED] = compiled, None
        if self._compiled is not None and own.get(COMPILED) is None:
            self._original = opaque(compiled_alike(self._compiled, self._slot.original))

    def step_aside(self) -> None:
        """Let what was compiled run again."""
        if self._compiled is not None and self.module.__dict__.get(COMPILED) is None:
            self.module.__dict__[COMPILED] = self._compiled
        self._compiled, self._original = None, self._slot.original

    def close(self) -> None:
        self.runner.close()
        self.step_aside()
        self._slot.remove()
