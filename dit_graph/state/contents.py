"""What a module or class holds, value by value: containers to compare, tensors, a description.

A description is made of tuples, dicts and plain values, so that `==` compares two of them. It names
modules, classes and tensors by `id`, which is theirs for as long as the state that it belongs to is
kept (`watcher.py` drops it when one of them goes). What is made anew at every use, as guiders make
hooks, partials and closures, is described by its class or code and by what it holds.
"""

import array
import enum
import functools
import io
import logging
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from dit_graph.slot import Slot
from dit_graph.state.functions import ContextValue, FunctionReads, LocalValues, is_fixed
from dit_graph.state.libraries import FIXED, HOOKS, PIPELINE, imported
from dit_graph.state.places import (
    Place,
    SlotAttributes,
    is_idle,
    step_name,
)  # fmt: skip
from dit_graph.state.values import (
    NUMBERS_AND_TEXT,
    PLAIN,
    Same,
    defines,
    keeps_more,
    key_of,
    library_of,
    members_of,
)

_OPAQUE = (
    types.BuiltinFunctionType, types.ModuleType, io.IOBase, torch.Generator, logging.Logger,
    logging.LoggerAdapter,
)  # fmt: skip
_FOREIGN = {
    "builtins", "logging", "threading", "inspect", "weakref", "functools", "_thread", "pathlib",
    "_contextvars", "_abc",
}  # fmt: skip
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)


Visitor = Callable[["Contents", str, Any, bool], Any]


class Contents:
    """Visits values one by one.

    Args:
        path: where they lie, `""` for the module that is enabled.
        visitors: of the types met so far; shared by all.
    """

    def __init__(self, path: str, visitors: dict[type, Visitor]) -> None:
        self.path = path
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []  # until whoever reads nodes has read them
        self.objects: list[Any] = []  # whose class another may replace
        self.methods: list[tuple[type, str]] = []  # by which an object of a library is called
        self.near: dict[int, str] = {}  # the modules and classes right below: their id, their path
        self.found: dict[int, Any] = {}  # those themselves, until whoever reads nodes has read them
        self.blocker = ""  # what is held but can be neither compared nor put back
        self._visitors = visitors
        self._met: dict[int, int] = {}

    def _value(self, path: str, value: Any, plain: bool = True) -> Any:
        kind = type(value)
        if kind is float or kind is complex:
            return kind, repr(value)  # -0.0 is not 0.0, nan is nan
        visit = self._visitors.get(kind)
        if visit is None:
            visit = self._visitors[kind] = _visitor(kind)
        if visit is _plain_value:
            return kind, value
        if kind is not tuple and visit not in (Contents._near, _np_scalar):
            if id(value) in self._met:
                return "met", self._met[id(value)]
            self._met[id(value)] = len(self._met)
        return visit(self, path, value, plain)

    def _near(self, path: str, value: Any, plain: bool) -> Any:
        self.near[id(value)], self.found[id(value)] = path, value
        return "module", id(value)

    def _class(self, path: str, value: Any, plain: bool) -> Any:
        return self._class_of(value)

    def _class_of(self, kind: type) -> Any:
        """Class attributes are state too, and a replaced method is another forward."""
        for base in kind.__mro__:
            if library_of(base) not in FIXED:
                self.near[id(base)], self.found[id(base)] = base.__name__, base
        return "class", id(kind)

    def _tensor(self, path: str, value: Any, plain: bool) -> Any:
        self.tensors.append(value)
        return "tensor", id(value)

    def _called(self, kind: type) -> None:
        if library_of(kind) in FIXED:  # others are nodes
            self.methods += (
                (kind, name) for name in ("forward", "__call__") if defines(kind, name)
            )

    def _object(self, path: str, value: Any, plain: bool) -> Any:
        self.objects.append(value)
        kind = type(value)
        self._called(kind)
        found = self._attributes(path, value)
        if members := members_of(kind):
            slots = SlotAttributes(value, members)
            self.places.append(Place(path, slots))
            held = slots.read().items()
            found |= {f"slot {key}": self._value(f"{path}.{key}", child) for key, child in held}
        # what C code keeps in an object, as of a `Decimal`, cannot be looked at
        return self._class_of(kind), found, Same(value) if keeps_more(kind, len(members)) else None

    def _attributes(self, path: str, value: Any) -> dict[str, Any]:
        """The attributes of an object, or of a container whose class is derived from a built-in."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return {}
        self.places.append(Place(path, attributes))
        return {
            key: self._value(f"{path}{step_name(key)}", child)
            for key, child in attributes.items()
            if not is_idle(key, child)
        }

    def _container(self, path: str, value: Any, plain: bool) -> Any:
        kind = self._class_of(type(value)), self._attributes(path, value)
        if isinstance(value, dict):
            self.places.append(Place(path, value, plain, ordered=not plain))
            pairs = [
                (key_of(key), self._value(f"{path}{step_name(key)}", child))
                for key, child in value.items()
                if not is_idle(key, child)
            ]
            return "dict", kind, dict(pairs), None if plain else [key for key, _ in pairs]
        if isinstance(value, (list, deque, set)):
            self.places.append(Place(path, value))
        if isinstance(value, (set, frozenset)):
            found = {key_of(member) for member in value}
            for member in value:
                self._value(f"{path}[{member!r}]", member)
            return "set", kind, found
        return "list", kind, [self._value(f"{path}[{i}]", child) for i, child in enumerate(value)]

    def _array(self, path: str, value: Any, plain: bool) -> Any:
        self.places.append(Place(path, value))
        if not value.dtype.hasobject:
            return "array", value.dtype, value.shape, value.tobytes()
        flat = enumerate(value.flat)
        return "array", value.shape, [self._value(f"{path}[{i}]", child) for i, child in flat]

    def _registry(self, path: str, value: Any, plain: bool) -> Any:
        """diffusers' hooks of one module; the rest changes as contexts come and go."""
        return self._container(path, value.hooks, False)

    def _partial(self, path: str, value: Any, plain: bool) -> Any:
        names = ("func", "args", "keywords")
        held = [self._value(f"{path}.{name}", getattr(value, name), False) for name in names]
        return "partial", held, self._attributes(path, value)

    def _method(self, path: str, value: Any, plain: bool) -> Any:
        owner = self._value(f"{path}.__self__", value.__self__)
        return "method", owner, self._value(f"{path}.__func__", value.__func__)

    def _function(self, path: str, value: Any, plain: bool) -> Any:
        inner = getattr(value, "__wrapped__", None)
        if is_fixed(value):
            # torch's `no_grad` and the like stand around the user's function; ours are breaks,
            # which run at every replay
            ours = inner is None or value.__globals__["__name__"].startswith("dit_graph.")
            return Same(value) if ours else ("wrapped", self._value(path, inner))
        reads = FunctionReads(value)
        if reads.unseen:
            called = ", ".join(sorted(reads.unseen))
            self.blocker = f"{value.__qualname__} calls {called}: what it reads cannot be seen"
        self.places.append(Place(path, reads))
        held = {key: self._value(f"{path}.{key}", child) for key, child in reads.read().items()}
        return "function", value.__code__, held, self._attributes(path, value)

    def _around_function(self, path: str, value: Any, plain: bool) -> Any:
        """A property, a static method and the like."""
        names = ("__func__", "fget", "fset", "func", "__wrapped__")
        inner = [getattr(value, name, None) for name in names]
        return type(value), [self._value(path, one) for one in inner if one is not None]

    def _context_variable(self, path: str, value: Any, plain: bool) -> Any:
        self.places.append(Place(path, held := ContextValue(value)))
        return "context", [self._value(f"{path}.{k}", v) for k, v in held.read().items()]

    def _thread_local(self, path: str, value: Any, plain: bool) -> Any:
        self.places.append(Place(path, held := LocalValues(value)))
        return "local", {k: self._value(f"{path}.{k}", v) for k, v in held.read().items()}

    def _weak_reference(self, path: str, value: Any, plain: bool) -> Any:
        return self._value(f"{path}()", value())

    def _bytes(self, path: str, value: Any, plain: bool) -> Any:
        what = f"attribute {path.lstrip('.')} is a {type(value).__name__}"
        self.blocker = f"{what}: use a numpy array"
        return "bytes"

    def _number(self, path: str, value: Any, plain: bool) -> Any:
        """Of a class derived from a plain one."""
        kind = type(value)
        plain_one: Any = next(base for base in kind.__mro__ if base in NUMBERS_AND_TEXT)
        return self._class_of(kind), plain_one.__repr__(value), self._attributes(path, value)

    def _iterator(self, path: str, value: Any, plain: bool) -> Any:
        self.blocker = f"attribute {path.lstrip('.')} is an iterator"
        return "iterator"

    def _generator(self, path: str, value: Any, plain: bool) -> Any:
        self.blocker = f"attribute {path.lstrip('.')} is a random generator, which no replay moves"
        return "generator"

    def _same_object(self, path: str, value: Any, plain: bool) -> Any:
        return Same(value)

    def _ours(self, path: str, value: Any, plain: bool) -> Any:
        return self._value(path, value.original) if isinstance(value, Slot) else "dit_graph"


def _plain_value(node: Contents, path: str, value: Any, plain: bool) -> Any:
    return type(value), value


def _np_scalar(node: Contents, path: str, value: Any, plain: bool) -> Any:
    return type(value), value.tobytes()


def _visitor(kind: type) -> Visitor:
    """How values of one type are described, looked up once a type."""
    for base, visitor in (
        (enum.Enum, _plain_value),
        (np.generic, _np_scalar),
        (PLAIN, _plain_value if kind in PLAIN else Contents._number),
        ((float, complex), Contents._number),
        ((bytearray, array.array, memoryview), Contents._bytes),
        (weakref.ReferenceType, Contents._weak_reference),
        (imported(PIPELINE), Contents._same_object),
        (_OPAQUE, Contents._same_object),
        (torch.nn.Module, Contents._near),
        (type, Contents._class),
        (torch.Tensor, Contents._tensor),
        (np.ndarray, Contents._array),
        (imported(HOOKS), Contents._registry),
        (functools.partial, Contents._partial),
        (_GENERATORS, Contents._generator),
        (types.MethodType, Contents._method),
        (types.FunctionType, Contents._function),
        ((property, staticmethod, classmethod, functools.partialmethod, functools.cached_property,
          functools._lru_cache_wrapper), Contents._around_function),
        (ContextVar, Contents._context_variable),
        (threading.local, Contents._thread_local),
    ):  # fmt: skip
        if issubclass(kind, base):
            return visitor
    if hasattr(kind, "__next__"):
        return Contents._iterator
    if issubclass(kind, (dict, list, deque, set, frozenset, tuple)):
        return Contents._container
    module = kind.__module__
    if module.startswith("dit_graph.") and not module.startswith("dit_graph.embedded"):
        return Contents._ours
    return Contents._same_object if library_of(kind) in _FOREIGN else Contents._object
