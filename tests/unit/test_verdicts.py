"""What is a break: a table of operations and operand kinds, and the verdict on each.

Nothing is recorded and nothing runs. A meta tensor stands for one on a CUDA device: a verdict asks
only whether its device is the host, and which storage it lies in.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from dit_graph.capture.kinds import Kind, Known
from dit_graph.capture.verdicts import where
from dit_graph.devices.base import Device
from dit_graph.devices.cuda import Cuda
from dit_graph.devices.recorder import Recorder
from dit_graph.tape.trees import tensors_of

CUDA, RECORDER = Cuda(torch.device("cuda")), Recorder(torch.device("cpu"))
BOTH, ON_CUDA, ON_RECORDER = (CUDA, RECORDER), (CUDA,), (RECORDER,)
A = torch.ops.aten


@dataclass(frozen=True)
class Operand:
    """A tensor of this kind, on the device or on the host."""

    kind: Kind | None
    host: bool = False
    shape: tuple[int, ...] = (2, 3)
    dtype: torch.dtype = torch.float32

    def on(self, device: Device, known: Known) -> torch.Tensor:
        place = "meta" if device is CUDA and not self.host else "cpu"
        t = torch.zeros(self.shape, dtype=self.dtype, device=place)
        if self.kind is not None:
            known.mark(t, self.kind, host=self.host and self.kind is Kind.LIVE)
        return t


ARGUMENT, WEIGHT, POOL = Operand(Kind.STATIC), Operand(Kind.MODULE), Operand(Kind.POOL)
CONSTANT, OUTSIDE = Operand(Kind.CONSTANT), Operand(None)
MASK, BYTES = replace(POOL, dtype=torch.bool), replace(POOL, dtype=torch.uint8)
INDEX = replace(POOL, dtype=torch.long)
CONSTANT_MASK = replace(CONSTANT, dtype=torch.bool)
HOST_LIVE, HOST_CONSTANT = Operand(Kind.LIVE, host=True), Operand(Kind.CONSTANT, host=True)
HOST_OUTSIDE, HOST_WEIGHT = Operand(None, host=True), Operand(Kind.MODULE, host=True)
OUTSIDE_INDEX = replace(HOST_OUTSIDE, dtype=torch.long)
CONSTANT_INDEX = replace(HOST_CONSTANT, dtype=torch.long)
SCALAR = replace(POOL, shape=())
SCALAR_OUTSIDE, SCALAR_LIVE = replace(HOST_OUTSIDE, shape=()), replace(HOST_LIVE, shape=())
SCALAR_CONSTANT = replace(HOST_CONSTANT, shape=())
SCALAR_WEIGHT = replace(HOST_WEIGHT, shape=())


@dataclass(frozen=True)
class Row:
    """One operation and the verdict on it, with every one of `devices`.

    `device`, which the operation is given, and `made_on` say "device" or "host" for those of the
    device; `frozen` has the numbers of the tensors whose values a launch keeps.
    """

    devices: tuple[Device, ...]
    func: Any
    args: tuple[Any, ...]
    kind: Any
    reason: str = ""
    random: bool = False
    frozen: tuple[int, ...] = ()
    device: str = ""
    made_on: str = ""


def segment(devices: Any, func: Any, *args: Any, **more: Any) -> Row:
    return Row(devices, func, args, "segment", **more)


def host(devices: Any, func: Any, *args: Any, **more: Any) -> Row:
    return Row(devices, func, args, "host", f"{func} on the host", **more)


def constant(devices: Any, func: Any, *args: Any, **more: Any) -> Row:
    return Row(devices, func, args, "constant", **more)


def eager(devices: Any, func: Any, *args: Any, why: str, **more: Any) -> Row:
    """`why` follows the operation's name in the reason."""
    name = str(func).removesuffix(".default")
    return Row(devices, func, args, "break", f"{name} {why}", **more)


DATA, MASKED = "depends on data", "with a boolean mask"
READS, MOVES = "reads a CPU tensor", "between host and device"
ROWS = [
    # What one graph holds, whatever the memory is.
    segment(BOTH, A.mm.default, POOL, WEIGHT),
    segment(BOTH, A.add.Tensor, ARGUMENT, OUTSIDE),
    segment(BOTH, A.add.Tensor, CONSTANT, CONSTANT),
    segment(BOTH, A.mul_.Tensor, WEIGHT, POOL),
    segment(BOTH, A.copy_.default, ARGUMENT, POOL),
    segment(BOTH, A.fill_.Scalar, POOL, 1.0),
    segment(BOTH, A.cat.default, [POOL, OUTSIDE, CONSTANT]),
    segment(BOTH, A.add.Tensor, POOL, SCALAR),
    # What is made on the device from nothing; chance is a generator's that a graph moves.
    segment(BOTH, A.zeros.default, [2], device="device"),
    segment(BOTH, A.randn.default, [2], random=True, device="device"),
    segment(BOTH, A.normal_.default, POOL, random=True),
    segment(BOTH, A.native_dropout.default, CONSTANT, 0.5, True, random=True),
    # Shapes and values that depend on data.
    eager(BOTH, A.nonzero.default, POOL, why=DATA),
    eager(BOTH, A.nonzero.default, WEIGHT, why=DATA),
    eager(BOTH, A.masked_select.default, POOL, MASK, why=DATA),
    eager(BOTH, A._local_scalar_dense.default, SCALAR, why=DATA),
    eager(BOTH, A.equal.default, POOL, CONSTANT, why=DATA),
    eager(BOTH, A.repeat_interleave.Tensor, INDEX, why=DATA),
    # The same of constants alone can be made once, unless it draws.
    constant(BOTH, A.nonzero.default, CONSTANT, made_on="device"),
    constant(BOTH, A.equal.default, CONSTANT, CONSTANT, made_on="device"),
    # An index is dynamic where it is a mask; an uint8 one is, to torch, too.
    segment(BOTH, A.index.Tensor, POOL, [INDEX]),
    segment(BOTH, A.index.Tensor, POOL, [None, INDEX]),
    segment(BOTH, A.index_put_.default, POOL, [INDEX], POOL),
    eager(BOTH, A.index.Tensor, POOL, [MASK], why=MASKED),
    eager(BOTH, A.index.Tensor, POOL, [None, BYTES], why=MASKED),
    eager(BOTH, A._unsafe_index.Tensor, POOL, [MASK], why=MASKED),
    eager(BOTH, A.index_put.default, POOL, [MASK], POOL, why=MASKED),
    eager(BOTH, A.index_put_.default, POOL, [MASK], POOL, why=MASKED),
    eager(BOTH, A._index_put_impl_.default, POOL, [MASK], POOL, why=MASKED),
    constant(BOTH, A.index.Tensor, CONSTANT, [CONSTANT_MASK], made_on="device"),
    # A write into a constant is no constant: it must stay in its place.
    eager(BOTH, A.index_put_.default, CONSTANT, [CONSTANT_MASK], CONSTANT, why=MASKED),
    # What lies on the host, with all of its operands.
    host(BOTH, A.add.Tensor, HOST_LIVE, HOST_LIVE),
    host(ON_CUDA, A.add.Tensor, HOST_CONSTANT, HOST_OUTSIDE),
    host(ON_CUDA, A._to_copy.default, HOST_OUTSIDE, device="host"),
    host(BOTH, A.nonzero.default, HOST_LIVE),
    host(BOTH, A.mul.Tensor, SCALAR_OUTSIDE, SCALAR_OUTSIDE),
    host(ON_CUDA, A.randn.default, [2], random=True, device="host"),
    host(ON_CUDA, A.bernoulli.default, HOST_CONSTANT, random=True),
    host(ON_CUDA, A.add_.Tensor, HOST_CONSTANT, HOST_CONSTANT),
    constant(ON_CUDA, A.add.Tensor, HOST_CONSTANT, HOST_CONSTANT),
    constant(ON_CUDA, A.zeros.default, [2], device="host"),
    constant(ON_CUDA, A.lift_fresh.default, HOST_OUTSIDE),
    constant(BOTH, A.lift_fresh.default, OUTSIDE),
    constant(BOTH, A.lift.default, OUTSIDE),
    # Between the two: a copy waits for the device, or reads what a later call may change.
    eager(ON_CUDA, A._to_copy.default, POOL, device="host", why=MOVES),
    eager(ON_CUDA, A._to_copy.default, HOST_OUTSIDE, device="device", why=MOVES),
    eager(BOTH, A._to_copy.default, HOST_LIVE, device="device", why=MOVES),
    eager(BOTH, A.new_zeros.default, HOST_LIVE, [2], device="device", why=MOVES),
    eager(BOTH, A.copy_.default, POOL, HOST_LIVE, why=MOVES),
    eager(ON_CUDA, A.copy_.default, HOST_OUTSIDE, POOL, why=MOVES),
    eager(BOTH, A.copy_.default, POOL, SCALAR_OUTSIDE, why=MOVES),
    eager(BOTH, A.rand_like.default, HOST_LIVE, device="device", random=True, why=MOVES),
    constant(ON_CUDA, A._to_copy.default, HOST_CONSTANT, device="device", made_on="device"),
    constant(ON_CUDA, A._to_copy.default, CONSTANT, device="host", made_on="host"),
    eager(ON_CUDA, A.rand_like.default, HOST_CONSTANT, device="device", random=True, why=MOVES),
    # One operand on the host: a launch may keep a scalar that a guard watches or that stays.
    segment(BOTH, A.mul.Tensor, POOL, SCALAR_OUTSIDE, frozen=(1,)),
    segment(ON_CUDA, A.mul.Tensor, POOL, SCALAR_WEIGHT, frozen=(1,)),
    segment(ON_CUDA, A.mul.Tensor, POOL, SCALAR_CONSTANT, frozen=(1,)),
    segment(BOTH, A.addcmul.default, SCALAR_OUTSIDE, POOL, SCALAR_OUTSIDE, frozen=(0, 2)),
    segment(BOTH, A.fill_.Tensor, POOL, SCALAR_OUTSIDE, frozen=(1,)),
    segment(BOTH, A.fill.Tensor, POOL, SCALAR_OUTSIDE, frozen=(1,)),
    segment(BOTH, A.masked_fill_.Tensor, POOL, MASK, SCALAR_OUTSIDE, frozen=(2,)),
    segment(BOTH, A.masked_fill.Tensor, POOL, MASK, SCALAR_OUTSIDE, frozen=(2,)),
    segment(BOTH, A.where.self, MASK, POOL, SCALAR_OUTSIDE, frozen=(2,)),
    segment(BOTH, A.index_put_.default, POOL, [INDEX], SCALAR_OUTSIDE, frozen=(2,)),
    eager(BOTH, A.mul.Tensor, POOL, SCALAR_LIVE, why=READS),
    eager(BOTH, A.addcmul.default, SCALAR_OUTSIDE, POOL, SCALAR_LIVE, why=READS),
    eager(BOTH, A.fill_.Tensor, POOL, SCALAR_LIVE, why=READS),
    eager(BOTH, A.where.self, MASK, POOL, SCALAR_LIVE, why=READS),
    eager(BOTH, A.cat.default, [POOL, SCALAR_OUTSIDE], why=READS),
    eager(BOTH, A.add.Tensor, POOL, HOST_LIVE, why=READS),
    eager(ON_CUDA, A.add.Tensor, POOL, HOST_OUTSIDE, why=READS),
    eager(ON_CUDA, A.index.Tensor, POOL, [OUTSIDE_INDEX], why=READS),
    eager(ON_CUDA, A.index.Tensor, POOL, [CONSTANT_INDEX], why=READS),
    # What the host of one device is, is the device of the other.
    segment(ON_RECORDER, A.zeros.default, [2], device="host"),
    segment(ON_RECORDER, A._to_copy.default, POOL, device="host"),
    segment(ON_RECORDER, A.index.Tensor, POOL, [OUTSIDE_INDEX]),
    segment(ON_RECORDER, A.mul.Tensor, POOL, SCALAR_WEIGHT),
    constant(ON_CUDA, A.index.Tensor, CONSTANT, [CONSTANT_INDEX], made_on="device"),
]


@pytest.mark.parametrize(
    "row, device",
    [(row, device) for row in ROWS for device in row.devices],
    ids=lambda value: value.name if isinstance(value, Device) else f"{value.func}-{value.kind}",
)
def test_verdict(row: Row, device: Device) -> None:
    known = Known(device, (), ())
    named = {"": None, "device": device.on, "host": torch.device("cpu")}
    args = pytree.tree_map_only(Operand, lambda operand: operand.on(device, known), row.args)
    kwargs = {"device": named[row.device]} if row.device else {}
    frozen = tuple(tensors_of(args)[i] for i in row.frozen)
    found = where(known, device, row.func, args, kwargs)
    assert found[:3] == (row.kind, row.reason, row.random) and found.on == named[row.made_on]
    assert list(map(id, found.frozen)) == list(map(id, frozen))


@pytest.mark.parametrize("device", BOTH, ids=lambda device: device.name)
def test_what_no_segment_took_is_a_break(device: Device) -> None:
    """Unless it follows from constants, or lies on the host, where no segment would take it."""
    known, stays_out = Known(device, (), ()), {A.mm.default, A.zeros.default}

    def on(operand: Operand) -> tuple[str, str]:
        args = operand.on(device, known), operand.on(device, known)
        return where(known, device, A.mm.default, args, {}, stays_out)[:2]

    assert on(POOL) == ("break", "aten.mm could not be captured")
    assert on(CONSTANT) == ("constant", "")
    assert on(HOST_LIVE) == ("host", "aten.mm.default on the host")
    made = where(known, device, A.zeros.default, ([2],), {"device": device.on}, stays_out)
    assert made[:2] == ("break", "aten.zeros could not be captured"), "it has no operands at all"
