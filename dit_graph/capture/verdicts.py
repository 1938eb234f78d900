"""Says where one operation of a forward that is being recorded must go, and why.

This looks at the operation and at what is known of its operands, and changes nothing: who acts on
a verdict is `operations.py`.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import torch

from dit_graph.capture.kinds import Known
from dit_graph.capture.writes import writes
from dit_graph.devices.base import UPLOADS_SCALARS, Device
from dit_graph.tape.trees import tensors_of

_aten = torch.ops.aten
_LIFTS = {_aten.lift.default, _aten.lift_fresh.default}
_COPIES = {_aten.copy_.default, _aten._to_copy.default}
_MASK_INDEXED = {
    _aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default,
    _aten._index_put_impl_.default, _aten._unsafe_index.Tensor,
}  # fmt: skip
# The value of a 0-dim operand on the host goes into the launch of these, as into pointwise ones.
_READ_SCALARS = {
    _aten.fill.Tensor, _aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor,
}  # fmt: skip
_DEPENDS_ON_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Verdict(NamedTuple):
    """Where an operation goes, and what has to be seen to on its way there.

    A `segment` records it. A `host` operation runs again at every replay without ending a segment.
    A `constant` is made once and held. A `break` runs eagerly between two segments.
    """

    kind: Literal["segment", "host", "constant", "break"]
    reason: str = ""  # This is what the report says of a step that runs eagerly.
    random: bool = False  # It draws from a generator.
    frozen: tuple[torch.Tensor, ...] = ()  # These operands lie on the host; a launch keeps values.
    on: torch.device | None = None  # A constant is made on this device; without one, on the host.


def where(
    known: Known, device: Device, func: Any, args: Any, kwargs: dict[str, Any],
    stays_out: Collection[Any] = (),
) -> Verdict:  # fmt: skip
    """Say where an operation goes; `stays_out` are those that no segment took in an earlier try."""
    if func in _LIFTS:
        return Verdict("constant")
    operands = tensors_of((args, kwargs))
    random = is_random(func)
    on_host = [t for t in operands if known.is_host(t)]
    target = kwargs.get("device")
    to_host = target is not None and target.type == device.host_type
    to_device = target is not None and target.type == device.type
    if to_host if not operands else len(on_host) == len(operands) and not to_device:
        if not random and _follows_from_constants(known, func, operands):
            return Verdict("constant")
        return Verdict("host", f"{func} on the host", random)
    if func in stays_out:
        reason = "could not be captured"
    else:
        reason = _needs_a_mask_or_data(func, args) or _reads_host(known, func, on_host, to_host, to_device)
    if not reason:
        return Verdict("segment", "", random, tuple(on_host))
    if operands and not random and _follows_from_constants(known, func, operands):
        return Verdict("constant", on=target or device.on)
    return Verdict("break", f"{str(func).removesuffix('.default')} {reason}", random)
