"""The instance attribute that takes a method's place on one object, and gives it back."""

import copy
import functools
import gc
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from dit_graph.links import COMPILED, innermost

_COPY = "__reduce_ex__"  # `copy.copy`, `copy.deepcopy` and `pickle` look it up on the object first
_MODULE_CALLS = torch.nn.Module.__module__  # the file whose functions call a module's `forward`
_OF_A_METHOD = {"__code__", "__defaults__", "__kwdefaults__", "__func__", "__self__", "__globals__"}


class Slot:
    """A callable put into `owner.__dict__[name]`; a pass-through once it is switched off.

    Hooks of other libraries replace the same attribute, so `remove` restores it only while it still
    holds this slot. Copies of the owner, deep and shallow, and an unpickled one get what was there
    before; where a library copies the `__dict__` (DataParallel's replicas), the copy is noticed
    when it is called. To tracers and exporters of torch it is the method that it stands for.
    """

    # not in its `__dict__`, which hooks copy into the callable that they wrap around it
    __slots__ = ("__dict__", "__weakref__", "_before", "_call", "_name", "_owner", "active")

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        mark = owner.__dict__.get(_COPY)
        if type(mark) is Copying and mark.owner is not owner:  # somebody else's slots
            mark.take_out(owner.__dict__)
        self._owner, self._name, self._call = owner, name, call
        space, key = self._where()
        self._before = space.get(key)
        self.active = False
        functools.update_wrapper(self, self.original, updated=())
        self.__signature__ = inspect.signature(self.original)

    @property
    def original(self) -> Callable[..., Any]:
        """What was there before: a hook's callable, or the class's method as it is now."""
        before: Callable[..., Any] | None = self._before
        return plain_method(self._owner, self._name) if before is None else before

    @property
    def before(self) -> Callable[..., Any] | None:
        """What a hook or the user had put there before; None for the class's method."""
        before: Callable[..., Any] | None = self._before
        return before

    def _where(self) -> tuple[dict[str, Any], str]:
        """The dict and the key that it takes."""
        return self._owner.__dict__, self._name

    def install(self) -> None:
        self.active = True
        space, key = self._where()
        space[key] = self
        own = self._owner.__dict__
        own.setdefault(_COPY, Copying(self._owner))
        if type(own[_COPY]) is Copying:
            own[_COPY].slots.append(self)

    def remove(self) -> None:
        self.active = False
        own = self._owner.__dict__
        space, key = self._where()
        if space.get(key) is self:
            self._give_back(space, key)
        mark = own.get(_COPY)
        if type(mark) is Copying and not any(slot.active for slot in mark.slots):
            del own[_COPY]  # what has a copy of it still needs the slots in it

    def _give_back(self, space: dict[str, Any], key: str) -> None:
        """Put into what holds it, or a copy of that, what was there before."""
        if self._before is None:
            del space[key]
        else:
            space[key] = self._before

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
        # the owner is traced, or compiled as a whole: its code, not ours, in this thread alone
        if (
            torch.compiler.is_dynamo_compiling()
            or torch.compiler.is_exporting()
            or torch._C._get_tracing_state() is not None
        ):
            if self._before is not None:
                return self._before(*args, **kwargs)
            return getattr(type(self._owner), self._name)(self._owner, *args, **kwargs)
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") == _MODULE_CALLS:
            # such a frame drops none of its locals, so that looking at them keeps nothing alive
            caller = frame.f_locals.get("self")
            if caller is not self._owner and self._is_copied_to(caller):
                caller.__dict__[_COPY].take_out(caller.__dict__)
                return getattr(caller, self._name)(*args, **kwargs)
        return self._call(*args, **kwargs) if self.active else self.original(*args, **kwargs)

    def _is_copied_to(self, other: Any) -> bool:
        """Whether somebody copied the owner's `__dict__` into another object's."""
        own = getattr(other, "__dict__", {})
        mark = own.get(_COPY)
        return type(mark) is Copying and mark.owner is self._owner

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_METHOD:  # `torch.export` reads the code of a forward
            return getattr(self.original, name)
        if name == "__get__":  # cache-dit binds what it gives back; dynamo asks the class for it
            return lambda *owner: self
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self._owner))
        return plain_method(copy.deepcopy(self._owner, memo) if twin is None else twin, self._name)

    def __copy__(self) -> Any:
        return self

    def __reduce__(self) -> Any:
        return plain_method, (self._owner, self._name)


class InnerSlot(Slot):
    """A slot below all hooks of a module's `forward`, wherever they carry it."""

    def _where(self) -> tuple[dict[str, Any], str]:
        return innermost(self._owner)

    def remove(self) -> None:
        own = self._owner.__dict__
        if own.get(COMPILED) is self:  # hooks came, so that it is not the innermost any more
            self._give_back(own, COMPILED)
        super().remove()

    def _give_back(self, space: dict[str, Any], key: str) -> None:
        if self._before is None and "_modules" not in space:  # a hook came over it
            space[key] = self.original
        else:
            super()._give_back(space, key)


class Copying:
    """In the owner's `__dict__` beside its slots: how to copy or pickle it without them.

    Keeps them, and so what they lead to, where another hook takes one out of its place.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.slots: list[Slot] = []

    def __call__(self, protocol: Any) -> Any:
        owner = self._copied(sys._getframe(1))
        own = owner.__dict__
        before = dict(own)
        self.take_out(own)  # so that a `__getstate__` or `__reduce__` of its own finds none
        try:
            reduce: Any = type(owner).__reduce_ex__
            reduced = reduce(owner, protocol)
            if isinstance(reduced, tuple):
                return tuple(dict(own) if part is own else part for part in reduced)
            return reduced
        finally:
            own.update(before)

    def _copied(self, frame: Any) -> Any:
        """Who is copied: the owner, or what has its `__dict__`, as DataParallel's replicas have.

        Raises:
            PicklingError: that cannot be told.
        """
        if frame.f_globals.get("__name__") == "copy":
            return frame.f_locals.get("x", self.owner)
        spaces = [r for r in gc.get_referrers(self) if type(r) is dict and r.get(_COPY) is self]
        kind = type(self.owner)
        found = [o for r in spaces for o in gc.get_referrers(r) if type(o) is kind and vars(o) is r]
        if len(found) > 1:
            raise pickle.PicklingError(
                f"the __dict__ of an enabled {kind.__name__} was copied into another"
                " object, and which is pickled cannot be told; call dit_graph.disable first"
            )
        return self.owner

    def take_out(self, own: dict[str, Any]) -> None:
        """Put into the `__dict__` of a copy what was in the owner's before each slot."""
        own.pop(_COPY, None)
        for slot in reversed(self.slots):
            for key in (slot._name, COMPILED):
                if own.get(key) is slot:
                    slot._give_back(own, key)


def plain_method(owner: Any, name: str) -> Any:
    """The class's own method, bound to `owner`."""
    return types.MethodType(getattr(type(owner), name), owner)


def _chain(place: Any) -> list[Any]:
    """What a callable may call in turn: what it wraps, is a part of, or keeps in its closure."""
    links: list[Any] = []
    todo = [place]
    while todo and len(links) < 64:
        link = todo.pop()
        links.append(link)
        if isinstance(link, (types.FunctionType, functools.partial, Slot)):
            cells = getattr(link, "__closure__", None) or ()
            held = [cell.cell_contents for cell in cells if cell != types.CellType()]
            todo += [*held, getattr(link, "__wrapped__", None), getattr(link, "func", None)]
    return links
