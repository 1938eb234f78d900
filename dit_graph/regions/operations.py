"""Counts the operations that run between regions, without any mode that a model could notice.

torch's dispatcher tells them, as it tells a profiler. A dispatch mode would count as well, but
some of torch's functions take another path under one.
"""

import functools
from typing import Any

import torch

autograd: Any = torch.autograd  # its profiler has no types

_COMPOSITE = "CompositeImplicitAutograd"


class Operations:
    """Counts from `go_on` to `pause`, on this thread; nothing while somebody else profiles.

    Of operations that torch makes of others the others are counted, as in a segment.
    """

    def __init__(self) -> None:
        self.count = 0
        self._on = False

    def go_on(self) -> None:
        if not autograd._profiler_enabled():
            options = torch._C._profiler._ExperimentalConfig()
            config = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *[False] * 5, options)
            autograd._enable_profiler_legacy(config)
            self._on = True

    def pause(self) -> None:
        if self._on:
            self._on = False
            self.count += sum(map(_dispatched, autograd._disable_profiler_legacy()))


def _dispatched(events: Any) -> int:
    """How many operations the dispatcher was given that it does not make of others."""
    count = hidden = 0
    open_ones: list[bool] = []
    for event in events:
        if event.kind() == "push":
            whole = "::" in event.name() and event.name() not in _composite()
            count += whole and not hidden
            hidden += whole
            open_ones.append(whole)
        elif event.kind() == "pop" and open_ones:
            hidden -= open_ones.pop()
    return count


@functools.cache
def _composite() -> set[str]:
    made_of_others = torch._C._dispatch_get_registrations_for_dispatch_key(_COMPOSITE)
    return {name.partition(".")[0] for name in made_of_others}
