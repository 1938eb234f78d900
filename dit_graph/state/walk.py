"""Finds everything that a module reaches: containers, tensors, and what cannot be compared."""

import enum
import functools
import io
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dit_graph.state.libraries import HOOKS, PIPELINE, imported
from dit_graph.state.places import ClassAttributes, Place, SlotAttributes, step_name

_OPAQUE = (
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, io.IOBase,
    str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator,
    logging.Logger, logging.LoggerAdapter,
)  # fmt: skip
_FOREIGN = {
    "builtins", "logging", "threading", "inspect", "weakref", "functools", "_thread", "pathlib",
}  # fmt: skip
_LIBRARIES = {"torch", "numpy", "dit_graph"} | sys.stdlib_module_names
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_INTERNALS = frozenset(vars(torch.nn.Module()))
_NOT_IN_A_FORWARD = {  # hooks of gradients and of saving, and notes on how to call other hooks
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}  # fmt: skip
_Visitor = Callable[[str, Any, bool], None]


class Walk:
    """Everything that can be reached from a module, each thing once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []
        self.objects: list[tuple[str, Any]] = []  # by path; whose class another may replace
        self.methods: list[tuple[type, str]] = []  # that such a class is called by
        self.blocker: str | None = None
        self._seen: set[int] = set()
        self._visitors: dict[type, _Visitor | None] = {}
        self._members: dict[type, dict[str, Any]] = {}
        self._todo: list[tuple[str, Any, bool]] = [("", module, False)]
        while self._todo:
            path, value, plain = self._todo.pop()
            kind = type(value)
            if kind not in self._visitors:
                self._visitors[kind] = self._visitor(kind)
            visit = self._visitors[kind]
            if visit is not None and id(value) not in self._seen:
                self._seen.add(id(value))
                visit(path, value, plain)

    def _visitor(self, kind: type) -> "_Visitor | None":
        """What to do with the values of one type, looked up once; None to do nothing."""
        if issubclass(kind, (*_OPAQUE, *imported(PIPELINE))):
            return None
        for base, visitor in (
            (type, self._class),
            (torch.Tensor, self._tensor),
            (np.ndarray, self._array),
            (imported(HOOKS), self._registry),
            (functools.partial, self._partial),
            (_GENERATORS, self._generator),
            (types.MethodType, self._method),
        ):
            if issubclass(kind, base):
                return visitor
        if hasattr(kind, "__next__"):
            return self._iterator
        if issubclass(kind, (dict, list, deque, set, frozenset, tuple)):
            self._classes(kind)
            return self._container
        ours = kind.__module__.startswith("dit_graph.")
        ours = ours and not kind.__module__.startswith("dit_graph.embedded")
        if ours or _library_of(kind) in _FOREIGN:
            return None
        self._members[kind] = _members(kind)
        self.methods += ((kind, name) for name in ("forward", "__call__") if _defines(kind, name))
        self._classes(kind)
        return self._object

    def _class(self, path: str, value: Any, plain: bool) -> None:
        self._seen.discard(id(value))  # `_classes` itself skips what was seen
        self._classes(value)

    def _tensor(self, path: str, value: Any, plain: bool) -> None:
        self.tensors.append(value)

    def _array(self, path: str, value: Any, plain: bool) -> None:
        self.places.append(Place(path, value, value.copy()))
        if value.dtype.hasobject:
            self._todo += ((f"{path}[{i}]", child, True) for i, child in enumerate(value.flat))

    def _iterator(self, path: str, value: Any, plain: bool) -> None:
        self.blocker = f"attribute {path.lstrip('.')} is an iterator"

    def _generator(self, path: str, value: Any, plain: bool) -> None:
        self.blocker = f"attribute {path.lstrip('.')} is a random generator, which no replay moves"

    def _registry(self, path: str, value: Any, plain: bool) -> None:
        self._container(path, value.hooks, False)  # the rest changes as contexts come and go

    def _partial(self, path: str, value: Any, plain: bool) -> None:
        for name in ("func", "args", "keywords", "__dict__"):
            self._todo.append((f"{path}.{name}", getattr(value, name), False))

    def _method(self, path: str, value: Any, plain: bool) -> None:
        self._todo.append((f"{path}.__self__", value.__self__, False))

    def _object(self, path: str, value: Any, plain: bool) -> None:
        self.objects.append((path, value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.places.append(Place(path, attributes, dict(attributes)))
            module = isinstance(value, torch.nn.Module)
            for key, child in attributes.items():
                internal = module and key in _INTERNALS
                if internal and key in _NOT_IN_A_FORWARD:
                    continue
                inside = internal and key in ("_modules", "_parameters", "_buffers")
                step = "" if inside else step_name(key)
                self._todo.append((f"{path}{step}", child, not internal))
        if members := self._members[type(value)]:
            slots = SlotAttributes(value, members)
            self.places.append(Place(path, slots, held := slots.read()))
            self._todo += ((f"{path}.{name}", child, True) for name, child in held.items())

    def _container(self, path: str, value: Any, plain: bool) -> None:
        attributes = getattr(value, "__dict__", None)  # of a class derived from a container's
        if isinstance(attributes, dict):
            self.places.append(Place(path, attributes, dict(attributes)))
            self._todo += ((f"{path}.{key}", child, True) for key, child in attributes.items())
        if isinstance(value, dict):
            self.places.append(Place(path, value, dict(value), plain, ordered=not plain))
            self._todo += ((f"{path}{step_name(key)}", child, True) for key, child in value.items())
            return
        if isinstance(value, (list, deque, set)):
            self.places.append(Place(path, value, value.copy()))
        self._todo += ((f"{path}[{i}]", child, True) for i, child in enumerate(value))

    def _classes(self, kind: type) -> None:
        """Class attributes are state too, and a replaced method is another forward."""
        for base in kind.__mro__:
            if _library_of(base) in _LIBRARIES or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            held = dict(vars(base))
            self.places.append(Place(base.__name__, ClassAttributes(base), held))
            self._todo += (
                (f"{base.__name__}.{name}", child, True)
                for name, child in held.items()
                if not name.startswith("__")
            )


def _library_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _defines(kind: type, name: str) -> bool:
    """Itself or by a base; the metaclass, which makes objects, does not count."""
    return any(name in vars(base) for base in kind.__mro__)


def _members(kind: type) -> dict[str, Any]:
    """The descriptors that stand for `__slots__`, those of library classes too."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }
