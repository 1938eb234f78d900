"""Tensors in nested containers, as `torch.utils._pytree` takes them apart."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def is_size(value: Any) -> bool:
    """For pytree, which would make a tuple of a `torch.Size`."""
    return type(value) is torch.Size


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, dicts and diffusers outputs."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
