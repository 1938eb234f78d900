"""Finds where the host waits for the device: torch warns of it, and source lines are counted."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dit_graph.capture.frames import source_line
from dit_graph.errors import ConfigError


@dataclass(frozen=True)
class HostSync:
    """At this line (`file:line in function`) the host waited `count` times for the device."""

    where: str
    count: int


@contextmanager
def host_syncs() -> Iterator[list[HostSync]]:
    """Collect the host syncs of what runs inside; the list is filled at the end, most first.

    It goes by `torch.cuda.set_sync_debug_mode`, which knows torch's own operations, not those of
    other libraries and not `torch.cuda.synchronize`, and which holds for the whole process.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("host syncs are found on a CUDA device, and torch sees none")
    seen: Counter[str] = Counter()
    found: list[HostSync] = []

    def note(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            seen[source_line()] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    found += [HostSync(where, count) for where, count in seen.most_common()]
