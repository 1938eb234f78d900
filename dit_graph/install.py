"""One module's place in front of its forward: who shares it, and whether calls still lead there."""

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from dit_graph import breaks
from dit_graph.call.buckets import Buckets, schedule
from dit_graph.call.key import Signature
from dit_graph.config import GraphConfig
from dit_graph.devices import current_place, records_on
from dit_graph.errors import ConfigError, DitGraphError, NotReplayed, Unsupported
from dit_graph.memory.pool import Pool
from dit_graph.modes.denoise import Pictures
from dit_graph.regions.find import regions_of
from dit_graph.regions.regions import Regions
from dit_graph.runner.runner import Runner
from dit_graph.runner.tally import Tally
from dit_graph.runner.target import Target
from dit_graph.slot import Slot

log = logging.getLogger("dit_graph")


def switched_off() -> str:
    """Why nothing is recorded in this process now, or an empty string."""
    value = os.environ.get("DIT_GRAPH_DISABLE", "")
    return "" if value in ("", "0") else f"DIT_GRAPH_DISABLE={value} is set"


class Sharer(Protocol):
    """What an install asks of the handles that cover its module."""

    config: GraphConfig
    pictures: Pictures

    def pool_on(self, device: torch.device) -> Pool: ...


class Install:
    """One module's slot and the Runner behind it, shared by every handle that covers the module."""

    def __init__(
        self, name: str, module: torch.nn.Module, handle: Sharer, config: GraphConfig
    ) -> None:
        self.name = name
        self.module = module
        self.config = config
        self.handles = [handle]
        self.runner: Runner | None = None
        self.regions: Regions | None = None
        self._answer: Callable[..., Any] = self._original
        self.tally = Tally()
        self.notes: list[str] = []
        self.removed = False
        self._said: set[str] = set()
        self._pool = handle
        self._signature = Signature(module.forward)
        if reason := switched_off() or self._resolve(device_of(module, self.config.device)):
            self._say(reason)
        self._slot = Slot(module, "forward", self)
        self._slot.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if reason := switched_off() or (self.runner is None and self._unresolved()):
            self._say(reason)
            self.tally.unreached[reason] += 1
            if self.config.strict and not switched_off():
                raise NotReplayed(f"{self.name}: {reason}")
            with breaks.answering(self._signature.arguments(args, kwargs)):
                return self._slot.original(*args, **kwargs)
        assert self.runner is not None
        try:
            for handle in self.handles:
                handle.pictures.listen()  # the pipeline may have got another scheduler
        except Exception as error:  # an odd one: its pictures are drawn all the same
            log.debug("dit_graph: the scheduler cannot be heard", exc_info=error)
        return self._answer(*args, **kwargs)

    def _unresolved(self) -> str:
        """Make the runner where the module is now; returns why there is none."""
        first = next(self.module.parameters(), None)
        try:
            return self._resolve(torch.device("cpu") if first is None else first.device)
        except DitGraphError as error:  # at `enable` it is the caller's; a call is answered
            return str(error)

    def ready(self) -> Runner | None:
        """The runner, made now where the module came to its device after `enable`."""
        if self.runner is None:
            self._unresolved()
        return self.runner

    def _resolve(self, on: torch.device) -> str:
        """Make the runner; returns why there is none on this device."""
        if not records_on(self.config.device, on):
            return f'the module is on {on}, where nothing is recorded (device="recorder" does)'
        pool = self._pool.pool_on(on)
        with pool.lock:
            if self.runner is None:
                self._answer = self._make(pool)
        return ""

    def _make(self, pool: Pool) -> Callable[..., Any]:
        """The runner, and what stands in front of it in this mode."""
        target = Target(
            self.name, self.module, self._original, self._signature, self.config, pool, self.tally
        )
        if self.config.mode == "prefill":
            return self._padding(target)
        regions = None if self.config.regions == "off" else Regions(target)
        target.divides = regions is not None and bool(regions_of(self.module))
        if self.config.regions == "blocks" and not target.divides:
            raise ConfigError(
                f'regions="blocks" needs a list of blocks of one class, and {self.name}'
                f" ({type(self.module).__name__}) has none"
            )
        self.runner = Runner(target, regions)
        self.regions = regions
        return self.runner

    def _padding(self, target: Target) -> Callable[..., Any]:
        from dit_graph.modes.prefill.prefill import Prefill  # transformers is slow to import

        buckets = Buckets(self.config.buckets or schedule(self.config.max_tokens))
        front = Prefill(self.module, self._original, buckets, self.config.backend)
        target.original, target.signature = front.padded_forward, Signature(front.padded_forward)
        target.eager = front.plain_forward
        self.runner = front.runner = Runner(target)
        return front

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("dit_graph: %s runs eagerly: %s", self.name, reason)

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        return self._slot.original(*args, **kwargs)

    def check(self) -> str:
        """Go back in where another library's hook took the slot away. Returns what was found."""
        if self.regions is not None:
            self.regions.refresh()
        if not self._slot.leads_here():
            self._slot.active = False
            there = self.module.__dict__.get("forward")
            if isinstance(there, Slot) and there.calls(self):  # an earlier one was put back
                self._slot = there
            else:
                self._slot = Slot(self.module, "forward", self)
            self._slot.install()
            note = f"the slot of {self.name} was taken away by another hook; installed again"
            if note not in self.notes:
                self.notes.append(note)
            return note
        return self.compiled_over and f"{self.name} is {self.compiled_over}"

    @property
    def compiled_over(self) -> str:
        """That compiled code of the whole module runs in place of ours, or an empty string."""
        over = self.module.__dict__.get("forward")
        if getattr(over, "_torchdynamo_orig_callable", None) is not None:
            return "compiled as a whole: its forward is compiled code, not the recordings"
        if getattr(self.module, "_compiled_call_impl", None) is None:
            return ""
        return "compiled as a whole: its compiled code runs, not the recordings"

    @property
    def installed(self) -> bool:
        return self._slot.leads_here()

    def remove(self) -> None:
        self.removed = True
        self._slot.remove()
        if self.runner is not None:
            self.runner.close()
            self.runner.pool.release()
            self.runner.pool.device.trim()


def device_of(module: torch.nn.Module, wanted: str) -> torch.device:
    """The one device of a module's tensors; where it has none, that of the device `wanted`.

    Raises Unsupported when there are several.
    """
    devices = {t.device for t in [*module.parameters(), *module.buffers()]}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported(f"{type(module).__name__} is spread over {names}; one device is needed")
    return next(iter(devices), None) or current_place(wanted)
