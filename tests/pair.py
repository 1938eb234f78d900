"""A module under dit_graph next to an independent eager twin: every call is compared in full."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dit_graph


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
        self.handle = dit_graph.enable(module, device=machine.device, **options)

    def __call__(self, *args: Any, seed: int = 0, **kwargs: Any) -> Any:
        """Call both with the same values and generators; the graphed result, once it is equal."""
        equal, result = self.compare(*args, seed=seed, **kwargs)
        assert equal, "the graphed call differs from eager"
        return result

    def compare(self, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[bool, Any]:
        args, kwargs = copied((args, kwargs))
        twin_args, twin_kwargs = copied((args, kwargs))
        torch.manual_seed(seed)
        result = self.graphed(*args, **kwargs)
        random = self._draw()
        torch.manual_seed(seed)
        expected = self.eager(*twin_args, **twin_kwargs)
        same = same_tree(result, expected)
        same &= same_tree(
            (args, kwargs), (twin_args, twin_kwargs)
        )  # also what was written in place
        same &= same_tree(random, self._draw())
        same &= same_tree(dict(self.graphed.named_buffers()), dict(self.eager.named_buffers()))
        return same, result

    def _draw(self) -> list[torch.Tensor]:
        return [torch.rand(1), torch.rand(1, device=self.machine.on)]

    @property
    def stats(self) -> dict[str, Any]:
        stats = self.handle.stats()
        counted = (
            stats["cold"] + stats["captures"] + stats["replays"] + sum(stats["eager"].values())
        )
        assert stats["calls"] <= counted
        return stats

    @property
    def replays(self) -> int:
        return int(self.stats["replays"])


def copied(tree: Any) -> Any:
    """The same structure and objects with clones of its tensors, aliases kept by `deepcopy`."""
    return copy.deepcopy(tree)


def same_tree(a: Any, b: Any) -> bool:
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return spec_a == spec_b and all(map(same_leaf, leaves_a, leaves_b))


def same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
            and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        )  # fmt: skip
    if dataclasses.is_dataclass(a):
        return same_tree(vars(a), vars(b))
    return type(a) is type(b) and (a == b or hasattr(a, "__dict__"))
