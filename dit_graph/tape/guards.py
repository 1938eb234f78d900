"""What recording handed to Python: compared at every replay, since replay runs no Python.

A `Guard` is a value that can be read again without running a step. `DeviceNumber` stands in for a
float that was read from the device, so that `if diff < threshold` guards the outcome of the
comparison and not the exact bits of `diff`.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dit_graph.errors import GuardMismatch


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, floats to the sign of zero, arrays and tensors by elements."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and same(a.tolist(), b.tolist())
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)  # By this nan equals itself, and -0.0 is not 0.0.
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@dataclass(eq=False)
class Guard:
    """One value read before the tape starts, for example a 0-dim CPU tensor read at a launch."""

    what: str
    expected: torch.Tensor
    source: torch.Tensor

    def check(self) -> None:
        """Raises GuardMismatch when the value is another one now."""
        if not same(self.expected, self.source):
            now, then = self.source.tolist(), self.expected.tolist()
            raise GuardMismatch(self.what, f"is {now!r}, recorded with {then!r}")


def host_generators(torch_generators: list[torch.Generator]) -> Any:
    """Python's and numpy's generators, and torch's seeds: what no replay moves.

    Only compared, since a forward that moves them is eager. `Undo` puts back where torch's stand.
    """
    numpy: Any = np.random.get_state(legacy=True)
    seeds = [generator.initial_seed() for generator in torch_generators]
    return random.getstate(), numpy[1].tobytes(), numpy[2:], seeds


def matches(expected: Any, value: Any) -> bool:
    """Whether a value read at replay leads Python down the recorded path."""
    if isinstance(expected, DeviceNumber):
        return expected.matches(value)
    return same(expected, value)


class DeviceNumber:
    """A float read from the device during a capture; its comparisons are what replay must repeat.

    Not a C float: `math.sqrt(x)` and the like come through `__float__` and pin the exact value.
    """

    def __init__(self, value: float) -> None:
        self.value = value
        self.outcomes: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        self.exact = False

    __class__ = property(lambda self: float)  # With this `isinstance(x, float)` holds.

    def pin(self) -> float:
        """Any use but a comparison with a number: from now on the exact value is the guard."""
        self.exact = True
        return self.value

    def matches(self, value: float) -> bool:
        if self.exact:
            return same(self.value, value)
        return all(op(value, other) == outcome for op, other, outcome in self.outcomes)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (self.pin(),)  # This makes a copy a plain float.

    def __hash__(self) -> int:
        return hash(self.pin())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pin(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def plain(value: Any) -> Any:
    """The float behind a stand-in, pinned; anything else as it is."""
    return value.pin() if type(value) is DeviceNumber else value


def _comparison(op: Callable[[Any, Any], Any]) -> Any:
    def compare(self: DeviceNumber, other: Any) -> Any:
        if type(other) not in (int, float, bool):
            return op(self.pin(), plain(other))
        outcome = op(self.value, other)
        self.outcomes.append((op, other, outcome))
        return outcome

    return compare


def _pinned(name: str) -> Any:
    return lambda self, *args: getattr(self.pin(), name)(*map(plain, args))


for _op in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(DeviceNumber, f"__{_op.__name__}__", _comparison(_op))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod"):
    setattr(DeviceNumber, f"__{_name}__", _pinned(f"__{_name}__"))
    setattr(DeviceNumber, f"__r{_name}__", _pinned(f"__r{_name}__"))
for _name in ("neg", "pos", "abs", "float", "int", "bool", "round", "trunc", "floor", "ceil"):
    setattr(DeviceNumber, f"__{_name}__", _pinned(f"__{_name}__"))
for _name in ("repr", "str", "format"):
    setattr(DeviceNumber, f"__{_name}__", _pinned(f"__{_name}__"))
