"""Token counts, and what lies in a bucket past the live ones."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import dit_graph
from dit_graph.call.buckets import Buckets, schedule
from dit_graph.tape.tape import Break
from tests.pair import Machine
from tests.shared.prefill.models import ids, near, two


def entries(handle: dit_graph.Handle) -> list[Any]:
    (install,) = handle.installs.values()
    assert install.runner is not None
    return list(install.runner.entries.values())


def test_the_tail_of_a_boundary_buffer_is_zero(machine: Machine, monkeypatch: Any) -> None:
    """Right after each attention, whatever lay in its buffer before; later steps use it again."""
    model, twin, _ = two("Llama", machine, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    real, found = Break.__call__, []

    def poisoned(step: Break) -> None:
        tensors = [t for t in step.leaves if isinstance(t, torch.Tensor)]
        (buffer,) = [t for t in tensors if t.shape == (1, 8, 4, 8)]
        buffer.fill_(torch.nan)
        real(step)
        found.append(buffer.clone())

    monkeypatch.setattr(Break, "__call__", poisoned)
    for n in (5, 8, 6):
        found.clear()
        tokens = ids(machine, n, 1, n)
        assert near(model(tokens).logits, twin(tokens).logits)
        assert len(found) == 2, "an attention a layer"
        for buffer in found:
            assert bool((buffer[:, n:] == 0).all()) and not bool(buffer[:, :n].isnan().any()), n


@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_an_eager_verdict_pads_nothing(machine: Machine, backend: str, monkeypatch: Any) -> None:
    """What the gate finds as fast in eager runs as if nothing was enabled, bit for bit."""
    model, twin, handle = two("Llama", machine, backend=backend, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    for entry in entries(handle):
        entry.block("replay 2 ms vs eager 1 ms")
    monkeypatch.setattr("dit_graph.modes.prefill.prefill.Prefill.padded_forward", None)
    for n in (5, 6, 8):
        tokens = ids(machine, n, 1, n)
        out, expected = model(tokens), twin(tokens)
        assert type(out) is type(expected) and torch.equal(out.logits, expected.logits)
        for a, b in zip(out.past_key_values.layers, expected.past_key_values.layers):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    assert handle.stats()["eager"] == {"replay 2 ms vs eager 1 ms": 3}


def test_an_eager_call_without_memory_runs_once(machine: Machine, monkeypatch: Any) -> None:
    """A second run would find the first one's layers in the cache."""
    model, _, handle = two("Llama", machine, buckets=(8,))
    for n in (6, 7, 8):
        model(ids(machine, n, 1, n))
    for entry in entries(handle):
        entry.block("replay 2 ms vs eager 1 ms")
    cache, ran = DynamicCache(config=model.config), []

    last = model.model.norm
    real = type(last).forward

    def full(norm: Any, hidden: torch.Tensor) -> Any:
        if norm is last:  # all layers have written their keys by then
            ran.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return real(norm, hidden)

    monkeypatch.setattr(type(last), "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        model(ids(machine, 1, 1, 6), past_key_values=cache)
    assert len(ran) == 1 and cache.get_seq_length() == 6


def test_the_schedule() -> None:
    sizes = schedule(2048)
    assert sizes[:10] == (4, 8, 12, 16, 20, 24, 28, 32, 48, 64)
    assert sizes[-6:] == (960, 1024, 1280, 1536, 1792, 2048)
    assert schedule(5000)[-3:] == (4096, 4608, 5000) and schedule(10) == (4, 8, 10)
    Buckets(schedule(8192))


def test_buckets_that_are_no_sequence() -> None:
    with pytest.raises(dit_graph.ConfigError, match="must be a sequence of token counts, got 5"):
        dit_graph.GraphConfig(mode="prefill", buckets=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[], [8, 4], [4, 4], [0], [4, 8.0], [True]])
def test_wrong_buckets_are_an_error_at_construction(sizes: Any) -> None:
    with pytest.raises(dit_graph.ConfigError, match="buckets"):
        dit_graph.GraphConfig(mode="prefill", buckets=sizes)


def test_the_smallest_bucket_that_holds() -> None:
    buckets = Buckets([4, 8, 16])
    found = [buckets.find(n)[0] for n in (1, 2, 4, 5, 8, 9, 16, 17)]
    assert found == [0, 4, 4, 8, 8, 16, 16, 0]
