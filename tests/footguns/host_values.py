"""Rows on values that Python reads once, when the forward is recorded."""

import itertools
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn

import dit_graph
from dit_graph import current_call, eager_on_graph
from tests.footguns import rules
from tests.footguns.case import (
    add_lora,
    both,
    eager_because,
    family,
    inputs,
    never_eager,
    recorded_again,
    replayed,
    row,
    settle,
    x_only,
)
from tests.pair import Machine
from tests.toys import Toy, Unseen, rows


@row(without=rules.floats_unkeyed)
def a_float_argument(machine: Machine) -> None:
    """Another timestep list ruins the frames."""
    pair = machine.pair(Toy(lambda m, x, t=1.0: m.linear(x) * t))
    for t in (0.5, 0.25, -0.0):
        settle(pair, lambda seed: {"x": rows(seed), "t": t})
    for t in (0.25, 0.5, -0.0):
        replayed(pair, lambda seed: {"x": rows(seed), "t": t})
    never_eager(pair)

    timesteps = [torch.tensor([9.0, 5.0, 1.0]), torch.tensor([8.0, 4.0, 0.5])]
    for call in range(9):  # as Python floats that never repeat: eager, and named
        t = float(timesteps[call % 2][call % 3]) + call
        pair(rows(call), t=t)
    eager_because(pair, "argument t is another value at every call; pass it as a tensor")


@row(without=rules.lists_unseen)
def the_scale_of_a_processor(machine: Machine) -> None:
    """The scale of an IP-Adapter cannot be changed."""
    pair = family(machine, "flux")
    calls = inputs("flux")

    def with_image(seed: int) -> dict[str, Any]:
        return calls(seed) | {"joint_attention_kwargs": {"ip_hidden_states": [image(seed)]}}

    def use_ip_adapter(m: Any) -> None:
        torch.manual_seed(5)
        m.transformer_blocks[0].attn.set_processor(FluxIPAdapterAttnProcessor(32, 16, scale=[1.0]))
        m.requires_grad_(False)

    both(pair, use_ip_adapter)
    settle(pair, with_image)
    recorded_again(pair, lambda m: ip_adapter(m).scale.__setitem__(0, 0.25), with_image)

    scale = Scales()
    pair = machine.pair(Toy(lambda m, x: scaled(m.linear(x), m.processors), processors=[[scale]]))
    settle(pair, x_only)
    recorded_again(pair, lambda m: m.processors[0][0].scale[0].__setitem__(1, 3.0), x_only)


def ip_adapter(m: Any) -> Any:
    return m.transformer_blocks[0].attn.processor


def image(seed: int) -> torch.Tensor:
    return torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(seed))


class Scales:
    def __init__(self) -> None:
        self.scale = [[1.0, 0.5]]


def scaled(h: Any, processors: Any) -> Any:
    return h * sum(sum(one) for group in processors for p in group for one in p.scale)


@row(without=rules.new_tensors_unseen)
def a_mask_that_is_cast_beforehand(machine: Machine) -> None:
    """A mask is cast anew before each call, and the graph holds the first cast."""
    module = Toy(lambda m, x: m.linear(x) * m.cast, mask=torch.ones(8), cast=torch.ones(8))
    pair = machine.pair(module)
    settle(pair, x_only)

    def next_request(m: Any) -> None:
        m.mask[:3] += 1
        m.cast = m.mask.to(torch.int32)

    for _ in range(2):
        recorded_again(pair, next_request, x_only)
    for seed in range(12):  # a new tensor at every call: eager, and named
        both(pair, next_request)
        pair(rows(seed))
    eager_because(pair, "Python state changes at every call: cast")

    to_int = eager_on_graph(pure=True)(lambda mask: mask.to(torch.int32))
    for cast in (to_int, lambda mask: mask.to(torch.int32)):  # in a break, and in the segment
        pair = machine.pair(Toy(lambda m, x: m.linear(x) * cast(m.mask), mask=torch.ones(8)))
        settle(pair, x_only)
        both(pair, lambda m: m.mask.copy_(torch.arange(8)))
        replayed(pair, x_only)


class Metadata:
    """What an attention backend keeps of the batch; the same object for every request."""

    def __init__(self) -> None:
        self.length = 1


@row(without=rules.breaks_see_the_first_call)
def a_break_that_needs_the_live_batch(machine: Machine) -> None:
    """A break is replayed with the metadata of the batch that was recorded."""

    @eager_on_graph(pure=True)
    def attend(h: torch.Tensor) -> torch.Tensor:
        lengths = dit_graph.breaks.local.call and current_call().arguments["lengths"]
        return h * lengths[:, None]

    module = Toy(lambda m, x, lengths: attend(m.linear(x)) + 1).eval()
    handle = dit_graph.enable(module, device=machine.device)
    for seed in range(6):
        x, lengths = rows(seed), torch.tensor([seed, 2 * seed])
        result = module(x=x, lengths=lengths)
        assert torch.equal(result, module.linear(x) * lengths[:, None] + 1), (
            "differs from eager in result"
        )
    assert handle.stats()["replays"] == 4

    kept = eager_on_graph(pure=True)(lambda h, metadata: h * metadata.length)
    pair = machine.pair(Toy(lambda m, x: kept(m.linear(x), m.metadata), metadata=Metadata()))
    settle(pair, x_only)
    recorded_again(pair, lambda m: setattr(m.metadata, "length", 3), x_only)
    pair = machine.pair(Toy(lambda m, x, metadata: kept(m.linear(x), metadata)))
    for seed in range(4):
        pair(rows(seed), metadata=Metadata())
    eager_because(pair, "argument metadata is a Metadata, which has no value to compare")


@row(without=rules.nothing_is_compared_after_a_launch)
def a_number_on_the_module(machine: Machine) -> None:
    """The phase flips at a timestep, with equal shapes."""

    def body(m: Any, x: Any) -> Any:
        return m.linear(x) if m.t > 0.5 else -m.linear(x)

    pair = machine.pair(Toy(body, t=1.0, plan={"skip": [False]}))
    settle(pair, x_only)
    for t in (0.25, 0.75):
        recorded_again(pair, lambda m: setattr(m, "t", t), x_only)
    both(pair, lambda m: setattr(m, "t", 0.25))
    for seed in range(30):  # a phase that flips within a picture
        both(pair, lambda m: setattr(m, "t", 1 - seed / 20))
        pair(rows(seed))
    eager_because(pair, "Python state changes at every call: t")


@row(without=rules.only_top_level_staged)
def tensors_inside_containers(machine: Machine) -> None:
    """Only the tensors at the top level are staged."""

    def body(m: Any, x: Any, blocks: Any) -> Any:
        down, (mid, last) = blocks["down"], blocks["rest"]
        return m.linear(x) + sum(down) * mid["t"] - last[0][0]

    def nested(seed: int) -> dict[str, Any]:
        a, b, c, d = (rows(seed + 30 * i) for i in range(4))
        return {"x": rows(seed), "blocks": {"down": [a, b], "rest": ({"t": c}, [[d]])}}

    pair = machine.pair(Toy(body))
    settle(pair, nested)
    pair = family(machine, "flux")

    def with_controlnet(seed: int) -> dict[str, Any]:
        samples = [torch.full((1, 16, 32), float(seed))]
        return inputs("flux", controlnet_block_samples=samples)(seed)

    settle(pair, with_controlnet)
    pair = family(machine, "zimage")
    settle(pair, inputs("zimage"))


@row(without=rules.only_positional_staged)
def tensors_by_keyword(machine: Machine) -> None:
    """Tensors given by keyword are ignored."""
    pair = machine.pair(Toy(lambda m, x, y=None, *, z=0.0: m.linear(x) + y * z))
    for seed in range(6):
        pair(rows(seed), rows(seed + 1), z=rows(seed + 2))
    for seed in range(6):
        pair(z=rows(seed + 2), y=rows(seed + 1), x=rows(seed))
    assert pair.replays == 8, "each way to call has a recording"
    never_eager(pair)


@row(without=rules.not_blocked_by("a forward"), says="the hook ran")
def hooks_on_a_block(machine: Machine) -> None:
    """Hooks silently do nothing."""
    aside, around = Unseen(), list[Any]()
    seen: list[Any] = aside.list
    pair = machine.pair(Toy(lambda m, x: m.blocks(x), blocks=nn.Sequential(nn.Linear(8, 8))))
    pair.graphed.requires_grad_(False)
    settle(pair, x_only)
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        block = pair.graphed.blocks[0]
        hook = getattr(block, register)(lambda *args: aside.list.append(args[1]))
        before = len(seen)
        for seed in range(4):
            pair(rows(seed))
        assert len(seen) - before == 4, f"the hook ran {len(seen) - before} times of 4"
        eager_because(pair, "a forward hook on blocks.0 would not run")
        hook.remove()
        settle(pair, x_only)
    outside = pair.graphed.register_forward_hook(lambda *args: around.append(args[1]))
    settle(pair, x_only)
    assert len(around) == 4, "a hook around the module runs at every replay"
    outside.remove()


@row(without=rules.integers_always_match)
def windows_of_the_same_total(machine: Machine) -> None:
    """Another window layout of the same total gives a wrong result."""

    def body(m: Any, x: Any, cu_seqlens: Any) -> Any:
        edges = cu_seqlens.tolist()
        windows = [x[a:b].softmax(0) for a, b in itertools.pairwise(edges)]
        return m.linear(torch.cat(windows))

    def layout(*edges: int) -> Any:
        return lambda seed: {"x": rows(seed, 8), "cu_seqlens": torch.tensor(edges)}

    pair = machine.pair(Toy(body))
    settle(pair, layout(0, 3, 8))
    for edges in ((0, 5, 8), (0, 1, 8)):
        pair(**layout(*edges)(1))
        replayed(pair, layout(*edges))
    replayed(pair, layout(0, 3, 8))
    settle(pair, layout(0, 2, 5, 8))
    never_eager(pair)

    def on_device(m: Any, x: Any, cu_seqlens: Any) -> Any:
        window = torch.bucketize(torch.arange(8, device=x.device), cu_seqlens, right=True)
        return m.linear((window[:, None] == window).float() @ x)

    pair = machine.pair(Toy(on_device))
    settle(pair, layout(0, 3, 8))
    replayed(pair, layout(0, 6, 8))


@row(without=rules.ints_unkeyed)
def sizes_of_equal_packed_shape(machine: Machine) -> None:
    """Two sizes with equal packed shapes, and the rotary table of the other one."""
    pair = family(machine, "qwen")
    for size in ((1, 4, 2), (1, 2, 4), (1, 8, 1)):
        settle(pair, inputs("qwen", img_shapes=[[size]] * 2))
    for size in ((1, 2, 4), (1, 4, 2)):
        replayed(pair, inputs("qwen", img_shapes=[[size]] * 2))
    never_eager(pair)
    pair = family(machine, "ltx")
    for height, width in ((4, 4), (2, 8), (8, 2)):
        settle(pair, inputs("ltx", height=height, width=width))
    never_eager(pair)


@row(without=rules.survivors_unseen, says="the table is garbage")
def a_rotary_table_first_built_under_capture(machine: Machine) -> None:
    """A memo table is first built while recording, and later calls of anybody read garbage."""
    pair = family(machine, "qwen")

    def sized(*size: int) -> Any:
        return inputs("qwen", img_shapes=[[size]] * 2)

    settle(pair, sized(1, 2, 4))
    pair(**sized(1, 4, 2)(0))
    for width in range(3, 140):  # the table of 128 sizes forgets this one
        pair.graphed.pos_embed._compute_video_freqs(1, 1, width)
    for seed in range(2):  # recorded, and built there
        pair(**sized(1, 4, 2)(seed))
    settle(pair, sized(1, 2, 4))
    with torch.enable_grad():  # an eager call, which reads the same table
        both(pair, lambda m: m.proj_out.weight.requires_grad_(True))
        call = sized(1, 4, 2)(3)
        result, expected = pair.graphed(**call)[0], pair.eager(**call)[0]
    assert torch.equal(result, expected), "the table is garbage in eager calls"
    assert torch.isfinite(result).all()


@row(without=rules.nested_floats_unkeyed)
def the_scale_in_attention_kwargs(machine: Machine) -> None:
    """The scale of a LoRA is a float inside a dict, and ignored."""
    pair = family(machine, "flux")
    both(pair, add_lora)
    for scale in (1.0, 0.25, 0.0):
        settle(pair, inputs("flux", joint_attention_kwargs={"scale": scale}))
    for scale in (0.25, 1.0):
        replayed(pair, inputs("flux", joint_attention_kwargs={"scale": scale}))
    never_eager(pair)
