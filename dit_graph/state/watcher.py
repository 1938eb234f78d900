"""Decides when the module's state is read, and remembers what the forward itself writes."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dit_graph.state.blockers import blocker, global_hook, needs_grad, parallel
from dit_graph.state.fingerprint import Fingerprint

_UNSTEADY = 3  # more comparisons in a row than this find a change: nobody sets that by hand


class ModuleWatcher:
    """Compares the module with what its recordings stand on.

    A picture begins when `pictures()` gives another number: the full comparison runs at that call
    (and at the one after a change), and a cheap one in the calls that follow. Where it
    gives None, every call is compared in full.
    """

    def __init__(
        self, module: torch.nn.Module, device: torch.device, pictures: Callable[[], int | None]
    ) -> None:
        self._module = module
        self._device = device
        self._pictures = pictures
        self._picture: int | None = None
        self._again = False
        self._in_full = False
        self._known: Fingerprint | None = None
        self._written: set[str] = set()
        self._streak = 0
        self._changed: str | None = None  # at the last comparison
        self._let_through = False  # a change elsewhere, in this streak
        self._seen: tuple[Any, ...] = ()
        self._needs_grad = False
        self._blocker: str | None = None
        self._parallel: str | None = None
        self._attributes: list[dict[str, Any]] = []
        self.buffers: list[torch.Tensor] = []
        self._first: tuple[dict[str, Any], str] = ({}, "")  # where the first parameter is kept
        for child in module.modules():
            if child._parameters:
                self._first = (child._parameters, next(iter(child._parameters)))
                break

    @property
    def blocker(self) -> str | None:
        """Why nothing can be replayed now, or None."""
        return self._parallel or global_hook() or self._blocker

    @property
    def parallel(self) -> bool:
        """Whether the module is split over processes, which its forward then talks with."""
        return self._parallel is not None

    @property
    def known(self) -> Fingerprint:
        """The state that the recordings stand on."""
        assert self._known is not None
        return self._known

    def changed_since(self) -> str | None:
        """What differs after all, in full, where `changed` has compared cheaply in this call."""
        return None if self._in_full else self.changed(in_full=True)

    def changed(self, in_full: bool = False) -> str | None:
        """What differs from the state that the recordings stand on, or None."""
        picture = self._pictures()
        begins = picture is None or picture != self._picture
        full, self._again, self._picture = in_full or begins or self._again, False, picture
        self._in_full = full
        if self._known is not None and not full and self._glance() == self._seen:
            return None
        change = None if self._known is None else self._known.first_change()
        steadied = not change and self._streak > _UNSTEADY
        unsteady = self._is_unsteady(change)
        if self._known is None or change or steadied:
            self._take_over()
            self._again = True
        elif self._known.outgrown:
            self._take_over()
        self._seen = self._glance()
        if unsteady:
            self._blocker = self._blocker or f"Python state changes at every call: {change}"
        return change

    def _is_unsteady(self, change: str | None) -> bool:
        """Whether the state changes at call after call, as under a step cache.

        A change in another place may be the end of that, as `disable_cache` is. The first one of
        that kind is not counted, so that the next call can be recorded.
        """
        before, self._changed = self._changed, change
        self._streak = self._streak + 1 if change else 0
        if self._streak <= _UNSTEADY:
            self._let_through = False
            return False
        if change != before and not self._let_through:
            self._let_through = True
            return False
        return True

    def _take_over(self) -> None:
        """From now on the module as it is now is what the recordings stand on."""
        # a hook of diffusers or accelerate adds attributes to a block
        self._attributes = [m.__dict__ for m in self._module.modules() if m._modules]
        self.buffers = list(self._module.buffers())
        self._known = Fingerprint(self._module)
        self._parallel = parallel(self._module)
        self._blocker = self._parallel or self._known.blocker or blocker(self._module, self._device)
        self._needs_grad = needs_grad(self._module)

    def _glance(self) -> tuple[Any, ...]:
        """What a step inside a picture compares: mode, hooks, and where the weights begin."""
        table, name = self._first
        first = table.get(name)
        weight = None if first is None else (first.dtype, first.data_ptr())
        hooks = RemovableHandle.next_id  # a hook that is added anywhere counts it up
        return self._module.training, weight, hooks, list(map(len, self._attributes))

    def moved(self) -> bool:
        """Whether the module differs from what was compared last, inside a call too."""
        return self._known is None or self._known.first_change() is not None

    def wrote(self, place: str) -> bool:
        """Whether it is the forward itself that writes there."""
        return place in self._written

    def accept(self, changes: list[str]) -> list[str]:
        """Take over what a forward wrote itself; returns what it has written more than once."""
        repeated = [place for place in changes if place in self._written]
        self._written.update(changes)
        if changes:
            self._take_over()
        return repeated

    def needs_grad(self, tensors: list[torch.Tensor]) -> bool:
        return self._needs_grad or any(t.requires_grad for t in tensors)

    def tensors(self) -> list[torch.Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]
