"""The modes and switches of torch that decide which kernels a call runs, beside its arguments."""

import sys
from typing import Any, NamedTuple

import torch
import torch.nn.attention
from torch.utils._device import DeviceContext

from dit_graph.devices.switches import backend_switches


class Identity:
    """Equal to nothing but what stands for the same object."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)

    def __repr__(self) -> str:
        return repr(self.it)


class Context(NamedTuple):
    """What else decides which kernels run, by the name that a message gives it."""

    grad_mode: bool
    inference_mode: bool
    autocast_on_cuda: Any  # the dtype, False when off
    autocast_on_cpu: Any
    autocast_cache: bool
    default_dtype: torch.dtype
    default_device: Any
    deterministic: tuple[bool, ...]
    cudnn: tuple[bool, ...]
    sdpa_backends: tuple[Any, ...]
    reduced_precision: tuple[Any, ...]
    blas_backend: Any
    attention_backend: Any
    flash_attention: Any  # the implementation that torch was told to use, None for its own
    attention_function: Any  # some libraries put theirs in torch's place
    extra_key: Any


def context(extra: Any = None) -> Context:
    """The modes and switches as they are on this thread now."""
    cuda, cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return Context(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        cuda and torch.get_autocast_dtype("cuda"),
        cpu and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        _default_device(),
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._C._get_deterministic_fill_uninitialized_memory(),
        ),
        *backend_switches(),
        _attention_backend(),
        torch.nn.attention.current_flash_attention_impl(),
        Identity(torch.nn.functional.scaled_dot_product_attention),
        extra,
    )


def _default_device() -> torch.device | None:
    """Of `torch.set_default_device` or `with torch.device(...)`, which both push a mode."""
    for i in reversed(range(torch._C._len_torch_function_stack())):
        if isinstance(mode := torch._C._get_function_stack_at(i), DeviceContext):
            return mode.device
    return None


def _attention_backend() -> Any:
    """The attention backend that diffusers dispatches to, once it is loaded."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_active_backend", None)
