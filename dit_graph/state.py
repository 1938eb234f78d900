"""The Python state and the weights that a recording stands on: read, compared, put back.

A `Fingerprint` is a flat list of containers with what they held, and of tensors with their
addresses. It is compared by identity, then by value, and never hashed.
"""

import types
from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch

from dit_graph.guards import DeviceNumber
from dit_graph.places import REMOVED, ClassAttributes, Place, SlotAttributes
from dit_graph.walk import Walk

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_STORAGE = "storage of a parameter, buffer or tensor attribute"
_GRAD = "requires_grad of a parameter, buffer or tensor attribute"


class Fingerprint:
    """What a module holds now: every plain attribute, list, dict and helper object, by place.

    Reads through submodules, attention processors, hook registries and their states, partials and
    bound methods, and through the classes of these that are no library's. Functions and globals
    are taken by identity and not looked into.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        walk = Walk(module)
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
        self._rest: list[Place] = []
        for place in self._places:
            held = (
                place.container.read()
                if type(place.container) is ClassAttributes
                else place.container
            )
            if isinstance(held, (SlotAttributes, np.ndarray)) or (isinstance(held, set) and held):
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
            place.plain and key is not REMOVED and key not in place.before
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
