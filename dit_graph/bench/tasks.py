"""What is timed: a picture, one denoising step, or an LLM's prefill, at one size and batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dit_graph.bench.measure import SETTLING
from dit_graph.bench.shapes import LANGUAGE_MODELS, SHAPES, Size, language_model
from dit_graph.bench.variants import Call, Front
from dit_graph.cli import model
from dit_graph.cli.bench import BenchOptions
from dit_graph.cli.errors import UsageError, loading, told


@dataclass
class Task:
    """One scenario of a run.

    Args:
        model: the pipeline or causal LM that the variants run, its weights shared by all.
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
        """Calls until a later one is like the next; a picture of many steps settles in one."""
        return max(2, -(-SETTLING // self.steps) + 1)

    @property
    def repeated(self) -> torch.nn.Module:
        """The module that dit_graph records."""
        module: torch.nn.Module = (
            self.model if isinstance(self.model, torch.nn.Module) else denoiser(self.model)
        )
        return module


def denoiser(pipe: Any) -> Any:
    found = getattr(pipe, "transformer", None)
    return pipe.unet if found is None else found


def tasks(options: BenchOptions, on: torch.device) -> Iterator[Task]:
    """The scenarios of a run, one after the other; a model stays as long as it serves the next."""
    if options.what == "prefill":
        yield from _prefills(options, on)
        return
    pipe: Any = None
    asked = [(size["height"], size["width"]) for size in options.sizes]
    for side in asked or _default_sizes(options):
        shape = SHAPES.get(options.model or "")
        if pipe is None or (shape is not None and shape.one_size):
            pipe = _pipeline(options, side, on)
        for batch in options.batches:
            yield _picture(options, pipe, side, batch, on)


def _default_sizes(options: BenchOptions) -> list[Size]:
    shape = SHAPES.get(options.model or "")
    return [(side, side) for side in (shape.sizes if shape is not None else (64,))]


def _pipeline(options: BenchOptions, size: Size, on: torch.device) -> Any:
    shape = SHAPES.get(options.model or "")
    if shape is None:
        return model.load(options, str(on))
    torch.manual_seed(0)
    with _made_on(on, options.dtype), loading(f"cannot make {options.model}"):
        pipe = shape.pipeline(size)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class _made_on:
    """Make modules on a device in a dtype."""

    def __init__(self, on: torch.device, dtype: torch.dtype) -> None:
        self._on, self._dtype = on, dtype

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        self._on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._on.__exit__(*error)
        torch.set_default_dtype(self._before)


def _picture(options: BenchOptions, pipe: Any, size: Size, batch: int, on: torch.device) -> Task:
    height, width = size
    shape = SHAPES.get(options.model or "")
    named = options.model or "embedded"
    output = "latent" if options.latent else "pt"
    with _made_on(on, options.dtype):
        given = shape.call(batch) if shape is not None else _prompts(options, batch)
    given |= model.more(type(pipe), options)
    taken = model.taken_by(type(pipe))
    given |= {"num_inference_steps": options.steps, "output_type": output}
    if "height" in taken:
        given |= {"height": height, "width": width}
    given = {name: value for name, value in given.items() if name in taken}
    if options.latent and "output_type" not in taken:
        raise UsageError(f"--latent: {type(pipe).__name__} takes no output_type")

    def picture(front: Front) -> Any:
        generators = [torch.Generator(on).manual_seed(seed) for seed in range(batch)]
        with torch.no_grad():
            out = front.target(**given, generator=generators)
        return out.images if hasattr(out, "images") else out.frames

    scenario = f"{named} {width}x{height} B{batch} {options.steps} steps"
    left_out = ("VAE",) * options.latent + ("text encoders",) * (shape is not None)
    tokens = shape.tokens(size) if shape is not None else None
    whole = Task(scenario, pipe, picture, batch, options.steps or 1, left_out, tokens)
    return whole if options.what == "picture" else _step(whole)


def _prompts(options: BenchOptions, batch: int) -> dict[str, Any]:
    prompts = [options.prompts[i % len(options.prompts)] for i in range(batch)]
    return {"prompt": prompts}


def _step(whole: Task) -> Task:
    """One call of the denoiser, with what a picture's second step gives it."""
    seen: list[Any] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        clone = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        seen.append(clone)

    watched = denoiser(whole.model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        with told("drawing a picture for its steps"):
            whole.call(Front("eager", whole.model))
    finally:
        watched.remove()
    args, kwargs = seen[min(1, len(seen) - 1)]

    def step(front: Front) -> Any:
        with torch.no_grad():
            return denoiser(front.target)(*args, **kwargs)[0]

    scenario = f"{whole.scenario.rsplit(' B', 1)[0]} B{whole.images} one step"
    left_out = ("VAE", "text encoders")
    return Task(scenario, whole.model, step, whole.images, 1, left_out, whole.tokens)


def _prefills(options: BenchOptions, on: torch.device) -> Iterator[Task]:
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
            given = torch.randint(1, vocabulary, (batch, tokens), generator=seeded).to(on)

            def prefill(front: Front, given: torch.Tensor = given) -> Any:
                with torch.no_grad():
                    return front.target(input_ids=given, logits_to_keep=1).logits

            scenario = f"{name} {tokens} tokens B{batch}"
            yield Task(scenario, causal_lm, prefill, batch, 1, ("decode",), tokens)


def _saved_lm(options: BenchOptions, on: torch.device) -> Any:
    """A causal LM as `python -m dit_graph.prefill` loads it."""
    from dit_graph.cli import lm
    from dit_graph.cli.prefill import parse

    named = ["--model", options.model] if options.model else []
    asked = replace(parse(["a prompt", "--device", options.device, *named]), dtype=options.dtype)
    lm.check(asked)
    return lm.load(asked).to(on)
