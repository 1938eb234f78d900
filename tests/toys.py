"""Small modules whose forward is given, what they are called with, and an odd operation."""

from typing import Any

import torch
from torch import nn

import dit_graph
from dit_graph.runner.entry import Entries
from dit_graph.runner.tally import Tally
from dit_graph.state.watcher import StateWatcher
from tests.pair import Machine, Pair, torchs


class Toy(nn.Module):
    """A linear layer and a forward that is given; no buffers, whose objects `.to()` replaces."""

    def __init__(self, body: Any, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(False)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, x, *args, **kwargs)


class Module(Toy):
    """A toy with a buffer, for what a forward counts on the device."""

    def __init__(self, body: Any, **attributes: Any) -> None:
        super().__init__(body, **attributes)
        self.register_buffer("count", torch.zeros(()))


class Unseen:
    """What a test keeps aside of a forward: of the standard library by its name, so that dit_graph
    does not look into it."""

    __module__ = "logging"

    def __init__(self) -> None:
        self.list: list[Any] = []
        self.dict: dict[Any, Any] = {}


def watched(module: nn.Module) -> StateWatcher:
    """What compares a module with the state that it is in now."""
    watcher = StateWatcher(module, torch.device("cpu"), lambda: Entries(Tally()))
    watcher.compare()
    return watcher


def plain(m: Any, x: Any) -> Any:
    return m.linear(x).tanh()


def rows(seed: int, n: int = 2) -> torch.Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def shifted(t: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins `by` elements past where memory is allocated."""
    whole = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    return whole[by:].view(t.shape).copy_(t)


def run(machine: Machine, body: Any, calls: list[Any], **options: Any) -> Pair:
    """Call a pair once for each element (a tensor or a dict of keywords) and return it."""
    pair = machine.pair(Module(body), **options)
    for i, call in enumerate(calls):
        pair(**machine.to(call if isinstance(call, dict) else {"x": call}), seed=i)
    return pair


@torch.library.custom_op("dit_graph_tests::reads_host", mutates_args=())
def reads_host(x: torch.Tensor) -> torch.Tensor:
    """A kernel that waits for the device, which none of its tags says."""
    capture = dit_graph.breaks.local.capture
    if not x.is_cuda and capture is not None and capture._segment is not None:
        raise RuntimeError("stands for the error of a CUDA stream that is capturing")
    return x * float(x[0, 0].item())


@torchs
def fail_while_recording() -> None:
    if dit_graph.breaks.capturing():
        raise RuntimeError("only while recording: the stream is capturing")
