"""Rows on adapters, weights and offloading: changes that no argument shows."""

from typing import Any

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig

import dit_graph
from tests.families import FAMILIES
from tests.footguns import rules
from tests.footguns.case import (
    LORA,
    add_lora,
    both,
    eager_because,
    family,
    inputs,
    lora_layers,
    never_eager,
    recorded_again,
    replayed,
    row,
    settle,
)
from tests.pair import Machine, Pair
from tests.recorder.test_denoise import OPTIONS, draw, flux_pipeline


def with_lora(machine: Machine, name: str = "flux") -> Pair:
    pair = family(machine, name)
    both(pair, add_lora)
    settle(pair, inputs(name))
    return pair


@row(without=rules.flags_and_numbers_unseen)
def adapter_weights_and_flags(machine: Machine) -> None:
    """Adapter weights and flags are ignored; only Python floats and bools move."""
    pair = with_lora(machine)
    for change in (
        lambda m: m.set_adapters("one", 0.25),
        lambda m: m.disable_adapters(),
        lambda m: m.enable_adapters(),
        lambda m: m.set_adapters("one", 2.0),
        lambda m: lora_layers(m)[0].set_scale("one", 0.125),
    ):
        recorded_again(pair, change, inputs("flux"))
    both(pair, lambda m: m.add_adapter(LoraConfig(r=1, target_modules=["to_v"]), "two"))
    settle(pair, inputs("flux"))
    recorded_again(pair, lambda m: m.set_adapters(["one", "two"], [0.5, 0.25]), inputs("flux"))
    never_eager(pair)


@row(without=rules.growth_unseen)
def a_lora_is_fused(machine: Machine) -> None:
    """A LoRA is counted twice once it is fused."""
    pair = with_lora(machine)
    recorded_again(pair, lambda m: [layer.merge() for layer in lora_layers(m)], inputs("flux"))
    recorded_again(pair, lambda m: m.unfuse_lora(), inputs("flux"))
    recorded_again(pair, lambda m: m.fuse_lora(), inputs("flux"))
    recorded_again(pair, lambda m: m.unfuse_lora(), inputs("flux"))
    recorded_again(pair, lambda m: m.fuse_lora(lora_scale=0.5, safe_fusing=True), inputs("flux"))
    never_eager(pair)


@row(without=rules.states_share_their_recordings)
def a_lora_is_loaded(machine: Machine) -> None:
    """A LoRA that is loaded has no effect."""
    for name in ("flux", "sd3", "wan"):
        pair = family(machine, name)
        settle(pair, inputs(name))
        recorded_again(pair, add_lora, inputs(name))
        recorded_again(pair, lambda m: m.delete_adapters("one"), inputs(name))
    never_eager(pair)


@row(without=rules.nothing_is_compared)
def an_adapter_switch_that_fails(machine: Machine) -> None:
    """An adapter switch fails half-way, and the recording of before stays in use."""
    pair = with_lora(machine)

    def switch(m: Any) -> None:
        m.delete_adapters("one")
        with pytest.raises(ValueError):
            m.add_adapter(LoraConfig(r=2, target_modules=["no such layer"]), "two")

    recorded_again(pair, switch, inputs("flux"))

    def half_way(m: Any) -> None:
        torch.manual_seed(9)
        m.add_adapter(LORA, "two")
        with pytest.raises(ValueError):
            m.set_adapters(["two"], [0.5, 0.25])
        m.delete_adapters("one")
        with pytest.raises(ValueError):
            m.add_adapter(LORA, "two")

    pair = with_lora(machine)
    recorded_again(pair, half_way, inputs("flux"))
    never_eager(pair)


@row(without=rules.moved_weights_unseen)
def weights_are_swapped(machine: Machine) -> None:
    """Weights are swapped while they are in use."""
    pair = with_lora(machine)
    captures = pair.stats["captures"]
    both(pair, lambda m: [part.weight.copy_(part.weight * 2) for part in low_rank(m)])
    replayed(pair, inputs("flux"))
    assert pair.stats["captures"] == captures, "a copy needs no new recording"
    recorded_again(pair, swap, inputs("flux"))

    pipe, eager = flux_pipeline(), flux_pipeline()
    for p in (pipe, eager):
        add_lora(p.transformer)
    handle = dit_graph.enable(pipe, **OPTIONS)
    for change in (lambda m: None, swap, swap):
        before = handle.stats()["captures"]
        for p in (pipe, eager):
            change(p.transformer)
        for seed in range(2):
            assert torch.equal(draw(pipe, seed), draw(eager, seed)), "the picture differs"
        assert handle.stats()["captures"] == before + 1
    before = handle.stats()["captures"]
    for p in (pipe, eager):
        for part in low_rank(p.transformer):
            part.weight.copy_(part.weight * 2)
    assert torch.equal(draw(pipe), draw(eager)), "the picture differs"
    assert handle.stats()["captures"] == before


def low_rank(m: Any) -> list[Any]:
    return [layer.lora_A["one"] for layer in lora_layers(m)]


def swap(m: Any) -> None:
    for part in low_rank(m):
        part.weight.data = part.weight.data * 3


@row(without=rules.new_parameters_unseen)
def weights_are_assigned(machine: Machine) -> None:
    """The weights of before the swap are read."""
    pair = family(machine, "sd3")
    settle(pair, inputs("sd3"))

    def assign(m: Any) -> None:
        other = {name: t * 1.5 for name, t in m.state_dict().items() if "proj_out" in name}
        m.load_state_dict(other, strict=False, assign=True)

    recorded_again(pair, assign, inputs("sd3"))
    recorded_again(pair, lambda m: replace_bias(m.proj_out), inputs("sd3"))
    never_eager(pair)


def replace_bias(linear: Any) -> None:
    linear.bias = torch.nn.Parameter(linear.bias + 1, requires_grad=False)


@row(
    silent=False,
    without=rules.not_blocked_by("offload"),
    says="nothing says 'offload hooks present",
)
def offload_hooks(machine: Machine) -> None:
    """Offload hooks never run at a replay."""
    on = torch.device(machine.on)
    for offload in (
        lambda m: accelerate.cpu_offload(m, execution_device=on),
        lambda m: apply_group_offloading(
            m, onload_device=on, offload_type="block_level", num_blocks_per_group=1
        ),
        lambda m: apply_group_offloading(m, onload_device=on, offload_type="leaf_level"),
        lambda m: m.enable_group_offload(onload_device=on, offload_type="leaf_level"),
    ):
        pair = family(machine, "sd3")
        settle(pair, inputs("sd3"))
        before = pair.replays
        offload(pair.graphed)
        for seed in range(4):
            call = inputs("sd3")(seed)
            assert torch.equal(pair.graphed(**call)[0], pair.eager(**call)[0])
        eager_because(pair, "offload hooks present")
        assert pair.replays == before, "replayed past its hooks"

    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    draw(pipe)
    _, hook = accelerate.cpu_offload_with_hook(pipe.transformer, on)
    for seed in range(2):
        assert torch.equal(draw(pipe, seed), draw(eager, seed))
        hook.offload()
    stats = handle.stats()
    assert stats["replays"] > 6 or any("offload hooks" in reason for reason in stats["eager"])


@row(
    silent=False,
    without=rules.not_blocked_by("parameters are on"),
    says="parameters are on meta",
)
def the_device_moves(machine: Machine) -> None:
    """The device moves after a recording."""
    pair = family(machine, "flux")
    settle(pair, inputs("flux"))
    weights = {name: t * 2 for name, t in pair.graphed.state_dict().items()}
    pair.graphed.to("meta")
    call = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to("meta"), inputs("flux")(0)
    )
    for _ in range(3):
        assert pair.graphed(**call)[0].device.type == "meta"
    eager_because(pair, "parameters are on meta, the graphs on cpu")
    pair.graphed.to_empty(device=machine.on)
    recorded_again(pair, lambda m: m.load_state_dict(weights), inputs("flux"))

    module = FAMILIES["flux"].build()
    handle = dit_graph.enable(module, device=machine.device)
    for part in (module.proj_out, module.x_embedder):  # a part of it only
        part.to("meta")
        with pytest.raises((RuntimeError, NotImplementedError)):
            module(**inputs("flux")(0))
        part.to_empty(device=machine.on)
    assert list(handle.stats()["eager"]) == ["parameters are on meta, the graphs on cpu"]
