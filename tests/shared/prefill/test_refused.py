"""What is refused, and what comes back."""

import copy
from typing import Any

import pytest
import torch
import transformers

import dit_graph
from tests.pair import Machine
from tests.shared.prefill.models import (
    BUCKETS,
    SIZES,
    build,
    eager_reason,
    ids,
    near,
    two,
)


def test_wrong_targets(machine: Machine) -> None:
    with pytest.raises(dit_graph.ConfigError, match="takes a transformers causal LM"):
        dit_graph.enable(torch.nn.Linear(2, 2), mode="prefill", device=machine.device)
    model = build("Llama", machine)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(dit_graph.ConfigError, match="linear_attention layers"):
        dit_graph.enable(model, mode="prefill", device=machine.device)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(dit_graph.ConfigError, match="takes one mask for all"):
        dit_graph.enable(model, mode="prefill", device=machine.device)

    model.config.layer_types = None
    model.config.sliding_window = 6  # which Llama's forward does not ask for
    with pytest.raises(dit_graph.ConfigError, match="names a window"):
        dit_graph.enable(model, mode="prefill", device=machine.device)

    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES)).to(machine.on)
    with pytest.raises(
        dit_graph.ConfigError, match=r"not causal|no transformer body|way of its own"
    ):
        dit_graph.enable(bert, mode="prefill", device=machine.device)


def test_layer_types_of_a_model_with_one_mask(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    model.config.layer_types = twin.config.layer_types = ["full_attention"] * 2
    for n in (5, 6, 7, 8):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert handle.stats()["replays"] == 2


def test_disable_leaves_nothing(machine: Machine) -> None:
    model, twin, handle = two("Qwen3 MoE", machine, buckets=(8,))
    config = copy.deepcopy(model.config.to_dict())
    for seed in range(3):
        model(ids(machine, seed, 1, 7))
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == twin.config._attn_implementation
    handle.disable()
    assert all("forward" not in m.__dict__ for m in model.modules())
    tokens = ids(machine, 5, 1, 7)
    assert torch.equal(model(tokens).logits, twin(tokens).logits)


def test_warm_up_records_the_largest_first(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine)
    handle.warmup()
    assert handle.stats()["captures"] == len(BUCKETS)
    (runner,) = (install.runner for install in handle.installs.values())
    order = [next(k for k in key.leaves if k[0] == "tensor" and len(k[1]) == 2)[1][1]
             for key in runner.entries]  # fmt: skip
    assert order == sorted(BUCKETS, reverse=True)
    for n in range(2, 17):
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
    assert handle.stats()["replays"] == 15


@pytest.mark.parametrize(
    "kwargs", [{"prompt": "a"}, {"sizes": [(64, 64)]}, {"batch": 0}, {"batch": "a"}]
)
def test_wrong_warm_ups(machine: Machine, kwargs: Any) -> None:
    model, _, handle = two("Llama", machine, buckets=(8,))
    with pytest.raises(dit_graph.ConfigError, match=r"takes batch alone|batch must be a whole"):
        handle.warmup(**kwargs)
    assert model is not None and handle.stats()["calls"] == 0  # the handle does not keep it


def test_outside_of_no_grad_it_is_eager_by_name(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine, buckets=(8,))
    model.requires_grad_(True)
    tokens = ids(machine, 0, 1, 7)
    with torch.enable_grad():
        out = model(tokens).logits
        out.sum().backward()
    assert near(out, twin(tokens).logits) and "gradients" in eager_reason(handle)
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
