"""What single values are: the same object, a key, a number of a class of its own."""

import functools
import types
import weakref
from typing import Any

import torch

from dit_graph.slot import Slot

PLAIN = (
    str, bytes, int, bool, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, range,
)  # fmt: skip
NUMBERS_AND_TEXT = (*PLAIN, float, complex)


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


def keeps_more(kind: type, slots: int) -> bool:
    """Whether objects of a class keep more than attributes, by their size."""
    offsets = (kind.__dictoffset__, kind.__weakrefoffset__)
    known = slots + sum(offset > 0 for offset in offsets)
    return bool(kind.__itemsize__) or kind.__basicsize__ > object.__basicsize__ + 8 * known


def key_of(key: Any) -> Any:
    """A key of a dict, or a member of a set, as a value that can be hashed."""
    if isinstance(key, NUMBERS_AND_TEXT):
        return type(key), repr(key) if isinstance(key, (float, complex)) else key
    if isinstance(key, tuple):
        return tuple(map(key_of, key))
    return id(key) if isinstance(key, (torch.nn.Module, torch.Tensor, type)) else Same(key)


def is_own_forward(module: torch.nn.Module, value: Any) -> bool:
    """Whether an attribute is the class's own `forward`, which hooks leave behind as they go, or a
    slot of ours over it."""
    if isinstance(value, Slot):
        return value.before is None or is_own_forward(module, value.before)
    return (
        type(value) is types.MethodType
        and value.__self__ is module
        and value.__func__ is getattr(type(module), "forward", None)
    )


def library_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def defines(kind: type, name: str) -> bool:
    """Itself or by a base; the metaclass, which makes objects, does not count."""
    return any(name in vars(base) for base in kind.__mro__)


def members_of(kind: type) -> dict[str, Any]:
    """The descriptors that stand for `__slots__`, those of library classes too."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }
