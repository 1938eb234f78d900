"""A module under dit_graph next to an independent eager twin: every call is compared in full."""

import copy
import dataclasses
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dit_graph

PLAIN: dict[str, Any] = {"verify": "off", "gate": "always"}
"""Every call replays, nothing compares itself: so a wrong replay is seen by the test."""


@dataclass(frozen=True)
class Machine:
    """Where a test runs: the dit_graph device and the torch device of the tensors."""

    device: str
    on: str

    def pair(self, module: torch.nn.Module, **options: Any) -> "Pair":
        return Pair(module.to(self.on).eval(), self, options)

    def to(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.on), value)


class Pair:
    def __init__(self, module: torch.nn.Module, machine: Machine, options: dict[str, Any]) -> None:
        self.machine = machine
        self.eager = copy.deepcopy(module)
        self.graphed = module
        self.handle = dit_graph.enable(module, device=machine.device, **PLAIN | options)

    def __call__(self, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        """Call both with the same values and generators; the graphed result, once it is equal."""
        equal, result = self.compare(*args, seed=seed, **kwargs)
        assert equal, f"the graphed call differs from eager in {', '.join(self.differs)}"
        return result

    def compare(self, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[bool, Any]:
        args, kwargs = copied((args, kwargs))
        twin_args, twin_kwargs = copied((args, kwargs))
        torch.manual_seed(seed)
        result = self.graphed(*args, **kwargs)
        random = self._draw()
        torch.manual_seed(seed)
        expected = self.eager(*twin_args, **twin_kwargs)
        pairs = {
            "result": (result, expected),
            "arguments": ((args, kwargs), (twin_args, twin_kwargs)),  # also written in place
            "generators": (random, self._draw()),
            "buffers": (dict(self.graphed.named_buffers()), dict(self.eager.named_buffers())),
        }
        self.differs = [what for what, (a, b) in pairs.items() if not same_tree(a, b)]
        return not self.differs, result

    def _draw(self) -> list[torch.Tensor]:
        return [torch.rand(1), torch.rand(1, device=self.machine.on)]

    @property
    def stats(self) -> dict[str, Any]:
        stats = self.handle.stats()
        counted = (
            stats["cold"] + stats["captures"] + stats["replays"] + sum(stats["eager"].values())
        )
        assert stats["calls"] == counted, stats
        return stats

    @property
    def replays(self) -> int:
        return int(self.stats["replays"])


def torchs(fn: Any) -> Any:
    """`fn` as code of torch's: an error out of it is a kernel's or the driver's, no model's."""
    names = {**fn.__globals__, "__name__": "torch.cuda"}
    return types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)


def copied(tree: Any) -> Any:
    """The same structure and objects with clones of its tensors, aliases kept by `deepcopy`."""
    return copy.deepcopy(tree)


def same_tree(a: Any, b: Any) -> bool:
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return spec_a == spec_b and all(map(same_leaf, leaves_a, leaves_b))


def same_leaf(a: Any, b: Any) -> bool:
    """Tensors by their bits, so that NaN equals itself and -0.0 is not 0.0."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            and torch.equal(bits(a), bits(b))
        )
    if dataclasses.is_dataclass(a):
        return same_tree(vars(a), vars(b))
    plain = (bool, int, float, str, bytes, type(None))
    return type(a) is type(b) and (a == b or not isinstance(a, plain))


def bits(t: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(t.numel(), dtype=t.dtype, device=t.device).copy_(t.reshape(-1))
    return flat.view(torch.uint8)
