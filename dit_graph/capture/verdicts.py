"""Says where one operation of a forward that is being recorded must go, and why.

It looks at the operation and at what is known of its operands, and changes nothing; `operations.py`
acts on the verdict.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch

from dit_graph.capture.effects import writes
from dit_graph.capture.kinds import Known
from dit_graph.devices.base import Device
from dit_graph.tape.trees import tensors_of

_aten = torch.ops.aten
_LIFTS = {_aten.lift.default, _aten.lift_fresh.default}
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_MASK_INDEXED = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default, _aten._unsafe_index.Tensor,
}  # fmt: skip
# Like pointwise operations, these put the value of a 0-dim operand on the host into the launch.
_READ_SCALARS = {
    _aten.fill.Tensor, _aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor,
}  # fmt: skip
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Verdict(NamedTuple):
    """Where an operation goes, and what must be done on its way there.

    A `segment` records it. `host` work runs again at every replay without ending a segment. A
    `constant` is made once and held. A `break` runs eagerly between two segments.
    """

    kind: Literal["segment", "host", "constant", "break"]
    reason: str = ""  # The report says this of what runs eagerly at replay.
    random: bool = False  # It draws, or may draw, from a generator.
    frozen: tuple[torch.Tensor, ...] = ()  # A launch keeps the values of these.
    on: torch.device | None = None  # This device makes the constant; None: the host.


def where(
    known: Known, device: Device, func: Any, args: Any, kwargs: dict[str, Any],
    stays_out: Collection[Any] = (),
) -> Verdict:  # fmt: skip
    """Give the verdict on one operation; `stays_out` holds those that no segment takes."""
    if func in _LIFTS:
        return Verdict("constant")
    operands = tensors_of((args, kwargs))
    random = is_random(func)
    on_host = [t for t in operands if known.is_host(t)]
    target = kwargs.get("device")
    to_host = target is not None and target.type == device.host_type
    to_device = target is not None and target.type == device.type
    # A write has its place among the steps, so it is none even if it writes into a constant.
    constant = not random and not writes(func) and all(map(known.is_constant, operands))
    if to_host if not operands else len(on_host) == len(operands) and not to_device:
        return Verdict("constant") if constant else Verdict("host", f"{func} on the host", random)
    crosses = to_host or bool(on_host and (to_device or func in _COPIES))
    reason = _breaks_because(known, device, func, args, on_host, crosses, stays_out)
    if reason is None:
        return Verdict("segment", "", random, tuple(on_host))
    if operands and constant:
        return Verdict("constant", on=target or device.on)
    return Verdict("break", reason, random)


def is_random(func: Any) -> bool:
    """Tell whether an operation draws, or may draw, from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def _breaks_because(
    known: Known, device: Device, func: Any, args: Any, on_host: list[torch.Tensor], crosses: bool,
    stays_out: Collection[Any],
) -> str | None:  # fmt: skip
    name, tags = str(func).removesuffix(".default"), getattr(func, "tags", ())
    if func in stays_out:
        return f"{name} could not be captured"
    if func in _MASK_INDEXED:  # torch tags these as dynamic, which only masks are.
        if any(t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None):
            return f"{name} with a boolean mask"
    elif any(tag in _DEPENDS_ON_DATA for tag in tags):
        return f"{name} depends on data"
    if crosses:
        return f"{name} between host and device"
    reads_scalars = torch.Tag.pointwise in tags or func in _READ_SCALARS | device.uploads_scalars
    for t in on_host:
        stays = known.is_outside(t) or known.is_constant(t)  # A guard watches what is outside.
        if t.dim() or not reads_scalars or not stays:
            return f"{name} reads a CPU tensor"
    return None
