"""Rows on random numbers, gradients, guards, and other libraries in the same process."""

from typing import Any

import accelerate
import torch
from diffusers import FirstBlockCacheConfig

import dit_graph
from dit_graph import eager_on_graph
from tests.families import FAMILIES
from tests.footguns import rules
from tests.footguns.case import (
    both,
    eager_because,
    family,
    inputs,
    never_eager,
    recorded_again,
    replayed,
    row,
    settle,
    x_only,
)
from tests.footguns.signatures import alive
from tests.pair import Machine
from tests.recorder.test_denoise import OPTIONS, add, draw, flux_pipeline, remove
from tests.shared.compiled.blocks import compiled_block
from tests.shared.contract.test_hard_cases import counts_draws_branches, prompt
from tests.toys import Toy, rows


@row(without=rules.generators_not_taken_aside, says="generators")
def random_numbers(machine: Machine) -> None:
    """The same dropout mask at every replay, or a seed that is ignored."""
    between = eager_on_graph(lambda h: h + torch.randn_like(h))

    def drawing(m: Any, x: Any) -> Any:
        h = torch.nn.functional.dropout(m.linear(x), 0.5, training=True)
        return between(h) * torch.bernoulli(torch.full_like(h, 0.5)) + torch.randperm(8)

    pair = machine.pair(Toy(drawing))
    settle(pair, x_only)
    replayed(pair, lambda seed: {"x": rows(0)}, times=4)  # the same input, another seed
    assert not torch.equal(pair(rows(0), seed=1), pair(rows(0), seed=2))
    never_eager(pair)

    def branching(m: Any, x: Any) -> Any:
        h = m.linear(x) + torch.rand_like(x)
        return h * torch.rand_like(h) if bool(h.sum() > x.shape[1]) else h.flip(0)

    pair = machine.pair(Toy(branching))
    for seed in range(24):  # the generator goes back to where it was when the guard fails
        pair(rows(seed), seed=seed)
    assert pair.stats["captures"] == 2 and pair.replays == 21
    never_eager(pair)


@row(
    silent=False,
    without=rules.any_generator_accepted,
    says='nothing says "a generator of the caller',
)
def a_callers_generator(machine: Machine) -> None:
    """A generator of the caller's is drawn from in the capture."""

    def draws(m: Any, x: Any, generator: Any = None) -> Any:
        noise = torch.randn(x.shape, generator=generator or m.generator, device=x.device)
        return m.linear(x) + noise

    pair = machine.pair(Toy(draws, generator=None))
    for m in (pair.graphed, pair.eager):
        m.generator = torch.Generator(machine.on).manual_seed(3)
    for seed in range(6):
        pair(rows(seed), seed=seed)
    eager_because(pair, "a generator of the caller's is drawn from at")
    assert pair.replays == 0

    pair = machine.pair(Toy(draws, generator=None))
    for given in (lambda g: {"generator": g}, lambda g: {"generator": g, "x": rows(3)}):
        results = []
        for m in (pair.graphed, pair.eager):
            generator = torch.Generator(machine.on).manual_seed(5)
            results.append([m(**({"x": rows(1)} | given(generator))) for _ in range(4)])
        assert all(map(torch.equal, *results))
    eager_because(pair, "argument generator is a Generator, which has no value to compare")


@row(without=rules.scalars_frozen)
def cpu_scalars(machine: Machine) -> None:
    """A CPU scalar is frozen in the launch."""
    pair = machine.pair(Toy(lambda m, x, t: m.linear(x) * t))
    settle(pair, lambda seed: {"x": rows(seed), "t": torch.tensor(float(seed))})
    for kept in (torch.tensor(1.0), {"t": [torch.tensor(2, dtype=torch.int64)]}):
        pair = machine.pair(Toy(lambda m, x: m.linear(x) * scalar(m.kept) - 1, kept=kept))
        settle(pair, x_only)
        for value in (3, 1, 3, 3, 1):
            both(pair, lambda m: scalar(m.kept).fill_(value))
            pair(rows(value))
        assert pair.replays >= 5
        never_eager(pair)


def scalar(kept: Any) -> torch.Tensor:
    return kept if isinstance(kept, torch.Tensor) else kept["t"][0]


@row(silent=False, without=rules.compiled_code_is_watched, says="are not replayed")
def compiled_blocks(machine: Machine) -> None:
    """A compiled block never runs compiled again."""
    for order in ("compile first", "enable first"):
        equal, replays, runs = compiled_block(machine, order)
        assert equal, "differs from eager in result"
        assert (replays, runs) == (3, 2), "the compiled blocks are not replayed, or no longer run"
    torch.compiler.reset()
    pair = family(machine, "flux")
    both(pair, lambda m: m.compile_repeated_blocks(fullgraph=True, backend="eager"))
    settle(pair, inputs("flux"))
    never_eager(pair)
    dit_graph.disable(pair.graphed)
    call = inputs("flux")(8)
    assert torch.equal(pair.graphed(**call)[0], pair.eager(**call)[0])
    torch.compiler.reset()


@row(silent=False, without=rules.slots_are_not_checked, says="not replayed")
def hooks_that_take_the_slot(machine: Machine) -> None:
    """Another hook takes the slot away."""
    for kind in ("diffusers", "accelerate"):
        pipe, eager = flux_pipeline(), flux_pipeline()
        for p in (pipe, eager):
            add(kind, p.transformer)
        handle = dit_graph.enable(pipe, **OPTIONS)
        for p in (pipe, eager):
            remove(kind, p.transformer)  # puts back the forward of before, without the slot
        for seed in range(2):
            assert torch.equal(draw(pipe, seed), draw(eager, seed))
        assert handle.stats()["replays"] >= 6, f"not replayed\n{handle.report()}"
        assert "taken away by another hook" in handle.report()
        for p in (pipe, eager):
            add(kind, p.transformer)
        before = handle.stats()["replays"]
        for seed in range(2):
            assert torch.equal(draw(pipe, seed), draw(eager, seed))
        assert handle.stats()["replays"] >= before + 6, f"not replayed\n{handle.report()}"
        dit_graph.disable(pipe)
        assert torch.equal(draw(pipe, 5), draw(eager, 5)), "the hook stays after disable"

    module = FAMILIES["flux"].build()
    handle = dit_graph.enable(module, device=machine.device)
    accelerate.cpu_offload(module, execution_device=torch.device(machine.on))
    expected = module(**inputs("flux")(0))[0]
    accelerate.hooks.remove_hook_from_module(module, recurse=True)
    for _ in range(4):
        assert torch.equal(module(**inputs("flux")(0))[0], expected)
    assert handle.stats()["replays"] == 2


@row(without=rules.nothing_is_rolled_back, says="state moved twice")
def state_before_a_guard(machine: Machine) -> None:
    """State moves twice when a guard fails."""
    assert counts_draws_branches(machine) == (True, 47, 2), "state moved twice"

    count_in_a_break = eager_on_graph(pure=True)(lambda m: (m.state.add_(1), None)[1])

    def body(m: Any, x: Any) -> Any:
        x.mul_(2)  # an argument; an attribute, by a view in a segment and in a break
        m.state.view(-1)[2:].sub_(1)
        count_in_a_break(m)
        h = m.linear(x) * m.state.sum()
        return h + 1 if h.sum().item() > 0 else h.sin()

    pair = machine.pair(Toy(body))
    for m in (pair.graphed, pair.eager):
        m.state = torch.ones(2, 2)
    for seed in range(20):
        pair(rows(seed))
        assert torch.equal(pair.graphed.state, pair.eager.state), "state moved twice"
    assert pair.replays >= 16


@row(silent=False, without=rules.a_variant_is_enough, says="eager: ")
def every_prompt_has_its_length(machine: Machine) -> None:
    """Every prompt is a new key."""
    for name in ("lumina2", "qwen"):
        pair = family(machine, name, max_graphs=8)
        for picture in range(10):
            call = prompt(name, picture, 3 + picture * 7 % 30)
            for _ in range(4):
                call["hidden_states"] = torch.randn_like(call["hidden_states"])
                pair(**machine.to(call))
            assert alive(pair) <= 8
        never_eager(pair)
        assert pair.replays >= 20, "half of the steps are replayed"


@row(without=rules.live_host_values_frozen)
def a_break_that_feeds_the_next(machine: Machine) -> None:
    """One break feeds the next."""

    def body(m: Any, x: Any, mask: Any) -> Any:
        n = mask.sum(1).cpu()
        first, second = (n + 1).tolist()
        return m.linear(x[:first]).sum() + m.linear(x[:second]) * n.float().to(x.device).sum()

    pair = machine.pair(Toy(body))
    for seed in range(8):
        mask = torch.arange(6)[None] < torch.tensor([[2], [seed % 2 + 3]])
        pair(rows(seed, 6), mask)
    assert pair.replays == 5
    never_eager(pair)

    same = eager_on_graph(lambda t: t)
    view = eager_on_graph(lambda t: t[:1])

    def in_place(m: Any, x: Any) -> Any:
        h = m.linear(x)
        same(h).add_(1)
        view(h).mul_(3)
        return h * 2 + same(view(x))

    pair = machine.pair(Toy(in_place))
    settle(pair, x_only)
    never_eager(pair)

    @eager_on_graph(pure=True)
    def look_up(m: Any, h: torch.Tensor) -> torch.Tensor:
        return h + m.table[1:3]

    pair = machine.pair(Toy(lambda m, x: look_up(m, m.linear(x)) * m.table[0]))
    for m in (pair.graphed, pair.eager):
        m.table = torch.arange(32.0).view(4, 8)
    settle(pair, x_only)
    never_eager(pair)


@row(without=rules.gradients_unseen, says="no gradient")
def gradients(machine: Machine) -> None:
    """Recorded for evaluation, used in training."""
    pair = machine.pair(Toy(lambda m, x: m.linear(x).tanh()))
    settle(pair, x_only)
    with torch.enable_grad():
        settle(pair, x_only)  # nothing needs a gradient: its own recording
        for seed in range(4):
            a, b = rows(seed).requires_grad_(), rows(seed).requires_grad_()
            result, expected = pair.graphed(a), pair.eager(b)
            assert result.requires_grad, "no gradient reaches the caller"
            result.sum().backward()
            expected.sum().backward()
            assert torch.equal(a.grad, b.grad)
        both(pair, lambda m: m.linear.weight.requires_grad_(True))
        assert pair.graphed(rows(0)).requires_grad, "no gradient reaches the weights"
    eager_because(pair, "gradients are needed; call it under torch.no_grad()")
    settle(pair, x_only)


@row(without=rules.step_caches_unseen)
def step_caches(machine: Machine) -> None:
    """A step cache and graphs together give 1.00x, in silence."""
    pair = family(machine, "flux")
    settle(pair, inputs("flux"))
    both(pair, lambda m: m.enable_cache(FirstBlockCacheConfig(threshold=0.2)))
    before = pair.replays
    for seed in range(10):  # close inputs, for which the cache skips blocks, and two jumps
        call = inputs("flux")(seed // 4)
        call["hidden_states"] = call["hidden_states"] * (1 + seed / 500)
        results = []
        for m in (pair.graphed, pair.eager):
            with m.cache_context("cond"):
                results.append(m(**call)[0])
        assert torch.equal(*results), "differs from eager in result"
    if pair.replays == before:
        eager_because(pair, "Python state")
    both(pair, lambda m: m.disable_cache())
    pair(**inputs("flux")(0))  # one more change after many; from the next call on it is steady
    settle(pair, inputs("flux"))
    recorded_again(pair, lambda m: m.fuse_qkv_projections(), inputs("flux"))
