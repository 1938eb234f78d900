"""Says in which field a call differs from the nearest one that was recorded."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dit_graph.call.context import Context
from dit_graph.call.key import GraphKey, named

_ABSENT = ("absent",)


def miss(key: GraphKey, recorded: Iterable[GraphKey]) -> str:
    """For example `hidden_states dim 1: 1024 vs 4096`: this call against the nearest recorded one.

    Empty when nothing was recorded yet.
    """
    found = [(len(d := differences(key, other)), _gap(key, other), d) for other in recorded]
    return "; ".join(min(found)[2]) if found else ""


def differences(key: GraphKey, other: GraphKey) -> list[str]:
    """Every field in which two keys differ, by the name of the argument."""
    mine, its = _fields(key), _fields(other)
    found = []
    for name in dict.fromkeys([*mine, *its]):
        a, b = mine.get(name, _ABSENT), its.get(name, _ABSENT)
        if a != b:
            found += _leaf(name, a, b)
    pairs = zip(Context._fields[:-1], key.context, other.context)
    if key.context.extra_key != other.context.extra_key:
        found.append(f"extra_key: {_extra(key)} vs {_extra(other)}")
    found += [
        f"{name.replace('_', ' ')}: {_plain(a)} vs {_plain(b)}" for name, a, b in pairs if a != b
    ]
    return found or ["the argument structure"]


def _fields(key: GraphKey) -> dict[str, tuple[Any, ...]]:
    """The leaves of a key by path, for example `joint_attention_kwargs['scale']`."""
    fields: dict[str, tuple[Any, ...]] = {}
    for name, leaf in key.named_leaves():
        fields |= _expanded(name, leaf)
    return fields


def _expanded(name: str, leaf: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """A leaf by its name; a dataclass by the names of what it holds."""
    if len(leaf) < 2 or not isinstance(leaf[1], pytree.TreeSpec):
        return {name: leaf}
    inner = pytree.tree_unflatten(list(range(len(leaf) - 2)), leaf[1])
    found: dict[str, tuple[Any, ...]] = {}
    for path, i in named(inner):
        found |= _expanded(f"{name}.{path}", leaf[2 + i])
    return found


def _extra(key: GraphKey) -> str:
    value = key.context.extra_key
    return "None" if value is None else ", ".join(map(_value, value[1:]))


def _gap(key: GraphKey, other: GraphKey) -> int:
    return abs(_elements(key) - _elements(other))


def _elements(key: GraphKey) -> int:
    return sum(leaf[1].numel() for leaf in key.leaves if leaf[0] == "tensor")


def _leaf(name: str, a: tuple[Any, ...], b: tuple[Any, ...]) -> list[str]:
    if a[0] != "tensor" or b[0] != "tensor":
        return [f"{name}: {_value(a)} vs {_value(b)}"]
    _, shape, stride, dtype, device, past = a
    _, shape_b, stride_b, dtype_b, device_b, past_b = b
    if len(shape) != len(shape_b):
        found = [f"{name} has {len(shape)} dimensions vs {len(shape_b)}"]
    else:
        sizes = enumerate(zip(shape, shape_b))
        found = [f"{name} dim {i}: {m} vs {n}" for i, (m, n) in sizes if m != n]
    if not found and stride != stride_b:
        found.append(f"{name} strides: {stride} vs {stride_b}")
    if dtype != dtype_b:
        found.append(f"{name} dtype: {_plain(dtype)} vs {_plain(dtype_b)}")
    if device != device_b:
        found.append(f"{name} device: {device} vs {device_b}")
    if past != past_b:
        found.append(f"{name} misses a multiple of 16 bytes by {past} vs {past_b}")
    return found


def _value(leaf: tuple[Any, ...]) -> str:
    """A leaf of a key as people write it; see `Call` for their form."""
    if leaf is _ABSENT:
        return "not given"
    if leaf[0] == "tensor":
        return f"a tensor {tuple(leaf[1])}"
    if leaf[0] == "again":
        return "a tensor that is another argument too"
    kind = leaf[0]
    if kind is type(None):
        return "None"
    if kind is float:
        return str(leaf[1])
    if kind.__module__ == "numpy":
        return f"{kind.__name__} {np.frombuffer(leaf[3], leaf[1]).reshape(leaf[2]).tolist()}"
    if kind in (bool, str):
        return repr(leaf[1])
    return f"{leaf[1]!r}" if kind is int else f"{kind.__name__} {_plain(leaf[1])}"


def _plain(value: Any) -> str:
    text = str(value) if isinstance(value, torch.dtype) else repr(value)
    text = text.removeprefix("torch.")
    return text if len(text) <= 60 else f"{text[:57]}..."
