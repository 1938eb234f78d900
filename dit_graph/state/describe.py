"""What hangs on one module or class, without the modules and classes below."""

import types
import weakref
from typing import Any

import torch

from dit_graph.links import AROUND, innermost
from dit_graph.state.contents import Contents, Visitor
from dit_graph.state.differences import TABLES
from dit_graph.state.libraries import LIBRARIES
from dit_graph.state.places import ClassAttributes, Place, is_idle, step_name
from dit_graph.state.values import Same, is_own_forward, library_of

_INTERNALS = frozenset(vars(torch.nn.Module()))
_HOOKS_BY_NUMBER = ("_forward_hooks", "_forward_pre_hooks")
NOT_IN_A_FORWARD = _INTERNALS - {"training", *TABLES, *_HOOKS_BY_NUMBER}
"""Attributes of every module that no forward reads: hooks of gradients and of saving, and notes on
how to call other hooks."""


class Node(Contents):
    """One module or class with what hangs on it.

    Args:
        owner: the module or class; a node refers to it weakly.
        path, visitors: see `Contents`.
        region: it is the root of a region, which lies below all hooks of its forward.
    """

    def __init__(
        self, owner: Any, path: str, visitors: dict[type, Visitor], region: bool = False
    ) -> None:
        super().__init__(path, visitors)
        self.owner = weakref.ref(owner)
        self._outside = AROUND if region else frozenset()
        if isinstance(owner, type):
            self.description = self._attributes_of_class(owner)
        else:
            self.description = self._attributes_of_module(owner)

    def _attributes_of_module(self, module: torch.nn.Module) -> Any:
        path, own = self.path, module.__dict__
        self.places.append(Place(path, own))
        self._called(type(module))
        found = {}
        for key, child in own.items():
            if key in NOT_IN_A_FORWARD or key in self._outside or is_idle(key, child):
                continue
            if key == "forward" and is_own_forward(module, child):
                continue
            if not path and key in _HOOKS_BY_NUMBER:  # around the call: they run at every replay
                continue
            internal = key in _INTERNALS
            step = path if key in TABLES else f"{path}{step_name(key)}"
            at = len(self.places)
            described = self._value(step, child, not internal)
            if key in ("_parameters", "_buffers"):
                self.places[at].ordered = False  # they are read by name alone
            # a hook's number is another one each time that it is registered
            found[key] = [*described[2].values()] if key in _HOOKS_BY_NUMBER else described
        if self._outside:
            space, key = innermost(module)
            if not is_own_forward(module, inner := space.get(key)) and inner is not None:
                found["forward"] = self._value(".forward", inner)
        return self._class_of(type(module)), found

    def _attributes_of_class(self, cls: type) -> Any:
        attributes = ClassAttributes(cls)
        self.places.append(Place(self.path, attributes))
        library = library_of(cls) in LIBRARIES
        found = {}
        for name, child in attributes.read().items():
            is_function = isinstance(child, types.FunctionType)
            if is_function and library:
                found[name] = Same(child)
            elif is_function or not (name.startswith("__") or is_idle(name, child)):
                found[name] = self._value(f"{self.path}.{name}", child)
        return found
