"""What people do to a model between two calls, as thirty mutations of a tiny Flux with adapters.

Each has choices and a change: the same choice on two models leaves both in the same state.
"""

import contextvars
import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers.hooks import LayerSkipConfig
from diffusers.hooks.hooks import HookRegistry
from diffusers.hooks.layer_skip import _apply_layer_skip_hook
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from torch import nn

from tests.families import FAMILIES

GLOBAL = {"gain": 1.0}
NUMBER = 1.0
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
GAINS = (1.0, 1.5, 0.5)


@dataclass
class Settings:
    on: bool = True
    gains: list[float] = field(default_factory=lambda: [1.0, 1.0])
    table: dict[str, float] = field(default_factory=lambda: {"gain": 1.0})
    array: Any = field(default_factory=lambda: np.ones(2))
    nested: Any = field(default_factory=lambda: types.SimpleNamespace(gain=1.0))


class Processor(FluxAttnProcessor):
    """Attention whose result depends on all that a function can read."""

    strength = 1.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(attn, hidden_states, *args, **kwargs)
        s = self.settings
        gain = s.gains[0] * s.table["gain"] * float(s.array[1]) * s.nested.gain * self.strength
        gain *= GLOBAL["gain"] * NUMBER * CONTEXT.get() * scaled()
        gain *= 1.25 if s.on else 1.0
        return tuple(o * gain for o in out) if isinstance(out, tuple) else out * gain


def scaled(by: float = 1.0) -> float:
    return by


class World:
    """One model and what its mutations remember."""

    def __init__(self) -> None:
        self.model: Any = FAMILIES["flux"].build()
        torch.manual_seed(3)
        for name in ("a", "b"):
            lora = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
            self.model.add_adapter(lora, adapter_name=name)
        self.model.requires_grad_(False)
        self.settings = Settings()
        self.model.set_attn_processor(Processor(self.settings))
        self.cell = cell = [1.0]
        plain = type(self.model).forward.__get__(self.model)

        def forward(*args: Any, **kwargs: Any) -> Any:
            (out,) = plain(*args, **kwargs)
            return (out * cell[0] * self.rebound(),)

        self.model.forward = functools.wraps(plain)(forward)
        self.gain, self.rebind = rebindable()
        self.block = self.model.transformer_blocks[0]

    def rebound(self) -> float:
        return float(self.gain())

    def linear(self) -> Any:
        return (
            self.model.transformer_blocks[0].ff.net[2] if self.has_block() else self.model.proj_out
        )

    def has_block(self) -> bool:
        return self.model.transformer_blocks[0] is self.block


def rebindable() -> tuple[Callable[[], float], Callable[[float], None]]:
    value = 1.0

    def read() -> float:
        return value

    def write(new: float) -> None:
        nonlocal value
        value = new

    return read, write


def set_number(value: float) -> None:
    global NUMBER
    NUMBER = value


def weights_moved(w: World, scale: float) -> None:
    w.linear().weight.data = w.linear().weight.data * scale


def weights_replaced(w: World, scale: float) -> None:
    linear = w.linear()
    linear.weight = nn.Parameter(linear.weight.data * scale, requires_grad=False)


def adapter_scale(w: World, gain: float) -> None:
    for module in w.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["a"] = gain


def layers_skipped(w: World, on: bool) -> None:
    name = "layer_skip"
    registry = HookRegistry.check_if_exists_or_initialize(w.block)
    if name in registry.hooks:
        registry.remove_hook(name, recurse=True)
    if on:
        config = LayerSkipConfig(indices=[0], fqn="transformer_blocks")
        _apply_layer_skip_hook(w.model, config, name=name)


def block_hook(w: World, on: bool) -> None:
    if hook := w.__dict__.pop("hook", None):
        hook.remove()
    if on:
        w.hook = w.block.register_forward_hook(lambda module, args, out: None)


def adapter_added(w: World, seed: int) -> None:
    if "c" in w.model.peft_config:
        w.model.delete_adapters("c")
    torch.manual_seed(seed)
    lora = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    w.model.add_adapter(lora, adapter_name="c")
    w.model.requires_grad_(False).to(w.model.proj_out.weight.device)
    w.model.set_adapter("a")


Mutation = tuple[tuple[Any, ...], Callable[[World, Any], object]]
ONOFF = (False, True)
MUTATIONS: dict[str, Mutation] = {
    "one adapter": (("a", "b"), lambda w, c: w.model.set_adapters([c], [1.0])),
    "two adapters": ((0.3, 0.6), lambda w, c: w.model.set_adapters(["a", "b"], [c, 1 - c])),
    "adapters on and off": (
        ONOFF, lambda w, c: w.model.enable_adapters() if c else w.model.disable_adapters()),
    "an adapter's scale": (GAINS, adapter_scale),
    "a flag": (ONOFF, lambda w, c: setattr(w.settings, "on", c)),
    "an element of a list": (GAINS, lambda w, c: w.settings.gains.__setitem__(0, c)),
    "an equal list": (("",), lambda w, c: setattr(w.settings, "gains", [*w.settings.gains])),
    "a list of other types": ((1, 1.0, True), lambda w, c: setattr(w.settings, "gains", [c, c])),
    "a value in a dict": (GAINS, lambda w, c: w.settings.table.update(gain=c)),
    "an equal dict": (("",), lambda w, c: setattr(w.settings, "table", {**w.settings.table})),
    "an element of an array": (GAINS, lambda w, c: w.settings.array.__setitem__(1, c)),
    "an equal array": (("",), lambda w, c: setattr(w.settings, "array", w.settings.array.copy())),
    "a nested object": (GAINS, lambda w, c: setattr(w.settings.nested, "gain", c)),
    "another object of equal content": (
        ("",), lambda w, c: setattr(w.settings, "nested", copy.copy(w.settings.nested))),
    "a class attribute": (GAINS, lambda w, c: setattr(Processor, "strength", c)),
    "a global's content": (GAINS, lambda w, c: GLOBAL.update(gain=c)),
    "a global": (GAINS, lambda w, c: set_number(c)),
    "a context variable": (GAINS, lambda w, c: CONTEXT.set(c)),
    "a default argument": (GAINS, lambda w, c: setattr(scaled, "__defaults__", (c,))),
    "a list in a closure": (GAINS, lambda w, c: w.cell.__setitem__(0, c)),
    "a rebound cell": (GAINS, lambda w, c: w.rebind(c)),
    "new processors": (("",), lambda w, c: w.model.set_attn_processor(Processor(w.settings))),
    "a layer's eps": ((1e-6, 1e-2), lambda w, c: setattr(w.model.norm_out.norm, "eps", c)),
    "training": (ONOFF, lambda w, c: w.model.train(c)),
    "weights in place": (GAINS, lambda w, c: w.linear().weight.mul_(1.01)),
    "weights elsewhere": (GAINS, weights_moved),
    "weights replaced": (GAINS, weights_replaced),
    "skipped layers": (ONOFF, layers_skipped),
    "a hook on a block": ((False, False, True), block_hook),
    "a new adapter": ((1, 2), adapter_added),
}  # fmt: skip

assert len(MUTATIONS) == 30
NEVER_BACK = {"weights elsewhere", "weights replaced", "a new adapter"}
SAYS_NOTHING = {"weights in place", "an equal list", "an equal dict", "an equal array",
                "another object of equal content", "new processors"}  # fmt: skip


def reset() -> None:
    """What is no model's own, as it was."""
    GLOBAL.update(gain=1.0)
    set_number(1.0)
    CONTEXT.set(1.0)
    scaled.__defaults__ = (1.0,)
    Processor.strength = 1.0
