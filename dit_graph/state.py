"""The Python state and the weights that a recording stands on: read, compared, put back.

A `Fingerprint` is a flat list of containers with what they held, and of tensors with their
addresses. It is compared by identity, then by value, and never hashed.
"""

import enum
import functools
import io
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.hooks import HookRegistry
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _NormBase

from dit_graph.guards import DeviceNumber

_OPAQUE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, io.IOBase,
    str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Generator,
    logging.Logger, logging.LoggerAdapter, DiffusionPipeline,
)  # fmt: skip
_FOREIGN = {
    "builtins", "logging", "threading", "inspect", "weakref", "functools", "_thread", "pathlib",
}  # fmt: skip
_LIBRARIES = {"torch", "diffusers", "transformers", "numpy", "dit_graph"} | sys.stdlib_module_names
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_INTERNALS = frozenset(vars(torch.nn.Module()))
_STORAGE = "storage of a parameter, buffer or tensor attribute"
_GRAD = "requires_grad of a parameter, buffer or tensor attribute"
_REMOVED = object()


@dataclass(eq=False, slots=True)
class _Place:
    """One container with what it held; `plain` for a dict that may be a memo table."""

    path: str
    container: Any
    before: Any
    plain: bool = False

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, key, value now) for each; the key `_REMOVED` where there is none to name."""
        now, before = _read(self.container), self.before
        if isinstance(now, (dict, types.MappingProxyType)):
            return _dict_differences(now, before)
        if isinstance(now, (list, deque)):
            return _list_differences(now, before)
        same = _same_array(now, before) if isinstance(now, np.ndarray) else now == before
        return iter(() if same else (("", _REMOVED, None),))

    def restore(self) -> None:
        container, before = self.container, self.before
        if isinstance(container, (list, deque)):
            container.clear()
            container.extend(before)
        elif isinstance(container, (dict, set)):
            container.clear()
            container.update(before)
        elif isinstance(container, np.ndarray):
            if container.shape == before.shape:
                np.copyto(container, before)
        else:
            container.restore(before)


class _Attributes:
    """Attributes that no writable dict holds."""

    def read(self) -> Any:
        raise NotImplementedError

    def __setitem__(self, name: str, value: Any) -> None:
        raise NotImplementedError

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    def restore(self, before: dict[str, Any]) -> None:
        now = dict(self.read())
        for name in now.keys() - before.keys():
            if not name.startswith("__"):
                del self[name]
        for name, value in before.items():
            if now.get(name, _REMOVED) is not value:
                self[name] = value


class _Class(_Attributes):
    def __init__(self, cls: type) -> None:
        self._cls = cls

    def read(self) -> Any:
        return vars(self._cls)

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        type.__delattr__(self._cls, name)


class _Slots(_Attributes):
    """The `__slots__` of one object, those that are set."""

    def __init__(self, owner: Any, members: dict[str, Any]) -> None:
        self._owner, self._members = owner, members

    def read(self) -> dict[str, Any]:
        found = {}
        for name, member in self._members.items():
            try:
                found[name] = member.__get__(self._owner)
            except AttributeError:
                continue
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._members[name].__delete__(self._owner)


class Fingerprint:
    """What a module holds now: every plain attribute, list, dict and helper object, by place.

    Reads through submodules, attention processors, hook registries and their states, partials and
    bound methods, and through the classes of these that are no library's. Functions and globals
    are taken by identity and not looked into.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        walk = _Walk(module)
        self.blocker = walk.blocker  # what is held but can be neither compared nor put back
        self._places = walk.places
        self._tensors = walk.tensors
        self._addresses = self._now()
        self._flatten()

    def _flatten(self) -> None:
        """All that is compared by identity in one list: a thousand submodules have many dicts."""
        self._empty: list[Any] = []
        self._sized: list[Any] = []
        self._live: list[Iterable[Any]] = []  # views, so they show what is there when they are read
        self._rest: list[_Place] = []
        for place in self._places:
            held = place.container.read() if type(place.container) is _Class else place.container
            if isinstance(held, (_Slots, np.ndarray)) or (isinstance(held, set) and held):
                self._rest.append(place)
            elif not held:
                self._empty.append(held)
            else:
                self._sized.append(held)
                self._live += _views(held)
        self._sizes = list(map(len, self._sized))
        self._held = list(chain.from_iterable(self._live))

    def _sizes_stayed(self) -> bool:
        return not any(self._empty) and list(map(len, self._sized)) == self._sizes

    def _identical(self) -> bool:
        return (
            self._sizes_stayed()
            and all(map(is_, chain.from_iterable(self._live), self._held))
            and not any(next(place.differences(), None) for place in self._rest)
            and self._now() == self._addresses
        )

    def _now(self) -> list[tuple[Any, ...]]:
        return [_address(t) for t in self._tensors]

    def _tensor_change(self) -> str | None:
        now = self._now()
        if now == self._addresses:
            return None
        stayed = all(a[:-1] == b[:-1] for a, b in zip(now, self._addresses))
        return _GRAD if stayed else _STORAGE

    def first_change(self) -> str | None:
        """Where the state differs now, or None."""
        if self._identical():
            return None
        for place in self._places:
            if change := next(place.differences(), None):
                return f"{place.path}{change[0]}".lstrip(".") or "a parameter"
        change_of_tensor = self._tensor_change()
        if change_of_tensor is None and self._sizes_stayed():
            self._flatten()  # other objects of the same value: from now on these are the known ones
        return change_of_tensor

    def changes(self) -> list[str]:
        """All places that differ; a stand-in left in the state becomes its number."""
        if self._identical():
            return []
        found = []
        for place in self._places:
            for name, key, value in list(place.differences()):
                found.append(f"{place.path}{name}".lstrip("."))
                if type(value) is DeviceNumber:
                    place.container[key] = value.value
        if change := self._tensor_change():
            found.append(change)
        return found

    def only_grew(self) -> bool:
        """Whether all that differs is a new key in a plain dict: a memo table, as a rule."""
        if self._identical():
            return True
        grew = all(
            place.plain and key is not _REMOVED and key not in place.before
            for place in self._places
            for _, key, _ in place.differences()
        )
        return grew and self._tensor_change() is None

    def restore(self) -> None:
        """Put every container back as it was."""
        if self._identical():
            return
        for place in self._places:
            if next(place.differences(), None) is not None:
                place.restore()


class _Walk:
    """Everything that can be reached from a module, each thing once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.places: list[_Place] = []
        self.tensors: list[torch.Tensor] = []
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
        if issubclass(kind, _OPAQUE):
            return None
        for base, visitor in (
            (torch.Tensor, self._tensor),
            (np.ndarray, self._array),
            (HookRegistry, self._registry),
            (functools.partial, self._partial),
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
        self._classes(kind)
        return self._object

    def _tensor(self, path: str, value: Any, plain: bool) -> None:
        self.tensors.append(value)

    def _array(self, path: str, value: Any, plain: bool) -> None:
        self.places.append(_Place(path, value, value.copy()))

    def _iterator(self, path: str, value: Any, plain: bool) -> None:
        self.blocker = f"attribute {path.lstrip('.')} is an iterator"

    def _registry(self, path: str, value: Any, plain: bool) -> None:
        self._container(path, value.hooks, False)  # the rest changes as contexts come and go

    def _partial(self, path: str, value: Any, plain: bool) -> None:
        for name in ("func", "args", "keywords", "__dict__"):
            self._todo.append((f"{path}.{name}", getattr(value, name), False))

    def _method(self, path: str, value: Any, plain: bool) -> None:
        self._todo.append((f"{path}.__self__", value.__self__, False))

    def _object(self, path: str, value: Any, plain: bool) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.places.append(_Place(path, attributes, dict(attributes)))
            module = isinstance(value, torch.nn.Module)
            for key, child in attributes.items():
                internal = module and key in _INTERNALS
                inside = internal and key in ("_modules", "_parameters", "_buffers")
                step = "" if inside else _step(key)
                self._todo.append((f"{path}{step}", child, not internal))
        if members := self._members[type(value)]:
            slots = _Slots(value, members)
            self.places.append(_Place(path, slots, held := slots.read()))
            self._todo += ((f"{path}.{name}", child, True) for name, child in held.items())

    def _container(self, path: str, value: Any, plain: bool) -> None:
        if isinstance(value, dict):
            self.places.append(_Place(path, value, dict(value), plain))
            self._todo += ((f"{path}{_step(key)}", child, True) for key, child in value.items())
            return
        if isinstance(value, (list, deque, set)):
            self.places.append(_Place(path, value, value.copy()))
        self._todo += ((f"{path}[{i}]", child, True) for i, child in enumerate(value))

    def _classes(self, kind: type) -> None:
        """Class attributes are state too, and a replaced method is another forward."""
        for base in kind.__mro__:
            if _library_of(base) in _LIBRARIES or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            held = dict(vars(base))
            self.places.append(_Place(base.__name__, _Class(base), held))
            self._todo += (
                (f"{base.__name__}.{name}", child, True)
                for name, child in held.items()
                if not name.startswith("__")
            )


_Visitor = Callable[[str, Any, bool], None]


def _library_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _members(kind: type) -> dict[str, Any]:
    """The descriptors that stand for `__slots__`, those of library classes too."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def _address(t: torch.Tensor) -> tuple[Any, ...]:
    if type(t) in _PLAIN_TENSORS and t.layout is torch.strided:
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad
    return id(t), t.requires_grad


def _views(held: Any) -> list[Iterable[Any]]:
    if isinstance(held, dict):
        return [dict.keys(held), dict.values(held)]  # an OrderedDict's own are slow
    if isinstance(held, types.MappingProxyType):
        return [held.keys(), held.values()]
    return [held]


def _read(container: Any) -> Any:
    return container.read() if isinstance(container, _Attributes) else container


def _step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def _dict_differences(now: Any, before: dict[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, value in now.items():
        if not (_unchanged(value, before[key]) if key in before else _idle(key, value)):
            yield _step(key), key, value
    if any(key not in now for key in before):
        yield " (something was removed)", _REMOVED, None


def _list_differences(now: Any, before: Any) -> Iterator[tuple[str, Any, Any]]:
    for i, value in enumerate(now):
        if i >= len(before) or not _unchanged(value, before[i]):
            yield f"[{i}]", i, value
    if len(now) < len(before):
        yield " (something was removed)", _REMOVED, None


def _same_array(now: Any, before: Any) -> bool:
    alike = now.dtype == before.dtype and now.shape == before.shape
    return bool(alike and now.tobytes() == before.tobytes())


def _idle(key: Any, value: Any) -> bool:
    """What appears by being looked for: a model's empty hook registry, a class's annotations."""
    if isinstance(value, HookRegistry):
        return not value.hooks
    return isinstance(key, str) and key.startswith("__annot")


def _unchanged(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_unchanged, now, before))
    if isinstance(now, types.MethodType):
        return now.__self__ is before.__self__ and now.__func__ is before.__func__
    if isinstance(now, np.generic):
        return _same_array(now, before)
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # -0.0 is not 0.0, nan is nan
    plain = (bool, int, str, bytes, torch.dtype, torch.device, torch.Size)
    return isinstance(now, plain) and now == before


def global_hook() -> str | None:
    """Global hooks can come and go at any call and belong to no module; None without any."""
    hooks = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
    return "a global forward hook would not run" if hooks else None


def blocker(module: torch.nn.Module, device: torch.device) -> str | None:
    """Why this module cannot be replayed as it stands now, or None."""
    for path, child in module.named_modules():
        at = f" on {path}" if path else ""
        if path and (child._forward_hooks or child._forward_pre_hooks):
            return f"a forward hook{at} would not run"
        if isinstance(child, _NormBase) and child.training and child.track_running_stats:
            return f"batch norm in training mode: {path or type(child).__name__}"
        hook = child.__dict__.get("_hf_hook")
        if hook is not None and (path or not _hook_is_outside(module)):
            kind = type(hook).__name__
            offload = "offload" in kind.lower() or getattr(hook, "offload", False)
            return f"{'offload hooks present' if offload else 'an accelerate hook'}: {kind}{at}"
        registry = child.__dict__.get("_diffusers_hook")
        for name, inner in getattr(registry, "hooks", {}).items():
            if "offload" in type(inner).__name__.lower():
                return f"offload hooks present: {name}{at}"
    devices = {p.device for p in module.parameters()} - {device}
    return f"parameters are on {devices.pop()}, the graphs on {device}" if devices else None


def _hook_is_outside(module: torch.nn.Module) -> bool:
    from dit_graph.slot import Slot

    return isinstance(getattr(module, "_old_forward", None), Slot)


def needs_grad(module: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
