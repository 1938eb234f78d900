"""Rows on sizes: which calls share a recording, and how many there may be."""

from typing import Any

import pytest
import torch

import dit_graph
from tests.footguns import rules
from tests.footguns.case import family, inputs, never_eager, replayed, row, settle
from tests.pair import Machine, Pair
from tests.recorder.test_denoise import OPTIONS, draw, flux_pipeline
from tests.toys import Toy, rows


@row(silent=False, without=rules.shapes_look_like_values, says="not replayed")
def many_resolutions_and_back(machine: Machine) -> None:
    """The third size always dies."""
    pair = family(machine, "ltx")
    sizes = [(4, 4), (2, 4), (6, 4), (8, 4), (4, 10)]

    def at(size: tuple[int, int]) -> Any:
        height, width = size

        def calls(seed: int) -> dict[str, Any]:
            tokens = torch.full((2, 2 * height * width, 4), float(seed)).cumsum(1) / 100
            return inputs("ltx", hidden_states=tokens, height=height, width=width)(seed)

        return calls

    for seed in range(2):
        for size in sizes:
            pair(**at(size)(seed))
    for size in [*sizes, *reversed(sizes)]:
        replayed(pair, at(size))
    assert pair.stats["captures"] == len(sizes)
    never_eager(pair)

    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS, max_graphs=2)  # the third retires the first
    for seed, size in enumerate([(16, 16), (16, 24), (24, 24), (16, 16), (24, 24)]):
        assert torch.equal(draw(pipe, seed, size=size), draw(eager, seed, size=size))
    stats = handle.stats()
    assert (stats["captures"], stats["replays"], stats["eager"]) == (4, 12, {})


@row(without=rules.shapes_unkeyed)
def other_batch_sizes(machine: Machine) -> None:
    """Another batch size raises."""

    def batch(n: int) -> Any:
        return lambda seed: {"x": rows(seed, n)}

    pair = machine.pair(Toy(lambda m, x: m.linear(x) / x.shape[0]))
    for n in (4, 1, 2):
        settle(pair, batch(n))
    for n in (1, 4, 2, 1):
        replayed(pair, batch(n))
    never_eager(pair)
    pair = family(machine, "sd3")
    for n in (1, 2, 1, 4, 4, 4, 2, 2, 1):
        pair(**{k: v if isinstance(v, bool) else cut(v, n) for k, v in inputs("sd3")(n).items()})
    assert pair.replays == 3 and pair.stats["captures"] == 3


def cut(t: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([t, t * 0.5])[:n]


@row(silent=False, without=rules.misses_unnamed, says="not named")
def another_rank_than_warmed_up(machine: Machine) -> None:
    """Every request silently eager."""
    for policy in ("eager", "error"):
        toy = Toy(lambda m, x, timestep: m.linear(x) + timestep.sum())
        pair = machine.pair(toy, on_new_shape=policy)
        call = {"x": rows(0), "timestep": torch.ones(2, 1)}
        pair.handle.warmup(inputs=[call])
        replayed(pair, lambda seed: {**call, "x": rows(seed)})
        call["timestep"] = call["timestep"][:, 0]
        if policy == "error":
            with pytest.raises(dit_graph.NewShape) as failure:
                pair.graphed(**call)
            said = str(failure.value)
        else:
            pair(**call)
            (said,) = pair.stats["eager"]
        assert "timestep has 1 dimensions vs 2" in said, "the field is not named"


@row(silent=False, without=rules.dims_unnamed, says="not named")
def more_frames_than_recorded(machine: Machine) -> None:
    """Slower than no graphs."""
    pair = machine.pair(Toy(lambda m, x: m.linear(x)), on_new_shape="eager")
    pair.handle.warmup(inputs=[{"x": torch.ones(1, frames, 4, 8)} for frames in (2, 9)])
    pair(x=torch.ones(1, 5, 4, 8))
    (said,) = pair.stats["eager"]
    assert "x dim 1: 5 vs 2" in said, "the dimension is not named"


@row(silent=False, without=rules.generations_never_retire, says="recordings are alive")
def memory_is_bounded(machine: Machine) -> None:
    """Memory grows with every size."""
    pair = machine.pair(Toy(lambda m, x: m.linear(x).relu()), max_graphs=8)
    for n in range(1, 101):
        settle(pair, lambda seed: {"x": rows(seed, n)}, times=5)
        assert alive(pair) <= 8, f"{alive(pair)} recordings are alive"
        assert len(pool_of(pair)._generations) <= 2
    for n in range(100, 0, -1):  # and a call of each of a hundred other sizes
        pair(rows(n, n + 100))
    assert alive(pair) <= 8 and pool_of(pair).bytes <= 2 * (65 << 20)
    never_eager(pair)

    pair = machine.pair(Toy(lambda m, x: m.linear(x).relu()))
    for n in range(1, 12):
        settle(pair, lambda seed: {"x": rows(seed, n)}, times=2)
    assert len(pool_of(pair)._generations) == 1, "eleven sizes share one pool"
    dit_graph.disable(pair.graphed)
    assert pool_of(pair).bytes == 0


def pool_of(pair: Pair) -> Any:
    return pair.handle.pool_on(torch.device(pair.machine.on))


def alive(pair: Pair) -> int:
    (install,) = pair.handle.installs.values()
    assert install.runner is not None
    held = sum(len(entry.tapes) for entry in install.runner.entries.values())
    assert held <= sum(len(g.groups) for g in pool_of(pair)._generations)
    return held


@row(without=rules.captions_padded)
def captions_are_never_padded(machine: Machine) -> None:
    """A padded caption changes the image, since these models have no text mask."""
    for name in ("sd3", "wan", "flux", "zimage"):
        pair = family(machine, name)
        for caption in (5, 6, 7):
            settle(pair, inputs(name, caption), times=3)
        for caption in (6, 5, 7):
            replayed(pair, inputs(name, caption), times=1)
        assert pair.stats["captures"] == 3, "a recording for each caption length"
        never_eager(pair)


@row(without=rules.masks_not_staged)
def masks_that_come_and_go(machine: Machine) -> None:
    """These models are exact with a mask, and a pipeline drops one that is all true."""
    for name, mask in (
        ("qwen", "encoder_hidden_states_mask"),
        ("lumina2", "encoder_attention_mask"),
        ("ltx", "encoder_attention_mask"),
    ):
        pair = family(machine, name)
        for caption in (3, 3, 3, 8, 8, 8, 9, 9, 9, 3, 8):
            pair(**inputs(name, caption)(caption))
        assert pair.replays >= 5
        if name == "lumina2":
            continue  # its mask is not optional
        settle(pair, inputs(name, 9, **{mask: None}))
        full = pair(**inputs(name, 9)(4))
        without = pair(**inputs(name, 9, **{mask: None})(4))
        assert torch.allclose(full[0], without[0], atol=1e-5)
        pair(**inputs(name, 5)(4))
        never_eager(pair)
