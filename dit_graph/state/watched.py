"""What hangs on one module or class, sorted by how it is compared."""

from collections import OrderedDict
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dit_graph.state.describe import NOT_IN_A_FORWARD, Node
from dit_graph.state.places import Attributes, ClassAttributes

MORTAL, KEPT, PLAIN, WRAPPER = range(4)  # what a member of a container is


class Watched:
    """What hangs on one module or class, sorted by how it is compared."""

    def __init__(self, node: Node) -> None:
        self.named: list[tuple[Any, tuple[str, ...]]] = []  # dicts whose order says nothing
        self.listed: list[Any] = []  # what has members in an order
        self.empty: list[Any] = []
        self.asked: list[tuple[Any, Any]] = []  # what has to be asked for its members, and they
        self.with_tensors: list[Any] = []  # of both
        self._kept: list[Any] = []
        direct: set[int] = set()  # the tensors in these, by id
        for place in node.places:
            held = place.container
            if isinstance(held, ClassAttributes):
                held = held.read()
            if isinstance(held, (Attributes, np.ndarray)):
                self.asked.append((held, members_now(held)))
            elif not held:
                self.empty.append(held)
            elif not place.ordered and len(names := _names(held)) > 1:
                self.named.append((held, names))
                self._note(held, direct)
            else:
                self.listed.append(held)
                self._note(held, direct)
        owner = node.owner()
        self.modules = [] if isinstance(owner, type) else [node.owner]
        self.objects = node.objects
        # in tuples and closures, which are kept themselves
        self.loose = [t for t in node.tensors if id(t) not in direct and kind_of(t) == PLAIN]
        node.tensors = []

    def _note(self, held: Any, direct: set[int]) -> None:
        """Keep what is no module, class or tensor, so that its address is not another's."""
        found = [(member, kind_of(member)) for member in chain.from_iterable(in_order(held))]
        self._kept += [member for member, kind in found if kind == KEPT]
        tensors = [id(member) for member, kind in found if kind in (PLAIN, WRAPPER)]
        direct.update(tensors)
        if tensors:
            self.with_tensors.append(in_order(held)[-1])


def _names(held: Any) -> tuple[str, ...]:
    """The keys of a dict whose keys are all names, without those of a module that say nothing."""
    if type(held) not in (dict, MappingProxyType) or set(map(type, held)) != {str}:
        return ()
    if "_non_persistent_buffers_set" not in held:
        return tuple(held)
    return tuple(key for key in held if key not in NOT_IN_A_FORWARD)


def in_order(held: Any) -> list[Any]:
    """A container as what can be read through again and again, so as to see what is there then."""
    kind = OrderedDict if isinstance(held, OrderedDict) else dict
    return [kind.keys(held), kind.values(held)] if isinstance(held, kind) else [held]


def kind_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            return WRAPPER
        return PLAIN if value.layout is torch.strided else MORTAL
    return MORTAL if isinstance(value, (torch.nn.Module, type)) else KEPT


def members_now(held: Any) -> Any:
    return held.copy() if isinstance(held, np.ndarray) else held.read()
