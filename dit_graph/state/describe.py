"""What hangs on one module or class: containers to compare, tensors, and a description by value.

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
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from dit_graph.slot import Slot
from dit_graph.state.functions import ContextValue, FunctionReads, LocalValues, is_fixed
from dit_graph.state.libraries import FIXED, HOOKS, LIBRARIES, PIPELINE, imported
from dit_graph.state.places import (
    ClassAttributes,
    Place,
    SlotAttributes,
    is_idle,
    step_name,
)  # fmt: skip

_PLAIN = (
    str, bytes, int, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, range,
)  # fmt: skip
_BASES = (*_PLAIN, float, complex)
_OPAQUE = (
    types.BuiltinFunctionType, types.ModuleType, io.IOBase, torch.Generator, logging.Logger,
    logging.LoggerAdapter,
)  # fmt: skip
_FOREIGN = {
    "builtins", "logging", "threading", "inspect", "weakref", "functools", "_thread", "pathlib",
    "_contextvars", "_abc",
}  # fmt: skip
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_INTERNALS = frozenset(vars(torch.nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS_BY_NUMBER = ("_forward_hooks", "_forward_pre_hooks")
NOT_IN_A_FORWARD = _INTERNALS - {"training", *_TABLES, *_HOOKS_BY_NUMBER}
"""Attributes of every module that no forward reads: hooks of gradients and of saving, and notes on
how to call other hooks."""


class Same:
    """Equal to what stands for the same object. Keeps it alive only where nothing can say that it
    is gone."""

    __slots__ = ("_id", "_of")

    def __init__(self, it: Any) -> None:
        self._id = id(it)
        try:
            self._of: Any = weakref.ref(it)
        except TypeError:
            self._of = functools.partial(_itself, it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._of() is other._of() is not None

    def __hash__(self) -> int:
        return self._id


def _itself(it: Any) -> Any:
    return it


Visitor = Callable[["Node", str, Any, bool], Any]


class Node:
    """What hangs on one module or class, without the modules and classes below.

    Args:
        owner: the module or class; a node refers to it weakly.
        path: where it lies, `""` for the module that is enabled.
        visitors: of the types met so far; shared by all nodes.
    """

    def __init__(self, owner: Any, path: str, visitors: dict[type, Visitor]) -> None:
        self.path = path
        self.owner = weakref.ref(owner)
        self.places: list[Place] = []
        self.tensors: list[torch.Tensor] = []  # until whoever reads nodes has read them
        self.objects: list[Any] = []  # whose class another may replace
        self.methods: list[tuple[type, str]] = []  # by which an object of a library is called
        self.near: dict[int, str] = {}  # the modules and classes right below: their id, their path
        self.found: dict[int, Any] = {}  # those themselves, until whoever reads nodes has read them
        self.blocker = ""  # what is held but can be neither compared nor put back
        self._visitors = visitors
        self._met: dict[int, int] = {}
        if isinstance(owner, type):
            self.description = self._attributes_of_class(owner)
        else:
            self.description = self._attributes_of_module(owner)

    def _value(self, path: str, value: Any, plain: bool = True) -> Any:
        kind = type(value)
        if kind is float or kind is complex:
            return kind, repr(value)  # -0.0 is not 0.0, nan is nan
        visit = self._visitors.get(kind)
        if visit is None:
            visit = self._visitors[kind] = _visitor(kind)
        if visit is _plain_value:
            return kind, value
        if kind is not tuple and visit not in (Node._near, _np_scalar):
            if id(value) in self._met:
                return "met", self._met[id(value)]
            self._met[id(value)] = len(self._met)
        return visit(self, path, value, plain)

    # ---- what has a node of its own, or an address

    def _near(self, path: str, value: Any, plain: bool) -> Any:
        self.near[id(value)], self.found[id(value)] = path, value
        return "module", id(value)

    def _class(self, path: str, value: Any, plain: bool) -> Any:
        return self._class_of(value)

    def _class_of(self, kind: type) -> Any:
        """Class attributes are state too, and a replaced method is another forward."""
        for base in kind.__mro__:
            if _library_of(base) not in FIXED:
                self.near[id(base)], self.found[id(base)] = base.__name__, base
        return "class", id(kind)

    def _tensor(self, path: str, value: Any, plain: bool) -> Any:
        self.tensors.append(value)
        return "tensor", id(value)

    def _attributes_of_module(self, module: torch.nn.Module) -> Any:
        path, own = self.path, module.__dict__
        self.places.append(Place(path, own))
        self._called(type(module))
        found = {}
        for key, child in own.items():
            if key in NOT_IN_A_FORWARD or is_idle(key, child):
                continue
            if key == "forward" and _is_own_forward(module, child):
                continue
            if not path and key in _HOOKS_BY_NUMBER:  # around the call: they run at every replay
                continue
            internal = key in _INTERNALS
            step = path if key in _TABLES else f"{path}{step_name(key)}"
            at = len(self.places)
            described = self._value(step, child, not internal)
            if key in ("_parameters", "_buffers"):
                self.places[at].ordered = False  # they are read by name alone
            # a hook's number is another one each time that it is registered
            found[key] = [*described[2].values()] if key in _HOOKS_BY_NUMBER else described
        return self._class_of(type(module)), found

    def _attributes_of_class(self, cls: type) -> Any:
        attributes = ClassAttributes(cls)
        self.places.append(Place(self.path, attributes))
        library = _library_of(cls) in LIBRARIES
        found = {}
        for name, child in attributes.read().items():
            is_function = isinstance(child, types.FunctionType)
            if is_function and library:
                found[name] = Same(child)
            elif is_function or not (name.startswith("__") or is_idle(name, child)):
                found[name] = self._value(f"{self.path}.{name}", child)
        return found

    def _called(self, kind: type) -> None:
        if _library_of(kind) in FIXED:  # others are nodes
            self.methods += (
                (kind, name) for name in ("forward", "__call__") if _defines(kind, name)
            )

    # ---- what is described by what it holds

    def _object(self, path: str, value: Any, plain: bool) -> Any:
        self.objects.append(value)
        kind = type(value)
        self._called(kind)
        found = self._attributes(path, value)
        if members := _members(kind):
            slots = SlotAttributes(value, members)
            self.places.append(Place(path, slots))
            held = slots.read().items()
            found |= {f"slot {key}": self._value(f"{path}.{key}", child) for key, child in held}
        # what C code keeps in an object, as of a `Decimal`, cannot be looked at
        return self._class_of(kind), found, Same(value) if _keeps_more(kind, len(members)) else None

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
                (_key(key), self._value(f"{path}{step_name(key)}", child))
                for key, child in value.items()
                if not is_idle(key, child)
            ]
            return "dict", kind, dict(pairs), None if plain else [key for key, _ in pairs]
        if isinstance(value, (list, deque, set)):
            self.places.append(Place(path, value))
        if isinstance(value, (set, frozenset)):
            found = {_key(member) for member in value}
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

    # ---- what is not looked into

    def _weak_reference(self, path: str, value: Any, plain: bool) -> Any:
        return self._value(f"{path}()", value())

    def _bytes(self, path: str, value: Any, plain: bool) -> Any:
        what = f"attribute {path.lstrip('.')} is a {type(value).__name__}"
        self.blocker = f"{what}: use a numpy array"
        return "bytes"

    def _number(self, path: str, value: Any, plain: bool) -> Any:
        """Of a class derived from a plain one."""
        kind = type(value)
        plain_one: Any = next(base for base in kind.__mro__ if base in _BASES)
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
        before = value.before if isinstance(value, Slot) else None
        return "dit_graph" if before is None else self._value(path, before)


def _plain_value(node: Node, path: str, value: Any, plain: bool) -> Any:
    return type(value), value


def _np_scalar(node: Node, path: str, value: Any, plain: bool) -> Any:
    return type(value), value.tobytes()


def _visitor(kind: type) -> Visitor:
    """How values of one type are described, looked up once a type."""
    for base, visitor in (
        (enum.Enum, _plain_value),
        (np.generic, _np_scalar),
        (_PLAIN, _plain_value if kind in _PLAIN else Node._number),
        ((float, complex), Node._number),
        ((bytearray, array.array, memoryview), Node._bytes),
        (weakref.ReferenceType, Node._weak_reference),
        (imported(PIPELINE), Node._same_object),
        (_OPAQUE, Node._same_object),
        (torch.nn.Module, Node._near),
        (type, Node._class),
        (torch.Tensor, Node._tensor),
        (np.ndarray, Node._array),
        (imported(HOOKS), Node._registry),
        (functools.partial, Node._partial),
        (_GENERATORS, Node._generator),
        (types.MethodType, Node._method),
        (types.FunctionType, Node._function),
        ((property, staticmethod, classmethod, functools.partialmethod, functools.cached_property,
          functools._lru_cache_wrapper), Node._around_function),
        (ContextVar, Node._context_variable),
        (threading.local, Node._thread_local),
    ):  # fmt: skip
        if issubclass(kind, base):
            return visitor
    if hasattr(kind, "__next__"):
        return Node._iterator
    if issubclass(kind, (dict, list, deque, set, frozenset, tuple)):
        return Node._container
    module = kind.__module__
    if module.startswith("dit_graph.") and not module.startswith("dit_graph.embedded"):
        return Node._ours
    return Node._same_object if _library_of(kind) in _FOREIGN else Node._object


def _keeps_more(kind: type, slots: int) -> bool:
    """Whether objects of a class keep more than attributes, by their size."""
    offsets = (kind.__dictoffset__, kind.__weakrefoffset__)
    known = slots + sum(offset > 0 for offset in offsets)
    return bool(kind.__itemsize__) or kind.__basicsize__ > object.__basicsize__ + 8 * known


def _key(key: Any) -> Any:
    """A key of a dict, or a member of a set, as a value that can be hashed."""
    if isinstance(key, _BASES):
        return type(key), repr(key) if isinstance(key, (float, complex)) else key
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    return id(key) if isinstance(key, (torch.nn.Module, torch.Tensor, type)) else Same(key)


def _is_own_forward(module: torch.nn.Module, value: Any) -> bool:
    """Whether an attribute is the class's own `forward`, which hooks leave behind as they go."""
    return (
        type(value) is types.MethodType
        and value.__self__ is module
        and value.__func__ is getattr(type(module), "forward", None)
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


def differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, bool]]:
    """Where two descriptions of one thing differ, by the names that its parts have, and whether
    there a dict that may be a memo table got a new key."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            name = key[1] if isinstance(key, tuple) else str(key).removeprefix("slot ")
            at = path if key in _TABLES else f"{path}{step_name(name)}"
            if key in old and key in new:
                yield from differences(old[key], new[key], at)
            else:
                yield at, False
    elif type(old) not in (tuple, list) or type(old) is not type(new) or len(old) != len(new):
        yield path, False
    elif old[:2] == new[:2] and old[0] == "dict" and new[3] is None:
        grown = new[2].keys() - old[2].keys()
        yield from ((f"{path}{step_name(key[1])}", True) for key in grown)
        rest = {key: value for key, value in new[2].items() if key not in grown}
        yield from differences(old[2], rest, path)
    else:
        for i, (a, b) in enumerate(zip(old, new)):
            step = f"[{i}]" if isinstance(old, list) else ""
            if isinstance(a, (dict, tuple, list)):
                yield from differences(a, b, f"{path}{step}")
            elif a != b:
                yield f"{path}{step}", False
