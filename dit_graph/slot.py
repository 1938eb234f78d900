"""The instance attribute that takes a method's place on one object, and gives it back."""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch


class Slot:
    """A callable put into `owner.__dict__[name]`; a pass-through once it is switched off.

    Hooks of other libraries replace the same attribute, so `remove` restores it only while it still
    holds this slot. A deep copy or an unpickled owner gets its own class's plain method; a shallow
    copy shares the slot, which answers for the first owner: call `enable` on the copy.
    """

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        self._owner, self._name, self._call = owner, name, call
        self._before = owner.__dict__.get(name)
        self.active = False
        functools.update_wrapper(self, self.original, updated=())
        self.__signature__ = inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """What was there before: a hook's callable, or the class's method as it is now."""
        before: Callable[..., Any] | None = self._before
        return plain_method(self._owner, self._name) if before is None else before

    def install(self) -> None:
        self.active = True
        object.__setattr__(self._owner, self._name, self)

    def remove(self) -> None:
        self.active = False
        if self._owner.__dict__.get(self._name) is not self:
            return
        if self._before is None:
            del self._owner.__dict__[self._name]
        else:
            self._owner.__dict__[self._name] = self._before

    def calls(self, call: Callable[..., Any]) -> bool:
        """Whether it stands for `call`."""
        return self._call is call

    def leads_here(self) -> bool:
        """Whether calling the owner still reaches this slot, through other hooks or not."""
        registry = self._owner.__dict__.get("_diffusers_hook")
        places = [self._owner.__dict__.get(self._name), self._owner.__dict__.get("_old_forward")]
        for reference in getattr(registry, "_fn_refs", []):
            places += [reference.forward, reference.original_forward]
        return any(self is link for place in places for link in _chain(place))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # the owner is compiled as a whole: its code, not ours; the other threads' calls are ours
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            if self._before is not None:
                return self._before(*args, **kwargs)
            return getattr(type(self._owner), self._name)(self._owner, *args, **kwargs)
        return self._call(*args, **kwargs) if self.active else self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._owner))
        return plain_method(copy.deepcopy(self._owner, memo) if twin is None else twin, self._name)

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        return plain_method, (self._owner, self._name)


def plain_method(owner: Any, name: str) -> Any:
    """The class's own method, bound to `owner`."""
    return types.MethodType(getattr(type(owner), name), owner)


def _chain(place: Any) -> list[Any]:
    links: list[Any] = []
    while place is not None and len(links) < 64:
        links.append(place)
        place = getattr(place, "__wrapped__", None)
    return links
