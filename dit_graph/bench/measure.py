"""Times contenders that take turns in one process, and compares their results.

The clocks of host and device both count: an eager model is bound by the host, a replay is not.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from dit_graph.bench.contenders import Call, Contender, compared_with
from dit_graph.cli.errors import one_line
from dit_graph.runner import proof

_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
SETTLING = 6
"""A module replays for good after so many calls: cold, recorded, compared, and the gate's own."""


@dataclass
class Times:
    """One contender took these seconds a call, by the wall clock and between events on the device.

    `warm` are the wall clocks of the calls before those that count; `made` is what it took to
    enable or compile the model. `peak` is the most bytes that torch had allocated on the device
    while it ran, None without one.
    """

    made: float = 0.0
    peak: int | None = None
    warm: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Activity:
    """One call kept the device `busy` with kernels for so many seconds, and launched so many."""

    busy: float
    kernels: int
    launches: int


@dataclass(frozen=True)
class Apart:
    """Two results have the same bits or not, and `most` is their largest difference.

    It is a share of the largest expected value, or None where it is no number.
    """

    equal: bool
    most: float | None


@dataclass(frozen=True)
class Measured:
    """One scenario gave, by contender, times, how far its result is from the first one's, and why
    it failed, here or in another process. `finite` is about the first one's result."""

    times: dict[str, Times]
    apart: dict[str, Apart]
    failed: dict[str, str]
    finite: bool


class Clock:
    """Time a call; a CUDA device is idle before it and after it, so that the call alone counts."""

    def __init__(self, on: torch.device) -> None:
        self.on = on
        self.cuda = on.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.on)

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, float, float | None]:
        """Give its result, the wall clock's seconds, and the device's, None without one."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.on)
        began = time.perf_counter()
        if events:
            events[0].record()
        out = run()
        if events:
            events[1].record()
        self.wait()
        wall = time.perf_counter() - began
        return out, wall, events[0].elapsed_time(events[1]) / 1e3 if events else None


def measured(
    contenders: Sequence[Contender],
    call: Call,
    clock: Clock,
    warm: int,
    rounds: int,
    meet: Callable[[Any], list[Any]],
) -> Measured:
    """Call every contender `warm` times, then all in turn, A B B A, `rounds` times.

    The very first call of all readies the device and loads kernels, for one contender as for the
    others; it is nobody's set-up here.

    Args:
        meet: called before every call, as often in every process: those of all begin together. It
            gives what each of them came with.
    """
    times = {contender.name: Times(contender.seconds) for contender in contenders}
    outs: dict[str, deque[Any]] = {name: deque(maxlen=2) for name in times}  # Two in a row differ.
    failed: dict[str, str] = {}
    turns = [contenders[::-1] if turn % 2 else contenders for turn in range(rounds)]
    order = [(contender, True) for contender in contenders for _ in range(warm)]
    order += [(contender, False) for turn in turns for contender in turn]
    for contender, warms in order:
        meet(None)
        name = contender.name
        if name in failed:
            continue
        try:
            outs[name].append(_timed(contender, call, clock, times[name], warms))
        except Exception as error:  # A compiler may fail; others go on.
            failed[name] = f"failed: {type(error).__name__}: {one_line(error)[:300]}"
    del times[contenders[0].name].warm[:1]  # What it set up on the device serves all.
    for others in meet(failed):
        failed = others | failed
    if contenders[0].name in failed:
        return Measured({}, {}, failed, False)
    times = {name: taken for name, taken in times.items() if name not in failed}
    expected = {name: list(outs[name]) for name in map(compared_with, times)}
    apart = {name: difference(list(outs[name]), expected[compared_with(name)]) for name in times}
    return Measured(times, apart, failed, all(map(finite, expected.values())))


def _timed(contender: Contender, call: Call, clock: Clock, times: Times, warms: bool) -> Any:
    """Add one call to `times` and give its result."""
    contender.before_call()
    out, wall, device = clock(lambda: call(contender))
    if clock.cuda:
        times.peak = max(times.peak or 0, torch.cuda.max_memory_allocated(clock.on))
    out = pytree.tree_map(torch.clone, out)  # A compiled model's next call would overwrite it.
    if warms:
        times.warm.append(wall)
    else:
        times.wall.append(wall)
        times.device += [] if device is None else [device]
    return out


def difference(out: Any, expected: Any) -> Apart:
    """Say whether a result has the expected bits, as `verify` has it, and how far it is off."""
    equal, most = not proof.difference(out, expected), 0.0
    pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(expected), strict=True)
    for a, b in () if equal else pairs:
        apart = float((a.double() - b.double()).abs().max() / b.double().abs().max())
        most = max(most, math.inf if math.isnan(apart) else apart)
    return Apart(equal, most if math.isfinite(most) else None)


def first_and_set_up(made: float, warm: Sequence[float], later: float) -> tuple[float, float]:
    """Give the seconds until the first call's result is there, and those of set-up.

    The first is read from the clock. Set-up is what the first calls took more than later ones:
    enabling or compiling, and the cold, the recorded, the compared and the timed call. Being a
    difference, it may come out below 0 where the machine was busier later; it is 0 then.
    """
    return made + warm[0], max(0.0, made + sum(warm) - len(warm) * later)


def finite(out: Any) -> bool:
    """Say whether a result is numbers throughout, and not all the same one."""
    leaves = [t.float() for t in pytree.tree_leaves(out)]
    return all(bool(t.isfinite().all()) and float(t.std()) > 0 for t in leaves)


def activity(contender: Contender, call: Call, clock: Clock) -> Activity | None:
    """Ask the profiler what one call does on the device; give None without a device."""
    if not clock.cuda:
        return None
    clock.wait()
    # Calls of the runtime are included. Without `acc_events` torch warns of what is no matter here.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        contender.before_call()
        call(contender)
        clock.wait()
    events = profiled.events() or []
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if "CUDA" in str(event.device_type)
    ]
    launches = sum(event.name.startswith(_LAUNCHES) for event in events)
    return Activity(covered(spans) / 1e6, len(spans), launches)


def covered(spans: list[tuple[float, float]]) -> float:
    """Measure the union of spans, because kernels on two streams run at the same time."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def percentile(values: Sequence[float], share: float) -> float:
    """Find the value below which `share` of them lie, between neighbours by interpolation."""
    return float(np.quantile(values, share))


def break_even(setup: float, steady: float, eager_setup: float, eager_steady: float) -> int | None:
    """Find the picture from which on a contender has taken less time in all than eager.

    Args:
        setup, eager_setup: seconds that the first picture takes longer than later ones.
        steady, eager_steady: seconds of a later picture.

    Returns:
        its number, from 1; None where it never comes.
    """
    if setup <= eager_setup and steady <= eager_steady:
        return 1
    if steady >= eager_steady:
        return None
    return max(1, math.floor((setup - eager_setup) / (eager_steady - steady)) + 1)
