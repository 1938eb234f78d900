"""The calls that a warm-up makes: of a pipeline, of a bare module, of a causal LM.

All are made as the user makes them, and leave what the user gave as it was.
"""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dit_graph.call.buckets import schedule
from dit_graph.config import GraphConfig
from dit_graph.devices import default_generators
from dit_graph.errors import ConfigError
from dit_graph.tape.trees import tensors_of

Runs = list[Callable[[], None]]


def runs(
    target: Any,
    bodies: Iterable[torch.nn.Module],
    config: GraphConfig,
    sizes: Sequence[tuple[int, int]] | None,
    inputs: Sequence[Any] | None,
    kwargs: dict[str, Any],
) -> Runs:
    """What `Handle.warmup` was asked for, as calls, the largest first.

    Raises:
        ConfigError: the arguments do not go with the target.
    """
    if config.mode == "prefill":
        return bucket_runs(bodies, config, sizes=sizes, inputs=inputs, **kwargs)
    module = isinstance(target, torch.nn.Module)
    if (sizes is None) == (inputs is None) or module != (inputs is not None):
        raise ConfigError("warmup takes sizes for a pipeline, inputs for a bare module")
    if inputs is None:
        return pipeline_runs(target, list(sizes or ()), kwargs)
    if kwargs:
        given = ", ".join(kwargs)
        raise ConfigError(f"warmup of a bare module takes inputs alone; given too: {given}")
    return module_runs(target, inputs)


def bucket_runs(
    bodies: Iterable[torch.nn.Module], config: GraphConfig, batch: int = 1, **other: Any
) -> Runs:
    """Every bucket for prompts of `batch` rows."""
    if given := [name for name, value in other.items() if value is not None]:
        raise ConfigError(f"warmup of prefill takes batch alone; given too: {', '.join(given)}")
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch must be a whole number of at least 1, got {batch!r}")
    sizes = sorted(config.buckets or schedule(config.max_tokens), reverse=True)
    return [functools.partial(fill_bucket, body, n, batch) for body in bodies for n in sizes]


def fill_bucket(body: Any, length: int, batch: int) -> None:
    """Two calls of a causal LM's body with `length` tokens, with a cache of its own each."""
    weight = body.get_input_embeddings().weight
    tokens = torch.zeros(batch, length, dtype=torch.long, device=weight.device)
    with torch.no_grad():
        for _ in range(2):
            body(input_ids=tokens, use_cache=True)


def pipeline_runs(pipe: Any, sizes: Sequence[tuple[int, int]], kwargs: dict[str, Any]) -> Runs:
    """Two steps of the user's own pipeline at each (height, width) in pixels, largest first.

    More where image-to-image would skip both: of `n` steps it takes at least `int(n * strength)`.
    """
    known = inspect.signature(pipe.__call__).parameters
    if not {"height", "width"} <= known.keys():
        raise ConfigError(f"{type(pipe).__name__} takes no height and width; call it once a size")
    if not all(isinstance(size, (tuple, list)) and len(size) == 2 for size in sizes):
        raise ConfigError(f"warmup takes sizes as pairs (height, width), got {sizes!r}")
    strength = kwargs.get("strength", getattr(known.get("strength"), "default", 1))
    skips = isinstance(strength, (int, float)) and 0 < strength < 1
    steps = max(2, math.ceil(1 / strength)) if skips else 2
    fixed = {"num_inference_steps": steps, "output_type": "latent"}
    if taken := sorted({"height", "width", *fixed} & kwargs.keys()):
        raise ConfigError(f"warmup sets {', '.join(taken)} itself")

    def run(height: int, width: int) -> None:
        with unchanged(pipe, kwargs):
            pipe(height=height, width=width, **fixed, **kwargs)

    largest_first = sorted(sizes, key=lambda size: -size[0] * size[1])
    return [functools.partial(run, *size) for size in largest_first]


def module_runs(module: torch.nn.Module, inputs: Sequence[Any]) -> Runs:
    """Two calls of a bare module for each input, a dict of keywords or a tuple, largest first."""

    def size(call: Any) -> int:
        return -sum(t.numel() for t in tensors_of(call))

    wanted = "warmup takes as inputs a list of dicts or tuples, one a signature"
    if not isinstance(inputs, (list, tuple)) or not inputs:
        got = "an empty one" if isinstance(inputs, (list, tuple)) else type(inputs).__name__
        raise ConfigError(f"{wanted}; got {got}")
    if other := [
        type(call).__name__ for call in inputs if not isinstance(call, (dict, list, tuple))
    ]:
        raise ConfigError(f"{wanted}; one of them is a {other[0]}")

    def run(call: Any) -> None:
        args, kwargs = ((), call) if isinstance(call, dict) else (tuple(call), {})
        with torch.no_grad():
            module(*args, **kwargs)
            module(*args, **kwargs)

    return [functools.partial(run, call) for call in sorted(inputs, key=size)]


@contextmanager
def unchanged(pipe: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Run on a copy of the scheduler; put generators and the progress bar back afterwards."""
    given = kwargs.get("generator")
    generators = [*given] if isinstance(given, (list, tuple)) else [given] if given else []
    generators += default_generators()
    states = [g.get_state() for g in generators]
    scheduler, bar = pipe.scheduler, getattr(pipe, "_progress_bar_config", None)
    pipe.scheduler = copy.deepcopy(scheduler)
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        pipe.scheduler = scheduler
        if bar is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = bar
        for generator, state in zip(generators, states):
            generator.set_state(state)
