"""Says what is timed: a picture, one denoising step, or an LLM's prefill, at a size and batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from dit_graph.bench.contenders import Call, Contender, denoiser
from dit_graph.bench.measure import SETTLING
from dit_graph.bench.shapes import LANGUAGE_MODELS, SHAPES, Size, language_model
from dit_graph.cli import model
from dit_graph.cli.errors import UsageError, loading, told

if TYPE_CHECKING:
    from dit_graph.bench.options import BenchOptions


@dataclass
class Task:
    """This is one scenario of a run.

    Args:
        model: the pipeline or causal LM that the contenders run, its weights shared by all.
        call: what is timed.
        images: pictures (prompts in prefill) that one call makes.
        steps: denoising steps of one call; 1 for a step or a prefill.
        left_out: parts of the pipeline that do not run, as the record says it.
        tokens: of one picture or prompt, where it is known.
    """

    scenario: str
    model: Any
    call: Call
    images: int
    steps: int
    left_out: tuple[str, ...] = ()
    tokens: int | None = None

    @property
    def warm(self) -> int:
        """Count calls until one is like the next; a picture of many steps settles in one."""
        return max(2, -(-SETTLING // self.steps) + 1)

    @property
    def repeated(self) -> torch.nn.Module:
        """Find the module that dit_graph records."""
        module: torch.nn.Module = (
            self.model if isinstance(self.model, torch.nn.Module) else denoiser(self.model)
        )
        return module


def tasks(
    options: "BenchOptions", on: torch.device, share: tuple[int, int] = (0, 1)
) -> Iterator[Task]:
    """Make one scenario after the other; a model stays as long as it serves the next.

    `share` is this process and how many there are: each draws other prompts and seeds.
    """
    if options.what == "prefill":
        yield from _prefills(options, on)
        return
    pipe: Any = None
    asked = [(size["height"], size["width"]) for size in options.sizes]
    for side in asked or _default_sizes(options):
        shape = SHAPES.get(options.model or "")
        if shape is not None and shape.one_size and side is not None and side[0] != side[1]:
            raise UsageError(f"{options.model} draws squares; {side[1]}x{side[0]} is none")
        if pipe is None or (shape is not None and shape.one_size):
            pipe = _pipeline(options, side, on)
        for batch in options.batches:
            yield _picture(options, pipe, side, batch, on, share)


def _default_sizes(options: "BenchOptions") -> list[Size | None]:
    """Say what is drawn unless asked; None is the own size of a pipeline that was saved."""
    if options.model is None:
        return [(64, 64)]
    shape = SHAPES.get(options.model)
    return [None] if shape is None else [(side, side) for side in shape.sizes]


def _pipeline(options: "BenchOptions", size: Size | None, on: torch.device) -> Any:
    shape = SHAPES.get(options.model or "")
    if shape is None or size is None:
        return model.load(options, str(on))
    torch.manual_seed(0)
    with _made_on(on, options.dtype), loading(f"cannot make {options.model}"):
        pipe = shape.pipeline(size)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@contextmanager
def _made_on(on: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make modules on a device in a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with on:
            yield
    finally:
        torch.set_default_dtype(before)


def _picture(
    options: "BenchOptions", pipe: Any, size: Size | None, batch: int, on: torch.device,
    share: tuple[int, int],
) -> Task:  # fmt: skip
    shape = SHAPES.get(options.model or "")
    output = "latent" if options.latent else "pt"
    taken = model.taken_by(type(pipe))
    with _made_on(on, options.dtype):
        fixed = shape.call(batch) if shape is not None else {}
    fixed |= {"num_inference_steps": options.steps, "output_type": output}
    if size is not None:
        fixed |= {"height": size[0], "width": size[1]}
    fixed = {name: value for name, value in fixed.items() if name in taken}
    fixed |= model.more(type(pipe), options)  # It knows what a call with **kwargs takes.
    model.check_given(type(pipe), {*fixed, "prompt", "generator"})
    if options.latent and "output_type" not in taken:
        raise UsageError(f"--latent: {type(pipe).__name__} takes no output_type")
    prompted = shape is None and "prompt" in taken
    prompts = options.prompts or ("a fox",)

    def picture(contender: Contender) -> Any:
        rank, count = share
        first = (contender.turn * count + rank) * batch
        numbers = range(first, first + batch)
        given = {**fixed, "generator": [torch.Generator(on).manual_seed(n) for n in numbers]}
        if prompted:
            given["prompt"] = [prompts[n % len(prompts)] for n in numbers]
        with torch.no_grad():
            out = contender.target(**given)
        return out.images if hasattr(out, "images") else out.frames

    sized = "own size" if size is None else f"{size[1]}x{size[0]}"
    scenario = f"{options.model or 'embedded'} {sized} B{batch} {options.steps} steps"
    left_out = ("VAE",) * options.latent + ("text encoders",) * (shape is not None)
    tokens = None if shape is None or size is None else shape.tokens(size)
    whole = Task(scenario, pipe, picture, batch, options.steps or 1, left_out, tokens)
    return whole if options.what == "picture" else _step(whole)


def _step(whole: Task) -> Task:
    """Make a task of one call of the denoiser.

    It gets in turns what a picture's second call gives it and that mirrored, so that two calls in a
    row differ.
    """
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if len(seen) < 2:
            seen.append(pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))

    watched = denoiser(whole.model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        with told("drawing a picture for its steps"):
            whole.call(Contender("eager", whole.model))
    finally:
        watched.remove()
    given = seen[-1], pytree.tree_map_only(torch.Tensor, _mirrored, seen[-1])

    def step(contender: Contender) -> Any:
        args, kwargs = given[contender.turn % 2]
        with torch.no_grad():
            return denoiser(contender.target)(*args, **kwargs)[0]

    scenario = f"{whole.scenario.rsplit(' B', 1)[0]} B{whole.images} one step"
    left_out = ("VAE", "text encoders")
    return Task(scenario, whole.model, step, whole.images, 1, left_out, whole.tokens)


def _mirrored(t: torch.Tensor) -> torch.Tensor:
    return t.flip(-1) if t.dim() and t.is_floating_point() else t


def _prefills(options: "BenchOptions", on: torch.device) -> Iterator[Task]:
    name = options.model or "SmolLM2-135M-Instruct"
    if options.model in LANGUAGE_MODELS:
        torch.manual_seed(0)
        with _made_on(on, options.dtype), loading(f"cannot make {name}"):
            causal_lm = language_model(options.model)
    else:
        causal_lm = _saved_lm(options, on)
    causal_lm = causal_lm.eval().requires_grad_(False)
    vocabulary = causal_lm.config.get_text_config().vocab_size
    for tokens in options.tokens:
        for batch in options.batches:
            seeded = torch.Generator().manual_seed(tokens)
            given = torch.randint(1, vocabulary, (2, batch, tokens), generator=seeded).to(on)

            def prefill(contender: Contender, given: torch.Tensor = given) -> Any:
                prompts = given[contender.turn % 2]
                with torch.no_grad():
                    return contender.target(input_ids=prompts, logits_to_keep=1).logits

            scenario = f"{name} {tokens} tokens B{batch}"
            yield Task(scenario, causal_lm, prefill, batch, 1, ("decode",), tokens)


def _saved_lm(options: "BenchOptions", on: torch.device) -> Any:
    """Load a causal LM as `python -m dit_graph.prefill` loads it."""
    from dit_graph.cli import lm
    from dit_graph.cli.prefill import parse

    named = ["--model", options.model] if options.model else []
    asked = replace(parse(["a prompt", "--device", options.device, *named]), dtype=options.dtype)
    lm.check(asked)
    return lm.load(asked).to(on)
