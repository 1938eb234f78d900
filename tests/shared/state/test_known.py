"""States that come back bring their recordings back, and keep nothing alive."""

import copy
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.guiders import AutoGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from peft import LoraConfig
from torch import nn

import dit_graph
from dit_graph.breaks import eager_on_graph
from dit_graph.state.watcher import MAX_STATES
from tests.families import FAMILIES
from tests.pair import PLAIN, Machine
from tests.recorder.test_denoise import draw, flux_pipeline
from tests.shared.prefill.models import ids, static_cache, two
from tests.toys import Module, rows


def with_adapters(machine: Machine) -> Any:
    pipe = flux_pipeline().to(machine.on)
    torch.manual_seed(3)
    for name in ("a", "b"):
        add_adapter(pipe, name)
    pipe.set_adapters(["a", "b"], [0.8, 0.8])
    return pipe


def add_adapter(pipe: Any, name: str) -> None:
    lora = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipe.transformer.add_adapter(lora, adapter_name=name)
    pipe.transformer.requires_grad_(False).to(pipe.transformer.proj_out.weight.device)


SERVERS: dict[str, tuple[Any, int, int]] = {  # what is done before a picture, captures, replays
    "the same adapter": (lambda p, i: p.set_adapters(["a"], [0.8]), 1, 30),
    "the same two": (lambda p, i: p.set_adapters(["a", "b"], [0.8, 0.3]), 1, 30),
    "adapters on": (lambda p, i: p.transformer.enable_adapters(), 1, 30),
    "two in turns": (lambda p, i: p.set_adapters(["ab"[i % 2]], [0.8]), 2, 27),
    "two weights in turns": (lambda p, i: p.set_adapters(["a"], [(0.3, 0.6)[i % 2]]), 2, 27),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_sets_its_adapters_before_every_picture(machine: Machine, name: str) -> None:
    act, captures, replays = SERVERS[name]
    pipe, eager = with_adapters(machine), with_adapters(machine)
    handle = dit_graph.enable(pipe, device=machine.device, gate="always")
    for i in range(8):
        act(pipe, i), act(eager, i)
        assert torch.equal(draw(pipe, i, steps=4), draw(eager, i, steps=4))
    stats = handle.stats()
    assert stats["captures"] == captures and stats["replays"] >= replays, handle.report()
    assert ("recorded in 2 states" in handle.report()) == (captures == 2)


def guided(model: Any, guider: Any, seed: int, machine: Machine) -> torch.Tensor:
    """A picture as modular pipelines draw it: the guider hooks the model for one call of a step."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(20, device=machine.on)
    made = lambda *shape: torch.randn(*shape, generator=generator).to(machine.on)
    generator = torch.Generator().manual_seed(seed)
    x, positive, negative = made(1, 4, 2, 8, 8), made(1, 6, 16), made(1, 6, 16)
    for i, t in enumerate(scheduler.timesteps):
        guider.set_state(step=i, num_inference_steps=20, timestep=t)
        batches = guider.prepare_inputs({"encoder_hidden_states": (positive, negative)})
        for batch in batches:
            guider.prepare_models(model)
            texts = {"encoder_hidden_states": batch.as_dict()["encoder_hidden_states"]}
            batch.noise_pred = model(hidden_states=x, timestep=t[None], return_dict=False, **texts)[
                0
            ]
            guider.cleanup_models(model)
        x = scheduler.step(guider(batches)[0], t, x, return_dict=False)[0]
    return x


GUIDERS = {
    "skip-layer guidance": lambda: SkipLayerGuidance(
        guidance_scale=4.0, skip_layer_guidance_scale=2.0, skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=0.6,
        skip_layer_config=LayerSkipConfig(indices=[1], fqn="blocks"),
    ),
    "AutoGuidance": lambda: AutoGuidance(
        guidance_scale=4.0, auto_guidance_config=LayerSkipConfig(indices=[0], fqn="blocks"),
        start=0.0, stop=1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kept", [True, False], ids=["one guider", "a guider a picture"])
@pytest.mark.parametrize("name", GUIDERS)
def test_guiders_that_hook_blocks(machine: Machine, name: str, kept: bool) -> None:
    model = FAMILIES["wan"].build().to(machine.on)
    eager = copy.deepcopy(model)
    handle = dit_graph.enable(model, device=machine.device, gate="always")
    guider, other = GUIDERS[name](), GUIDERS[name]()
    for seed in range(4):
        if not kept:
            guider, other = GUIDERS[name](), GUIDERS[name]()
        expected = guided(eager, other, seed, machine)
        assert torch.equal(guided(model, guider, seed, machine), expected)
    stats = handle.stats()
    assert stats["captures"] <= 4 and stats["replays"] >= 0.8 * stats["calls"], handle.report()


def test_a_scale_that_is_another_at_every_step_is_given_up(machine: Machine) -> None:
    """Under guidance every state comes twice, which would be a recording a step."""
    model = with_adapters(machine).transformer
    handle = dit_graph.enable(model, device=machine.device, gate="always")
    for step in range(12):
        model.set_adapters(["a"], [step / 12])
        for i in range(2):
            model(**machine.to(FAMILIES["flux"].inputs(i, 6)))
    stats = handle.stats()
    assert stats["captures"] <= 3 and stats["replays"] == 0
    (reason,) = stats["eager"]
    assert reason.startswith("Python state changes at every call: ") and "scaling" in reason
    for i in range(12):  # it rests: recorded again
        model(**machine.to(FAMILIES["flux"].inputs(i, 6)))
    assert handle.stats()["replays"] >= 2, handle.report()


def test_adapters_that_come_and_go_leave_nothing_behind(machine: Machine) -> None:
    pipe, eager = flux_pipeline().to(machine.on), flux_pipeline().to(machine.on)
    handle = dit_graph.enable(pipe, device=machine.device, **PLAIN)
    draw(pipe)
    held, known = [], []
    (install,) = handle.installs.values()
    for i in range(50):
        for one in (pipe, eager):
            torch.manual_seed(i)
            add_adapter(one, f"n{i}")
        weights = [weakref.ref(p) for n, p in pipe.transformer.named_parameters() if f".n{i}." in n]
        assert weights
        assert torch.equal(draw(pipe, i, steps=4), draw(eager, i, steps=4))
        for one in (pipe, eager):
            if i % 2:
                one.unload_lora_weights()
            else:
                one.transformer.delete_adapters(f"n{i}")
        assert not any(ref() is not None for ref in weights), i
        held.append(install.runner.pool.bytes)
        known.append(len(install.runner.target.state.states))
    assert max(known) <= 3 and max(held[10:]) <= 2 * held[1], (known, held)
    stats = handle.stats()
    assert stats["captures"] <= 52 and stats["eager"] == {}, handle.report()


def test_the_least_recently_used_state_makes_room(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.scale, scale=0.0))
    for scale in [*range(MAX_STATES + 1), 0]:
        for module in (pair.graphed, pair.eager):
            module.scale = float(scale)
        for i in range(9):
            pair(rows(i).to(machine.on))
    (install,) = pair.handle.installs.values()
    assert len(install.runner.target.state.states) == MAX_STATES
    assert pair.stats["captures"] == MAX_STATES + 2, "the first was forgotten"
    forgotten = pair.stats
    for module in (pair.graphed, pair.eager):
        module.scale = float(MAX_STATES)
    pair(rows(0).to(machine.on))
    assert pair.stats["captures"] == forgotten["captures"]


def test_states_that_come_once_do_not_push_recordings_out(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.scale, scale=0.0))
    for i in range(4):
        pair(rows(i).to(machine.on))
    for scale in [*range(1, 3 * MAX_STATES), 0, 0]:
        for module in (pair.graphed, pair.eager):
            module.scale = float(scale)
        pair(rows(0).to(machine.on))
    assert pair.replays == 4 and pair.stats["captures"] == 1, pair.handle.report()


def test_a_recording_is_dropped_before_the_users_code_runs(machine: Machine) -> None:
    """And before anything is handed out, compared or timed."""
    ran: list[float] = []

    @eager_on_graph(pure=True)
    def outside(x: torch.Tensor, scale: float) -> torch.Tensor:
        ran.append(scale)
        return x * scale

    def body(m: Any, x: Any) -> Any:
        return outside(m.linear(x), m.scale) + 1

    pair = machine.pair(Module(body, scale=1.0), gate="measure", verify="always")
    for i in range(4):
        pair(rows(i).to(machine.on))
    replays = pair.replays
    for module in (pair.graphed, pair.eager):
        module.scale = 2.0
    ran.clear()
    pair(rows(0).to(machine.on))
    assert set(ran) == {2.0} and pair.stats["dropped"] == 1 and pair.replays == replays
    assert "dropped 1 replays" in pair.handle.report()


@pytest.mark.parametrize("what", ["counts", "draws"])
def test_what_a_replay_would_move_is_compared_first(machine: Machine, what: str) -> None:
    def body(m: Any, x: Any) -> Any:
        if what == "counts":
            m.count.add_(1)
        out = m.linear(x) * m.scale
        return out + m.count if what == "counts" else nn.functional.dropout(out, 0.5)

    pair = machine.pair(Module(body, scale=1.0))
    for step in range(12):
        for module in (pair.graphed, pair.eager):
            module.scale = float(step // 6)
        pair(rows(step).to(machine.on), seed=step)
    assert pair.stats["dropped"] == 0 and pair.replays == 8, pair.handle.report()


def test_an_error_of_another_state_is_not_acted_on(machine: Machine) -> None:
    """A replay whose guards do not hold, where the state is another one, says nothing of them."""

    def body(m: Any, x: Any) -> Any:
        out = m.linear(x)
        return out * 2 if m.ask and bool((out.sum() > 0).item()) else out * m.scale

    pair = machine.pair(Module(body, ask=True, scale=1.0))
    for _ in range(4):
        pair(rows(0).to(machine.on))
    for module in (pair.graphed, pair.eager):
        module.ask = False
    for _ in range(4):
        pair(-rows(0).to(machine.on))
    assert pair.stats["eager"] == {} and pair.stats["dropped"] == 1
    assert pair.stats["captures"] == 2, "no variant for a value that the state does not ask for"


def test_prefill_after_a_changed_norm_leaves_eagers_cache(machine: Machine) -> None:
    model, twin, handle = two("Llama", machine)
    for i in range(8):
        if i == 5:
            for one in (model, twin):
                one.model.layers[0].input_layernorm.variance_epsilon = 0.5
        tokens = ids(machine, i, 1, 8)
        cache, expected_cache = static_cache(model, 7.25), static_cache(twin, 7.25)
        out, expected = (
            one(tokens, past_key_values=c) for one, c in ((model, cache), (twin, expected_cache))
        )
        assert torch.equal(out.logits, expected.logits), i
        for layer, other in zip(cache.layers, expected_cache.layers):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert handle.stats()["dropped"] == 1 and handle.stats()["eager"] == {}, handle.report()


def test_a_weight_that_is_gone_takes_its_state_with_it(machine: Machine) -> None:
    module = Module(lambda m, x: m.linear(x)).to(machine.on)
    handle = dit_graph.enable(module, device=machine.device, **PLAIN)
    first = weakref.ref(module.linear.weight)
    for i in range(4):
        module(rows(i).to(machine.on))
    module.linear.weight = nn.Parameter(module.linear.weight * 2, requires_grad=False)
    gc.collect()
    assert first() is None, "neither the state nor its recordings keep a weight"
    for i in range(4):
        x = rows(i).to(machine.on)
        assert torch.equal(module(x), module.linear(x))
    (install,) = handle.installs.values()
    assert len(install.runner.target.state.states) == 1
    assert sum(bool(entry.tapes) for _, entry in install.runner.target.every_entry()) == 1


def test_the_report_sums_over_states(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x) * m.settings.scale))
    for module in (pair.graphed, pair.eager):
        module.settings = types.SimpleNamespace(scale=1.0)
    for step in range(16):
        for module in (pair.graphed, pair.eager):
            module.settings.scale = 1.0 + step // 4 % 2
        pair(rows(step).to(machine.on))
    (module,) = pair.handle.explain().modules
    (signature,) = module.signatures
    assert (signature.cold, signature.captures, signature.states) == (2, 2, 2)
    assert signature.replays == pair.replays == 12 and len(signature.variants) == 2
