"""What makes two calls the same recording: the call bound to parameter names, and its context.

Owns binding, flattening and the `GraphKey`. Does not decide anything and keeps no tensor.
"""

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable
from operator import is_not
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph.call.context import Context, context
from dit_graph.errors import Unkeyable
from dit_graph.tape.buffers import misaligned
from dit_graph.tape.trees import is_size

_PLAIN = (
    type(None), bool, int, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, enum.Enum, range,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GraphKey:
    """One signature: argument structure, tensor specs, values of everything else, and the context.

    Values carry their type, so that `1`, `True` and `1.0` stay apart; floats are kept by `repr`, so
    that `nan` equals itself and `-0.0` is not `0.0`.
    """

    spec: Any
    leaves: tuple[Any, ...]
    context: Context

    def __hash__(self) -> int:
        return hash(self.leaves)  # which tell nearly all keys apart; it is asked for at every call

    def without_values(self) -> "GraphKey":
        """The key with every plain value left out: what stays the same when only they vary."""
        leaves = tuple(map(_without_value, self.leaves))
        return GraphKey(self.spec, leaves, self.context._replace(extra_key=None))

    def describe(self) -> str:
        """The tensors and their shapes: `hidden_states 2x1024x64, timestep 2`."""
        shapes = [
            f"{name} {'x'.join(map(str, leaf[1])) or '()'}"
            for name, leaf in self.named_leaves()
            if leaf[0] == "tensor"
        ]
        return ", ".join(shapes) or "no tensors"

    def named_leaves(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The leaves by path, for example `joint_attention_kwargs['scale']`."""
        numbered = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        return [(name, self.leaves[i]) for name, i in named(numbered)]


class Signature:
    """The parameter names of a forward; binds a call without changing how it is made."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in positional]
        keywords = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        self._known = keywords.union(self.names)

    def name(self, index: int) -> str:
        return self.names[index] if index < len(self.names) else f"*{index}"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments by parameter name."""
        return {self.name(i): value for i, value in enumerate(args)} | kwargs

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], extra: Callable[..., Any] | None = None
    ) -> "Call":
        """The call as names and values; `extra` makes one more value of its arguments.

        Raises Unkeyable when a value cannot be compared.
        """
        named = {self.name(i): value for i, value in enumerate(args)} if args else {}
        if not named.keys().isdisjoint(kwargs):
            raise Unkeyable("an argument is given twice")  # the model raises its own TypeError
        named |= kwargs
        # what lands in `**kwargs` may be read in the order in which the caller wrote it
        rest = {name: named.pop(name) for name in [*named] if name not in self._known}
        named = dict(sorted(named.items())) | rest
        try:
            more = None if extra is None else extra(named)
        except Exception as error:
            raise Unkeyable(f"extra_key raised {error!r}") from error
        return Call(named, [self.name(i) for i in range(len(args))], more)


class Call:
    """One call's arguments by name, their tensors in a fixed order, and the key they make."""

    def __init__(self, arguments: dict[str, Any], positional: list[str], extra: Any = None) -> None:
        self.arguments = arguments
        self.positional = positional
        self.tensors: list[torch.Tensor] = []
        self._given: dict[int, int] = {}  # the tensors by id, and where they are in the list
        self._records: list[tuple[Any, list[Any]]] = []  # dataclass arguments and what they held
        self._arrays: list[tuple[Any, tuple[Any, ...]]] = []  # numpy's, and their parts of the key
        leaves, self._spec = _flattened(arguments)
        self._leaves = leaves
        self.key = GraphKey(self._spec, tuple(map(self._leaf, leaves)), context(self._extra(extra)))

    def _extra(self, value: Any) -> tuple[Any, ...] | None:
        """The value of `extra_key`, compared as deeply as an argument."""
        if value is None:
            return None
        leaves, spec = pytree.tree_flatten(value)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise Unkeyable("extra_key returned a tensor; return a plain value")
        try:
            return (spec, *map(self._leaf, leaves))
        except Unkeyable as error:
            raise Unkeyable(f"extra_key returned a {type(value).__name__}: {error}") from error

    def _leaf(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if value.is_nested:
                raise Unkeyable(f"{self._name(value)} is a nested tensor")
            if value.layout is not torch.strided:
                raise Unkeyable(f"{self._name(value)} is a {value.layout} tensor")
            if (place := self._given.setdefault(id(value), len(self.tensors))) < len(self.tensors):
                return ("again", place)  # one object: the forward may ask whether it is
            self.tensors.append(value)
            where = value.dtype, value.device, misaligned(value)
            return ("tensor", value.shape, value.stride(), *where)
        if kind is float:
            return (kind, repr(value))
        if isinstance(value, _PLAIN):
            return (kind, value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
            self._arrays.append((value, array := _array(value)))
            return array
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            leaves, spec = pytree.tree_flatten(_attributes(value), is_size)
            self._records.append((value, leaves))
            return (kind, spec, *map(self._leaf, leaves))
        raise Unkeyable(f"{self._name(value)} is a {kind.__name__}, which has no value to compare")

    def _name(self, value: Any) -> str:
        return next(
            (self.leaf_name(i) for i, v in enumerate(self._leaves) if v is value), "a value"
        )

    def leaf_name(self, index: int) -> str:
        """How a message names the leaf, for example `argument joint_attention_kwargs['scale']`."""
        return f"argument {named(self.arguments)[index][0]}"

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """`(args, kwargs)` as the caller wrote them, with other tensors in the same places."""
        twins = {id(given): other for given, other in zip(self.tensors, tensors)}
        leaves = [_substitute(leaf, twins) for leaf in self._leaves]
        named = pytree.tree_unflatten(leaves, self._spec)
        return [named.pop(name) for name in self.positional], named

    def changed_containers(self) -> bool:
        """Whether the forward put something else into lists, dicts and arrays that it was given."""
        now = [(self.arguments, self._leaves)]
        now += [(_attributes(record), leaves) for record, leaves in self._records]
        flat = [(pytree.tree_leaves(tree, is_size), before) for tree, before in now]
        written = any(_array(array) != before for array, before in self._arrays)
        return written or any(len(a) != len(b) or any(map(is_not, a, b)) for a, b in flat)


_LEAVES = {
    torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.Size, torch.dtype,
    torch.device,
}  # fmt: skip
_SPECS: dict[Any, pytree.TreeSpec] = {}  # by form
_MOST_FORMS = 1024


class _Unusual(Exception):
    """What only pytree can take apart."""


def _flattened(arguments: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """As pytree does it, whose spec is made once for all arguments of one form."""
    leaves: list[Any] = []
    try:
        spec = _SPECS.get(form := _form(arguments, leaves))
    except _Unusual:
        return pytree.tree_flatten(arguments, is_size)
    if spec is None:
        if len(_SPECS) >= _MOST_FORMS:
            _SPECS.clear()
        _SPECS[form] = spec = pytree.tree_structure(arguments, is_size)
    return leaves, spec


def _form(value: Any, leaves: list[Any]) -> Any:
    """What two trees have in common that pytree gives equal specs; collects the leaves."""
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return None
    if kind is dict and set(map(type, value)) <= {str}:
        return dict, *value, *[_form(child, leaves) for child in value.values()]
    if kind is tuple or kind is list:
        return kind, *[_form(child, leaves) for child in value]
    raise _Unusual


def named(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """The leaves in their order, each with its argument's name and the path in it.

    Where a container does not name what it holds (diffusers' outputs), leaves are numbered.
    """
    found: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        try:
            paths = pytree.tree_flatten_with_path(value, is_size)[0]
        except ValueError:
            leaves = pytree.tree_leaves(value, is_size)
            found += [(f"{name}<{i}>", leaf) for i, leaf in enumerate(leaves)]
        else:
            found += [(f"{name}{pytree.keystr(path)}", leaf) for path, leaf in paths]
    return found


def _attributes(record: Any) -> dict[str, Any]:
    """What a dataclass instance holds, fields or not."""
    names = [f.name for f in dataclasses.fields(record)]
    return {
        name: getattr(record, name)
        for name in dict.fromkeys([*names, *getattr(record, "__dict__", ())])
    }


def _substitute(leaf: Any, twins: dict[int, torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return twins[id(leaf)]
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        twin = copy.copy(leaf)
        for name, value in _attributes(leaf).items():
            inner = pytree.tree_map(lambda v: _substitute(v, twins), value, is_leaf=is_size)
            object.__setattr__(twin, name, inner)
        return twin
    return leaf


def _without_value(leaf: tuple[Any, ...]) -> tuple[Any, ...]:
    if leaf[0] == "tensor":
        return leaf
    if isinstance(leaf[1], pytree.TreeSpec):  # a dataclass
        return (*leaf[:2], *map(_without_value, leaf[2:]))
    return leaf[:1]


def _array(value: Any) -> tuple[Any, ...]:
    """A numpy array or scalar as a key has it."""
    return (type(value), str(value.dtype), value.shape, value.tobytes())
