"""Rows on who owns a tensor, and for how long."""

import gc
import random
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from dit_graph import eager_on_graph
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
from tests.pair import Machine, Pair
from tests.toys import Toy, Unseen, rows


def attention(pure: bool = True) -> Any:
    """A marked break that takes views and gives several results."""

    def mix(q: Any, k: Any) -> Any:
        return q.softmax(-1) * k, k.flip(0)

    return eager_on_graph(pure=pure)(mix)


def around(mix: Any) -> Any:
    def body(m: Any, x: Any) -> Any:
        a, b = mix(*m.linear(x).chunk(2, dim=-1))
        return m.linear(torch.cat([a, b], -1))

    return body


def churn() -> None:
    """Blocks of every size that are taken, filled with NaN and given back."""
    sizes = random.Random(0).choices(range(1, 400), k=200)
    kept = [torch.full((n,), torch.nan) for n in sizes]
    del kept
    gc.collect()


@row(without=rules.no_input_of_a_break_is_owned)
def buckets_in_one_pool(machine: Machine) -> None:
    """A break reads a block that a bucket captured later has taken over."""
    pair = machine.pair(Toy(around(attention())))
    for n in (8, 4, 2):
        settle(pair, lambda seed: {"x": rows(seed, n)}, times=2)
    for n in (8, 4, 2, 8, 3, 3, 8, 2, 4):
        pair(rows(n, n), seed=n)
    assert pair.replays == 7 and pair.stats["captures"] == 4
    assert len(pool_of(pair)._generations) == 1


def pool_of(pair: Pair) -> Any:
    return pair.handle.pool_on(torch.device(pair.machine.on))


@row(without=rules.no_home_for_results_of_breaks)
def results_of_a_break_are_gone(machine: Machine) -> None:
    """What a break made at capture is freed, and the next segment reads what lies there now."""
    pair = machine.pair(Toy(around(attention(pure=False))))
    settle(pair, x_only, times=2)
    churn()
    for n in (5, 7):
        settle(pair, lambda seed: {"x": rows(seed, n)}, times=2)
    churn()
    replayed(pair, x_only, times=3)


@row(without=rules.survivors_unseen)
def a_workspace_first_made_under_capture(machine: Machine) -> None:
    """A workspace first made while recording takes a block that earlier work still writes."""
    aside = Unseen()

    def body(m: Any, x: Any) -> Any:
        table = aside.dict.setdefault(id(m), {})
        table["calls"] = table.get("calls", 0) + 1
        h = m.linear(x)
        if table["calls"] >= 2 and "peak" not in table:  # the second call is the recorded one
            table["peak"] = h.abs().max()
        return h / table.get("peak", 1.0)

    pair = machine.pair(Toy(body))
    for seed in range(8):
        pair(rows(seed))
    assert pair.replays >= 3
    assert torch.equal(*(aside.dict[id(m)]["peak"] for m in (pair.graphed, pair.eager)))


@row(without=rules.addresses_unseen)
def weights_cast_up_and_down(machine: Machine) -> None:
    """Black images after the weights were cast up and down."""

    def cast(m: Any) -> None:
        m.float()
        m.linear.weight.mul_(3)
        m.half()

    pair = machine.pair(Toy(lambda m, x: m.linear(x)).half())
    settle(pair, lambda seed: {"x": rows(seed).half()})
    recorded_again(pair, cast, lambda seed: {"x": rows(seed).half()})
    pair = family(machine, "flux")
    settle(pair, inputs("flux"))
    recorded_again(pair, lambda m: m.double().float(), inputs("flux"))
    recorded_again(pair, lambda m: m.float().bfloat16().float(), inputs("flux"))


@row(without=rules.results_share_a_buffer, says="an earlier result changed")
def the_first_of_two_results_is_kept(machine: Machine) -> None:
    """The first result changes when the second is made."""
    pair = machine.pair(Toy(lambda m, x: (h := m.linear(x).tanh(), h[:1], {"sum": h.sum(0)})))
    settle(pair, x_only)
    held: list[tuple[Any, Any]] = []
    for seed in range(4):
        whole, part, rest = pair(rows(seed))
        held += [(t, t.clone()) for t in (whole, part, rest["sum"])]
        unchanged = [torch.equal(t, as_it_was) for t, as_it_was in held]
        assert all(unchanged), "an earlier result changed"


@row(without=rules.own_arguments_cloned, says="is not the caller's own tensor")
def the_output_is_the_next_input(machine: Machine) -> None:
    """The output is the next input, and in eager it may be the very same tensor."""
    pair = machine.pair(Toy(lambda m, x: m.linear(x).tanh()))
    settle(pair, x_only)
    a = b = rows(0)
    for _ in range(6):
        a, b = pair.graphed(pair.graphed(a)), pair.eager(pair.eager(b))
        assert torch.equal(a, b), "f(f(x)) differs from eager"

    pair = machine.pair(Toy(lambda m, x: x.add_(m.linear(x).tanh())))
    a, b = rows(0), rows(0)
    for _ in range(6):
        out, expected = pair.graphed(a), pair.eager(b)
        assert out is a and expected is b, "the result is not the caller's own tensor"
        assert torch.equal(a, b)
    never_eager(pair)
    assert pair.replays == 4


class Sample:
    """A result of a class that nobody knows."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


@row(without=rules.any_result_accepted, says="nothing says 'the forward returns a Sample'")
def output_objects(machine: Machine) -> None:
    """The result that the caller holds changes at the next step."""
    pair = family(machine, "flux")
    calls = inputs("flux", return_dict=True)
    settle(pair, calls)
    results = [pair(**calls(seed)) for seed in range(3)]
    for seed, result in enumerate(results):
        assert isinstance(result, Transformer2DModelOutput)
        assert torch.equal(result.sample, pair.eager(**calls(seed)).sample), "a held result changed"
    never_eager(pair)

    for wrap in (lambda h: Sample(h), lambda h: [{"a": Sample(h)}]):
        pair = machine.pair(Toy(lambda m, x: wrap(m.linear(x))))
        for seed in range(5):
            pair(rows(seed))
        eager_because(pair, "the forward returns a Sample")
        assert pair.replays == 0


@row(without=rules.constants_recycled)
def python_data_on_the_device(machine: Machine) -> None:
    """Python data is uploaded once, from a host block that somebody else uses at replay."""

    def body(m: Any, x: Any) -> Any:
        weights = torch.tensor([1.0, 2.0] * 4, device=x.device)
        index = torch.as_tensor([1, 0], device=x.device)
        return (m.linear(x) * weights)[index] + x.new_tensor([3.0])

    pair = machine.pair(Toy(body))
    settle(pair, x_only)
    for n in (5, 3):
        settle(pair, lambda seed: {"x": rows(seed, n)}, times=2)
        churn()
        replayed(pair, x_only)
    both(pair, lambda m: m.linear.weight.mul_(2))
    replayed(pair, x_only)
    never_eager(pair)
