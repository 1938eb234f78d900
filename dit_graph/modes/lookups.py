"""Walks over all modules that only look for hooks, cut short: `remove_syncs`.

When a picture begins a diffusers pipeline asks for its device several times and for a dtype. Each
time every module of its components is asked for a hook of diffusers' (group offloading, layerwise
casting), through a recursive generator and a `hasattr` that fails: 8 ms a time on the host of an
H200 for DiT-XL/2, in which the device waits. Here the two functions that ask, and nobody else, are
given no module at all once a look into each module's `__dict__` has found no such hook.
"""

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from diffusers.hooks import group_offloading
from diffusers.models import modeling_utils

from dit_graph.slot import Slot

_HOOK = "_diffusers_hook"
_ASKING = {
    "modules": getattr(group_offloading, "_get_top_level_group_offload_hook", None),
    "named_modules": getattr(modeling_utils, "get_parameter_dtype", None),
}
"""Method of a module → who calls it to look for hooks; they skip each module that has none."""


class Lookups:
    """What one pipeline has of the slots over its components. `cut_short` counts its walks.

    A component outlives neither the pipeline nor its slots through this: slots and those that share
    them know each other weakly.
    """

    def __init__(self) -> None:
        self.cut_short = 0
        self._slots: weakref.WeakSet[_Walk] = weakref.WeakSet()

    def refresh(self, components: dict[str, Any]) -> None:
        """Have slots over these components and no others."""
        modules = [m for m in components.values() if isinstance(m, torch.nn.Module)]
        wanted = {slot for m in modules for name in _ASKING if (slot := _Walk.on(m, name))}
        for slot in set(self._slots) - wanted:
            self._drop(slot)
        for slot in wanted:
            slot.users.add(self)
            self._slots.add(slot)

    def release(self) -> None:
        for slot in set(self._slots):
            self._drop(slot)

    def _drop(self, slot: "_Walk") -> None:
        self._slots.discard(slot)
        slot.users.discard(self)
        if not slot.users:
            slot.remove()


class _Walk(Slot):
    """`modules` or `named_modules` of one component, shared by all pipelines that have it."""

    def __init__(self, component: torch.nn.Module, name: str) -> None:
        super().__init__(component, name, self._walk)
        self.users: weakref.WeakSet[Lookups] = weakref.WeakSet()
        self._asking = _code_of(_ASKING[name])

    @classmethod
    def on(cls, component: torch.nn.Module, name: str) -> "_Walk | None":
        """The slot that is there, or a new one; None where the walk is not torch's own."""
        found = component.__dict__.get(name)
        if isinstance(found, cls) and found.active:
            return found
        own = getattr(type(component), name) is getattr(torch.nn.Module, name)
        if found is not None or not own or _code_of(_ASKING[name]) is None:
            return None
        slot = cls(component, name)
        slot.install()
        return slot

    def _walk(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        caller = sys._getframe(2).f_code  # behind this and `Slot.__call__`
        if caller is not self._asking or has_hook(self._owner):
            found: Iterator[Any] = self.original(*args, **kwargs)
            return found
        for lookups in tuple(self.users):
            lookups.cut_short += 1
        return iter(())


def _code_of(function: Any) -> Any:
    """Its code; None of what this version of diffusers has not."""
    return getattr(function, "__code__", None)


def has_hook(root: torch.nn.Module) -> bool:
    """Whether a module of the tree has a hook registry of diffusers'."""
    seen: set[int] = set()
    left: list[torch.nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        if _HOOK in module.__dict__:
            return True
        left += module._modules.values()
    return False
