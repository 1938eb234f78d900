"""The module's state as it is now, for one comparison at every call.

Compared by identity: `==` takes 1 for True and for 1.0, and waits for the device where it meets
tensors. Of modules, classes and tensors only the addresses are kept, never the objects, so that a
view keeps no weights alive; `watcher.py` throws it away when one of them goes, before its address
can come again.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, compress
from operator import call, is_, itemgetter
from typing import Any, cast

import numpy as np
import torch
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dit_graph.state.contents import Visitor
from dit_graph.state.describe import Node
from dit_graph.state.places import Place, same_array
from dit_graph.state.values import Same
from dit_graph.state.watched import PLAIN, WRAPPER, Watched, in_order, kind_of, members_now

_REPLACED = object()
STORAGE = "storage of a parameter, buffer or tensor attribute"


class View:
    """The nodes that can be reached from a module, and what they held when they were read."""

    def __init__(self, module: torch.nn.Module, region: bool = False) -> None:
        self._root = id(module)
        self._region = region
        self._visitors: dict[type, Visitor] = {}
        self._watched: dict[int, Watched] = {}
        self.nodes: dict[int, Node] = {}
        self._read([("", module)])

    def _read(self, todo: list[tuple[str, Any]]) -> None:
        """Read these modules and classes, and what is new below; forget what is below none."""
        while todo:
            path, owner = todo.pop()
            inner = self._region and id(owner) == self._root
            self.nodes[id(owner)] = node = Node(owner, path, self._visitors, inner)
            self._watched[id(owner)] = Watched(node)
            found = reversed(node.found.items())
            todo += [(node.near[key], one) for key, one in found if key not in self.nodes]
            node.found = {}
        reached, ahead = {self._root}, [self._root]
        while ahead:
            new = self.nodes[ahead.pop()].near.keys() - reached
            reached |= new
            ahead += new
        self.nodes = {key: node for key, node in self.nodes.items() if key in reached}
        self._watched = {key: self._watched[key] for key in self.nodes}
        self._flatten()

    def refresh(self) -> None:
        """Read again what differs."""
        nodes = [self.nodes[key] for key in self._changed()]
        owners = [(node.path, node.owner()) for node in nodes]
        self._read([(path, owner) for path, owner in owners if owner is not None])

    @property
    def blocker(self) -> str:
        """Why what the module holds can be neither compared nor put back, or an empty string."""
        return next((node.blocker for node in self.nodes.values() if node.blocker), "")

    def description(self) -> dict[Any, Any]:
        """What `==` compares with that of another state: nodes by id, methods, tensors."""
        found: dict[Any, Any] = {key: node.description for key, node in self.nodes.items()}
        methods = [*zip(*self._plain), *self._rest]
        found |= {("method", *m): Same(f) for m, f in zip(methods, self._functions)}
        facts = zip(self.tensors(), self._at, self._facts)
        return found | {("tensor", id(t)): fact for t, *fact in facts}

    def objects(self) -> list[Any]:
        """Whose class another may replace."""
        return [*map(call, self._modules), *self._objects]

    def owners(self) -> list[Any]:
        """The modules and classes that it is of."""
        return [node.owner() for node in self.nodes.values()]

    def tensors(self) -> list[torch.Tensor]:
        """Those with an address, and the ones that others keep their data in.

        Read from where they lie: a weak reference to a tensor would forbid `swap_tensors`, by which
        `Module.to` moves quantized weights.
        """
        members = list(chain.from_iterable(self._with_tensors))
        wrappers = compress(members, self._are_wrappers) if self._has_wrappers else ()
        inside = chain.from_iterable(map(_inside, wrappers))
        return [*compress(members, self._are_plain), *self._loose, *inside]

    def places(self) -> list[Place]:
        """Every container, each once."""
        found = chain.from_iterable(node.places for node in self.nodes.values())
        return list({id(place.container): place for place in found}.values())

    # ---- what is compared at every call

    def _flatten(self) -> None:
        """One list of all that is compared alike: a thousand modules have thousands of dicts."""
        parts = self._watched.items()
        named = [(key, *entry) for key, part in parts for entry in part.named]
        listed = [(key, held) for key, part in parts for held in part.listed]
        empty = [(key, held) for key, part in parts for held in part.empty]
        getters = {names: itemgetter(*names) for names in {names for *_, names in named}}
        self._empty = [held for _, held in empty]
        self._owners_of_empty = [key for key, _ in empty]
        self._asked = [(key, *entry) for key, part in parts for entry in part.asked]
        self._named = [held for _, held, _ in named]
        self._getters = [getters[names] for *_, names in named]
        self._listed = [in_order(held) for _, held in listed]
        self._owners = np.array([key for key, *_ in (*named, *listed)])
        self._sized: list[Any] = [held for _, held, *_ in (*named, *listed)]
        self._sizes = list(map(len, self._sized))
        counts = [len(names) for *_, names in named]
        self._counts = np.array(counts + [sum(map(len, views)) for views in self._listed])
        self._count = int(self._counts.sum())
        self._addresses = _addresses(chain.from_iterable(self._members()), self._count)
        self._flatten_tensors()
        self._flatten_objects()

    def _flatten_tensors(self) -> None:
        self._with_tensors = [held for p in self._watched.values() for held in p.with_tensors]
        kinds = list(map(kind_of, chain.from_iterable(self._with_tensors)))
        self._are_plain = [kind == PLAIN for kind in kinds]
        self._are_wrappers = [kind == WRAPPER for kind in kinds]
        self._has_wrappers = any(self._are_wrappers)
        self._loose = [t for part in self._watched.values() for t in part.loose]
        self._at = self._at_now()
        self._facts = _facts(self.tensors())
        self._guard = _guard(self.tensors())
        self.has_buffers = not all(isinstance(t, torch.nn.Parameter) for t in self.tensors())

    def _flatten_objects(self) -> None:
        parts = self._watched.items()
        modules = [(key, ref) for key, part in parts for ref in part.modules]
        objects = [(key, value) for key, part in parts for value in part.objects]
        self._modules = [ref for _, ref in modules]
        self._objects = [value for _, value in objects]
        self._owners_of_objects = [key for key, _ in (*modules, *objects)]
        self._classes = list(self._classes_now())
        methods = chain.from_iterable(node.methods for node in self.nodes.values())
        self._methods = list(dict.fromkeys(methods))
        stable = [m for m in self._methods if getattr(*m) is getattr(*m)]  # no descriptor's own
        self._plain = [cls for cls, _ in stable], [name for _, name in stable]
        self._rest = [m for m in self._methods if m not in stable]
        self._functions = self._functions_now()

    def _members(self) -> Iterator[Iterable[Any]]:
        return chain(map(call, self._getters, self._named), chain.from_iterable(self._listed))

    def _classes_now(self) -> Iterator[type]:
        return map(type, chain(map(call, self._modules), self._objects))

    def _functions_now(self) -> list[Any]:
        return [*map(getattr, *self._plain), *(_found(*method) for method in self._rest)]

    def _at_now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(torch.Tensor.data_ptr, self.tensors()))

    def weights_stayed(self) -> bool:
        """Whether every tensor lies where it lay, so that what a replay reads is not freed."""
        try:
            return self._at_now() == self._at
        except (KeyError, TypeError):  # one is gone, or something else is in its place
            return False

    def _look_alike(self) -> bool:
        """Whether tensors have the dtypes, shapes and strides that they had.

        dynamo's guards compare them several times faster than Python. They hold in the mode that
        they were made in, and look at `requires_grad` too, which is no state without gradients.
        """
        tensors = self.tensors()
        if self._guard.check(*tensors):
            return True
        if _facts(tensors) != self._facts:
            return False
        self._guard = _guard(tensors)
        return True

    def is_same(self) -> bool:
        """Whether everything is the object that it was; `weights_stayed` compares the rest."""
        if any(self._empty) or list(map(len, self._sized)) != self._sizes:
            return False
        try:
            now = _addresses(chain.from_iterable(self._members()), self._count)
        except KeyError:  # a key was replaced by another
            return False
        return (
            now == self._addresses
            and all(map(is_, self._classes_now(), self._classes))
            and all(map(is_, self._functions_now(), self._functions))
            and all(_same_members(members_now(held), before) for _, held, before in self._asked)
            and self._look_alike()
        )

    def _changed(self) -> set[int]:
        """The nodes at which something was replaced, by id."""
        same = np.array(list(map(len, self._sized))) == self._sizes
        groups = [self._group(i) for i in np.flatnonzero(same).tolist()]
        mask = np.repeat(same, self._counts)
        now = _addresses(chain.from_iterable(groups), int(mask.sum()))
        differ = np.frombuffer(now, np.int64) != np.frombuffer(self._addresses, np.int64)[mask]
        of_entry = np.repeat(np.arange(len(same)), self._counts)[mask]
        found = set(self._owners[~same]) | set(self._owners[of_entry[differ]])
        found.update(key for key, held in zip(self._owners_of_empty, self._empty) if held)
        found.update(k for k, held, was in self._asked if not _same_members(members_now(held), was))
        classes = zip(self._owners_of_objects, self._classes_now(), self._classes)
        return found | {key for key, now, was in classes if now is not was}

    def _group(self, entry: int) -> Iterable[Any]:
        """The members of one container; of one whose keys were replaced none that was there."""
        if entry >= len(self._named):
            return chain.from_iterable(self._listed[entry - len(self._named)])
        try:
            return cast(tuple[Any, ...], self._getters[entry](self._named[entry]))
        except KeyError:
            return [_REPLACED] * int(self._counts[entry])


def _addresses(values: Iterable[Any], count: int) -> bytes:
    """The addresses of so many objects, which numpy gets several times faster than `id`."""
    return np.fromiter(values, dtype=object, count=count).tobytes()


def _same_members(now: Any, before: Any) -> bool:
    if isinstance(now, np.ndarray):
        return same_array(now, before)
    return now.keys() == before.keys() and all(v is before[k] for k, v in now.items())


def _found(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _facts(tensors: list[torch.Tensor]) -> list[Any]:
    return [(t.size(), t.stride(), t.dtype) for t in tensors]


def _guard(tensors: list[torch.Tensor]) -> Any:
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _inside(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized or other wrapper keeps its data in, which kernels read."""
    for name in cast(Any, t).__tensor_flatten__()[0]:
        inner: Any = getattr(t, name)
        if is_traceable_wrapper_subclass(inner):
            yield from _inside(cast(torch.Tensor, inner))
        elif isinstance(inner, torch.Tensor) and inner.layout is torch.strided:  # or a device mesh
            yield inner
