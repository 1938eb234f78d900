"""What fails while it is recorded or replayed, and whose error it is."""

import gc
from typing import Any

import pytest
import torch

import dit_graph
from dit_graph import eager_on_graph
from tests.pair import PLAIN, Machine, torchs
from tests.toys import Module, Unseen, reads_host, rows, run


@pytest.mark.parametrize("where", ["first", "middle", "last", "break"])
def test_what_a_forward_raises_while_it_is_recorded_it_raises(machine: Machine, where: str) -> None:
    """Nothing has moved then, and the signature is given up after three such recordings."""

    @eager_on_graph(pure=True)
    def marked(h: torch.Tensor) -> torch.Tensor:
        check("break")
        return h * 2

    def check(place: str) -> None:
        if place == where and dit_graph.breaks.capturing():
            raise LookupError(f"only while recording, {place}")

    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        x = x + torch.rand_like(x)
        check("first")
        x = marked(m.linear(x))
        m.count.mul_(2)
        check("middle")
        if bool(x.sum() > -1e9):
            x = x + m.count
        check("last")
        return x

    pair = machine.pair(Module(body))
    for i in range(3):
        pair(rows(i).to(machine.on))
        target = pair.handle.installs["Module"].runner.target
        count, drawn = pair.graphed.count.clone(), target.seeds()
        with pytest.raises(LookupError, match=f"only while recording, {where}"):
            pair.graphed(rows(i).to(machine.on))
        assert torch.equal(pair.graphed.count, count)
        assert all(map(torch.equal, drawn, target.seeds()))
    for i in range(2):
        pair(rows(i).to(machine.on))
    reason = "the forward raised LookupError while it was recorded"
    assert pair.stats["eager"] == {reason: 5} and pair.replays == 0
    where = "nowhere"
    for i in range(5):
        pair(rows(i, 3).to(machine.on))
    assert pair.replays == 3, "the next key is recorded"


@pytest.mark.parametrize("stage", ["begin", "call", "end"])
def test_a_segment_that_fails_is_unwound(machine: Machine, stage: str, monkeypatch: Any) -> None:
    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.rand_like(x)
        return h + bool(h.sum() > -1e9) + m.count

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    segment = type(pair.handle.pool_on(torch.device(machine.on)).device.segment(None, lambda t: t))
    real = getattr(segment, stage)

    @torchs
    def failing(self: Any, *args: Any) -> Any:
        if stage == "end":
            real(self, *args)
        raise RuntimeError(f"at {stage}")

    with monkeypatch.context() as patch:
        patch.setattr(segment, stage, failing)
        pair(rows(1).to(machine.on), seed=1)
    for i in range(4):
        pair(rows(i, 3).to(machine.on), seed=i)
    assert list(pair.stats["eager"]) == [f"capture failed: RuntimeError('at {stage}')"]
    assert pair.replays == 2 and gc.isenabled()


def test_a_users_own_error_comes_through(machine: Machine) -> None:
    def body(m: Any, x: Any) -> Any:
        raise ValueError("of the user's")

    module = Module(body).to(machine.on)
    dit_graph.enable(module, device=machine.device, **PLAIN)
    for _ in range(3):
        with pytest.raises(ValueError, match="of the user's"):
            module(rows(0).to(machine.on))


def test_a_replay_that_fails_is_answered_eagerly(machine: Machine) -> None:
    pair = run(machine, lambda m, x: m.linear(x), [rows(i) for i in range(4)])
    (install,) = pair.handle.installs.values()
    (entry,) = install.runner.entries.values()

    @torchs
    def broken() -> None:
        raise RuntimeError("launch failed")

    entry.tapes[0].steps = [broken]
    for i in range(5):
        pair(rows(i).to(machine.on))
    assert pair.stats["eager"] == {"replay failed: RuntimeError('launch failed')": 1}
    assert pair.replays == 4 and pair.stats["captures"] == 2


def test_a_replay_that_always_fails_is_given_up(machine: Machine) -> None:
    pair = machine.pair(Module(lambda m, x: m.linear(x)))

    @torchs
    def broken() -> None:
        raise RuntimeError(f"launch {pair.handle.stats()['calls']} failed")

    for i in range(20):
        pair(rows(i).to(machine.on))
        for install in pair.handle.installs.values():
            for entry in install.runner.entries.values():
                for tape in entry.tapes:
                    tape.steps = [broken]
    assert pair.stats["captures"] == 3 and len(pair.stats["eager"]) == 3
    assert "replay failed" in pair.handle.report()


def test_an_error_of_the_forwards_own_while_it_is_recorded(machine: Machine) -> None:
    aside = Unseen()

    def body(m: Any, x: Any) -> Any:
        if aside.list:
            raise InterruptedError("cancelled")
        return m.linear(x)

    pair = machine.pair(Module(body))
    pair(rows(0).to(machine.on))
    for _ in range(2):
        aside.list.append(1)
        with pytest.raises(InterruptedError, match="cancelled"):
            pair.graphed(rows(1).to(machine.on))
        aside.list.clear()
        pair(rows(0).to(machine.on))  # cold again
    assert sum(pair.stats["eager"].values()) == 2
    for i in range(4):
        pair(rows(i).to(machine.on))
    assert pair.replays == 3, pair.stats


@pytest.mark.parametrize("options", [{}, {"on_failure": "raise"}])
def test_an_error_of_torchs_while_it_is_recorded(machine: Machine, options: Any) -> None:
    """Two shapes that do not go together, once: it says nothing of the recording."""
    aside = Unseen()
    body = lambda m, x: m.linear(x) @ torch.ones(3 if aside.list else 8, 3, device=x.device)
    pair = machine.pair(Module(body), **options)
    for i in range(6):
        aside.list[:] = [1] * (i == 1)
        if not aside.list:
            pair(rows(i).to(machine.on))
            continue
        with pytest.raises(RuntimeError, match="shape"):
            pair.graphed(rows(i).to(machine.on))
    assert pair.replays == 2 and sum(pair.stats["eager"].values()) == 1


def test_what_a_marked_break_raises_at_replay_it_raises(machine: Machine) -> None:
    cancelled = [False]

    @eager_on_graph
    def check(h: torch.Tensor) -> None:
        if cancelled[0]:
            raise InterruptedError("cancelled")

    def body(m: Any, x: Any) -> Any:
        m.count.add_(1)
        h = m.linear(x) + torch.rand_like(x)
        check(h)
        return h + m.count

    pair = run(machine, body, [rows(i) for i in range(4)])
    cancelled[0] = True
    count = pair.graphed.count.clone()
    for _ in range(5):
        with pytest.raises(InterruptedError, match="cancelled"):
            pair.graphed(rows(5).to(machine.on))
    assert torch.equal(pair.graphed.count, count)
    cancelled[0] = False
    pair(rows(6).to(machine.on), seed=6)
    assert pair.replays == 3 and pair.stats["captures"] == 1
    assert pair.stats["eager"] == {"the forward raised InterruptedError in a replay": 5}


def test_an_error_that_only_a_recording_has_is_no_error_of_the_forwards(machine: Machine) -> None:
    """A stand-in for a number, torch's refusal to be captured: eager decides, and has neither."""

    def of_a_stand_in(m: Any, x: Any) -> Any:
        number = m.linear(x).sum().item()
        if type(number) is not float:
            raise TypeError(f"a float is needed, got {type(number).__name__}")
        return x * number

    def of_a_capture(m: Any, x: Any) -> Any:
        try:
            return reads_host(m.linear(x))
        except RuntimeError as error:
            raise ValueError("no result") from error

    for body, why in ((of_a_stand_in, "a float is needed"), (of_a_capture, "capt")):
        pair = run(machine, body, [rows(i) for i in range(5)])
        assert any(why in reason for reason in pair.stats["eager"])
        assert "the forward raised" not in str(pair.stats["eager"])
