"""Rows on what a graph cannot hold, on captures and replays that fail, and on recovering."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import dit_graph
from dit_graph import eager_on_graph
from dit_graph.breaks import capturing
from dit_graph.devices.recorder import RecorderSegment
from tests.footguns import rules
from tests.footguns.case import (
    eager_because,
    family,
    inputs,
    never_eager,
    replayed,
    row,
    settle,
    x_only,
)
from tests.footguns.signatures import pool_of
from tests.pair import Machine, Pair, torchs
from tests.recorder.test_denoise import OPTIONS, draw, flux_pipeline
from tests.toys import Toy, Unseen, rows


@row(without=rules.tolist_unseen)
def host_reads_in_the_forward(machine: Machine) -> None:
    """A table is uploaded in the forward, and mask lengths are read by Python."""
    pair = family(machine, "lumina2")
    settle(pair, inputs("lumina2", 4))
    for caption in (6, 4, 9, 6):
        pair(**inputs("lumina2", caption)(1))
        replayed(pair, inputs("lumina2", caption))
    never_eager(pair)

    def body(m: Any, x: Any, mask: Any) -> Any:
        table = torch.arange(x.shape[0]).to(x.device)[:, None] + 1
        lengths = m.read(mask.sum(1))
        return torch.cat([m.linear(x)[i, :n] * table[i] for i, n in enumerate(lengths)])

    for read in (
        lambda t: t.tolist(),
        lambda t: [int(n) for n in t],
        lambda t: t.cpu().numpy().tolist(),
        lambda t: [n.item() for n in t.unbind()],
        lambda t: list(map(int, np.asarray(t.to("cpu")))),
    ):
        pair = machine.pair(Toy(body, read=read))
        for call, n in enumerate([3, 3, 3, 6, 6, 3, 6, 3]):
            pair(rows(call), mask=torch.arange(8)[None] < torch.tensor([[n], [2]]))
        assert pair.replays >= 5
        never_eager(pair)


@row(
    silent=False,
    without=rules.own_writes_unseen,
    says="nothing says 'the forward writes Python state",
)
def a_step_of_the_scheduler(machine: Machine) -> None:
    """The scheduler's step reads the device, and counts."""
    pipe, eager = flux_pipeline(), flux_pipeline()
    handle = dit_graph.enable(pipe, **OPTIONS)
    step, seen = pipe.scheduler.step, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(capturing())
        return step(*args, **kwargs)

    def callback(pipe: Any, i: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(capturing())
        return {"latents": kwargs["latents"] * 0.5}

    pipe.scheduler.step = watched
    for seed in range(2):
        results = [draw(p, seed, callback_on_step_end=callback) for p in (pipe, eager)]
        assert torch.equal(*results)
    assert seen == [False] * (8 + 16) and handle.stats()["replays"] == 6

    def sampled(m: Any, x: Any, t: Any) -> Any:
        return m.scheduler.step(m.linear(x), t, x, return_dict=False)[0]

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    pair = machine.pair(Toy(sampled, scheduler=scheduler))
    for t in scheduler.timesteps:
        pair(rows(0), t)
    eager_because(pair, "the forward writes Python state: scheduler._step_index")


@row(without=rules.the_first_call_is_captured, says="differs from eager in result, generators")
def the_first_call_does_extra_work(machine: Machine) -> None:
    """The first call of a kernel does extra work."""
    aside = Unseen()

    def body(m: Any, x: Any) -> Any:
        kind = (id(m), x.shape[0])
        tuned = aside.dict
        if kind not in tuned:  # tries both on random data and keeps the "faster" one
            trial = torch.randn(64, 8)
            fast = m.linear(trial).sum() - torch.addmm(m.linear.bias, trial, trial.T @ trial).sum()
            tuned[kind] = torch.sin if bool(fast.isnan()) else torch.tanh
        return tuned[kind](m.linear(x)) + torch.rand_like(x)

    pair = machine.pair(Toy(body))
    settle(pair, x_only)
    settle(pair, lambda seed: {"x": rows(seed, 5)})
    never_eager(pair)


class Garbage:
    """Something in a cycle that only the collector frees, and that says when."""

    def __init__(self, seen: list[bool]) -> None:
        self.itself, self.seen = self, seen

    def __del__(self) -> None:
        capture: Any = dit_graph.breaks.local.capture
        self.seen.append(capture is not None and capture._segment is not None)


@row(without=rules.collection_goes_on, says="collected while a segment was open")
def the_collector_and_another_thread(machine: Machine) -> None:
    """A capture fails now and then, because of the collector or of another thread."""
    gone, drawn = Unseen(), Unseen()
    seen, draws = gone.list, drawn.list

    def body(m: Any, x: Any) -> Any:
        seen, draws = gone.list, drawn.list
        h = m.linear(x)
        other = threading.Thread(target=lambda: draws.append(torch.ones(50, 50) @ torch.ones(50)))
        other.start()
        for _ in range(50):
            Garbage(seen)
            h = h + 1
        other.join()
        return h

    pair = machine.pair(Toy(body))
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        settle(pair, x_only)
        assert seen and not any(seen), "collected while a segment was open"
        assert gc.isenabled()
        gc.disable()
        settle(pair, lambda seed: {"x": rows(seed, 3)})
        assert not gc.isenabled(), "collection is on again though it was off before"
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    assert all([torch.equal(t, torch.full((50,), 50.0)) for t in draws])


@row(silent=False, without=rules.failed_captures_keep_memory, says="memory is still held")
def captures_that_fail(machine: Machine) -> None:
    """A failed capture leaks memory, or leaves something switched over."""
    for where in ("first", "middle", "last", "break"):
        pair = machine.pair(Toy(failing(where)))
        for seed in range(4):
            pair(rows(seed), seed=seed)
        eager_because(pair, f"only while recording: {where}")
        as_it_was(pair)
        settle(pair, lambda seed: {"x": rows(seed, 3), "fail": False})
    for stage in ("begin", "call", "end", "home"):
        pair = machine.pair(Toy(failing("nowhere")))
        pair(rows(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RecorderSegment, stage, raising(stage))
            pair(rows(1), seed=1)
        eager_because(pair, f"capture failed: RuntimeError('at {stage}')")
        as_it_was(pair)
        settle(pair, lambda seed: {"x": rows(seed, 3)})


def failing(where: str) -> Any:
    @torchs
    def check(place: str, fail: bool) -> None:
        if fail and place == where and capturing():
            raise RuntimeError(f"only while recording: {place}")

    half = eager_on_graph(pure=True)(lambda h, fail: check("break", fail) or h * 0.5)

    def body(m: Any, x: Any, fail: bool = True) -> Any:
        x.add_(torch.rand_like(x))
        with torch.autocast("cpu", torch.bfloat16):
            h = m.linear(x)
            check("first", fail)
        h = half(h.float(), fail)
        check("middle", fail)
        h = m.linear(h)
        check("last", fail)
        return h

    return body


def raising(stage: str) -> Any:
    @torchs
    def fail(*args: Any) -> None:
        raise RuntimeError(f"at {stage}")

    return fail


def as_it_was(pair: Pair) -> None:
    assert gc.isenabled() and not capturing() and dit_graph.breaks.local.call is None
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    assert torch.get_default_dtype() is torch.float32 and not torch.is_grad_enabled()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    pool = pool_of(pair)
    assert not pool.busy and pool.bytes == 0, "memory is still held after a failed capture"


@row(
    silent=False,
    without=rules.replay_errors_come_out,
    fails=RuntimeError,
    says="launch failed",
)
def a_replay_that_fails(machine: Machine) -> None:
    """An error at replay ends the request."""

    def counting(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.rand_like(x) * m.count
        return m.linear(h.cpu().to(x.device))

    for body, broken_step in ((lambda m, x: m.linear(x), 0), (counting, -1)):
        module = Toy(body)
        module.register_buffer("count", torch.zeros(()))
        pair = machine.pair(module)
        settle(pair, x_only)
        (install,) = pair.handle.installs.values()
        (entry,) = install.runner.entries.values()
        entry.tapes[0].steps[broken_step] = launch_failed
        pair(rows(7), seed=7)
        eager_because(pair, "replay failed: RuntimeError('launch failed')")
        settle(pair, x_only)
        assert sum(pair.stats["eager"].values()) == 1


@torchs
def launch_failed() -> None:
    raise RuntimeError("launch failed")


@row(without=rules.breaks_hide_what_they_make)
def work_that_nobody_recorded(machine: Machine) -> None:
    """Stale results without an error, where work was done that no segment has recorded."""
    unseen = Unseen()
    kept = unseen.dict

    @eager_on_graph(pure=True)
    def aside(h: torch.Tensor) -> None:
        kept["mask"] = (h > 0).float()

    half = eager_on_graph(pure=True)(lambda t: t * 0.5)
    for use in (
        lambda mask: mask * 2,
        lambda mask: mask.sum().item(),
        lambda mask: mask,
        half,
        lambda mask: mask.tolist(),
        lambda mask: mask.cpu(),
    ):
        pair = machine.pair(Toy(lambda m, x: (aside(m.linear(x)), use(unseen.dict["mask"]))))
        for seed in range(5):
            pair(rows(seed))
        eager_because(pair, "a tensor made in a marked break")
        assert pair.replays == 0

    with pytest.raises(dit_graph.Unsupported, match="the module is on meta"):
        dit_graph.enable(Toy(half).to("meta"), device=machine.device)

    with ThreadPoolExecutor(1) as other:  # captures belong to one thread: unseen, but compared
        for more in (lambda h: h, lambda h: h * 2 + 1, lambda h: h.flip(0)):
            pair = machine.pair(
                Toy(lambda m, x: more(other.submit(without_grad, m, x).result())), verify="first"
            )
            for seed in range(5):
                pair(rows(seed))
            eager_because(pair, "verify: the replay differs from eager")


@torch.no_grad()
def without_grad(m: Any, x: Any) -> Any:
    return m.linear(x)
