"""Decides which pipeline draws, knows what its call takes, and loads it.

What can be said from a pipeline's class or folder is said before anything is loaded.
"""

import argparse
import inspect
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from dit_graph import embedded
from dit_graph.cli.errors import UsageError, loading, one_line
from dit_graph.cli.options import Options
from dit_graph.cli.parser import Size, finite
from dit_graph.embedded.concepts import ConceptIndex
from dit_graph.embedded.patches import check_size
from dit_graph.embedded.pipeline import EmojiPipeline
from dit_graph.modes.denoise import denoisers

_OF_EACH_CALL = ("prompt", "generator", "height", "width")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check(options: Options) -> None:
    """Check all about the model that can be checked before it is loaded.

    Raises:
        UsageError: there is no such model or LoRA, or its pipeline cannot do what is asked.
    """
    for lora in options.loras:
        if not Path(lora).expanduser().exists() and not is_hub_id(lora):
            raise UsageError(f"--lora {lora}: no such file or folder; give the path of a LoRA")
    folder = _folder(options)
    name = _class_name(folder, options) if folder is not None else ""
    if name == EmojiPipeline.__name__:
        assert folder is not None
        arguments(EmojiPipeline, options)
        _check_drawing(folder, options)
    elif isinstance(cls := getattr(diffusers, name or "-", None), type):
        arguments(cls, options)


def is_hub_id(text: str) -> bool:
    """Say whether this can be OWNER/NAME on the hub and is no file's name."""
    return bool(_HUB_ID.fullmatch(text)) and not text.endswith((".safetensors", ".bin", ".ckpt"))


def _folder(options: Options) -> Path | None:
    """Find the pipeline's local folder; there is None for one on the hub."""
    model = options.model
    if model is None:
        return embedded.WEIGHTS
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not is_hub_id(model):
        raise UsageError(
            f"{options.spelling['model']} {model}: no such folder; give the folder of a saved "
            "diffusers pipeline, or a hub id OWNER/NAME"
        )
    return None


def _class_name(folder: Path, options: Options) -> str:
    index = folder / "model_index.json"
    if folder == embedded.WEIGHTS and not index.is_file():
        return ""  # Loading says what is missing.
    try:
        name = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{options.spelling['model']} {folder}: has no readable model_index.json, so it is no "
            "saved diffusers pipeline"
        ) from error
    return str(name)


def _check_drawing(folder: Path, options: Options) -> None:
    """Check sizes and prompts of the embedded kind of model, whose files tell what it can draw."""
    for size in (*options.sizes, *options.warmup_sizes):
        try:
            check_size(**({"height": 64, "width": 64} | size))
        except ValueError as error:
            raise UsageError(f"size {spelt(size)}: {error}") from error
    config = folder / "concept_encoder" / "config.json"
    try:
        index = ConceptIndex(json.loads(config.read_text(encoding="utf-8"))["concepts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{config}: cannot be read ({one_line(error)})") from error
    for prompt in (*options.prompts, options.negative_prompt or ""):
        if prompt:
            index.find(prompt)


def spelt(size: Size) -> str:
    """Spell it WIDTHxHEIGHT, as it is given."""
    return f"{size.get('width', '?')}x{size.get('height', '?')}"


def taken_by(cls: type) -> Mapping[str, inspect.Parameter]:
    """List the arguments of a pipeline's call by name."""
    return inspect.signature(cls.__call__).parameters


def arguments(cls: type, options: Options) -> dict[str, Any]:
    """Make what every call of this class gets beside prompt, size and generators.

    Raises:
        UsageError: the class does not take what was asked for.
    """
    taken = taken_by(cls)
    given: dict[str, Any] = {
        "negative_prompt": options.negative_prompt,
        "num_inference_steps": options.steps,
        "guidance_scale": options.guidance_scale,
        "num_images_per_prompt": options.count if options.count > 1 else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    _check_taken(cls, options, given)
    given |= more(cls, options)
    check_given(cls, {*given, *_OF_EACH_CALL})
    if "num_frames" in taken and given.setdefault("num_frames", 1) != 1 and options.draws:
        raise UsageError("--pipeline-kwargs num_frames: pictures are drawn here, so it must be 1")
    return {**given, "output_type": "pil"} if "output_type" in taken else given


def _check_taken(cls: type, options: Options, given: Iterable[str]) -> None:
    taken = taken_by(cls)
    sides = {name for size in (*options.sizes, *options.warmup_sizes) for name in size}
    always = ("prompt", "generator") if options.draws else ("prompt",) * bool(options.prompts)
    for name in (*always, *given, *sorted(sides)):
        if name not in taken:
            needs = options.spelling[name]
            hint = "; explain and bench can run it" if name == "prompt" and options.draws else ""
            raise UsageError(f"{cls.__name__} takes no {name}, which {needs} needs{hint}")
    if options.loras and not (hasattr(cls, "load_lora_weights") or cls is EmojiPipeline):
        raise UsageError(f"{cls.__name__} takes no LoRA, which --lora needs")


def check_given(cls: type, given: Collection[str]) -> None:
    """Raise UsageError where a call of the class needs an argument beside the `given` ones."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name, one in taken_by(cls).items():
        needed = one.kind in named and one.default is inspect.Parameter.empty
        if needed and name != "self" and name not in given:
            raise UsageError(
                f"{cls.__name__} needs {name}; give it with --pipeline-kwargs '{{\"{name}\": ...}}'"
            )


def more(cls: type, options: Options) -> dict[str, Any]:
    """Give the arguments of `--pipeline-kwargs`, once the class takes them."""
    taken = taken_by(cls)
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for name in options.pipeline_kwargs:
        if name in options.spelling:
            raise UsageError(f"--pipeline-kwargs {name}: use {options.spelling[name]}")
        if name in ("self", "output_type", "return_dict"):
            raise UsageError(f"--pipeline-kwargs {name}: is not free, it is set here")
        if name not in taken and not anything:
            raise UsageError(f"--pipeline-kwargs {name}: {cls.__name__} takes no such argument")
    return options.pipeline_kwargs


def effective(cls: type, call: dict[str, Any], name: str) -> Any:
    """Find the value that argument `name` has in a call, the given one or the default."""
    parameter = taken_by(cls).get(name)
    default = None if parameter is None else parameter.default
    return call.get(name, None if default is inspect.Parameter.empty else default)


def load(options: Options, gpu: str = "cuda") -> Any:
    """Load the pipeline with its LoRAs to its device, and turn its own progress bar off.

    `gpu` is where `--device cuda` is.

    Raises:
        UsageError: it cannot be loaded.
    """
    name = options.model or "the embedded model"
    with loading(f"cannot load {name}"):
        pipe = _load(options)
    arguments(type(pipe), options)  # Now the class is known for certain.
    _load_loras(pipe, options.loras)
    _put_on_cache(pipe, options.cache)
    pipe.set_progress_bar_config(disable=True)
    if options.device == "cuda":
        with loading(f"cannot move {name} to the GPU"):
            pipe.to(gpu)
    return pipe


def _load(options: Options) -> Any:
    folder = _folder(options)
    if options.model is None:
        return embedded.load(options.dtype)
    cls: Any = DiffusionPipeline
    if folder is not None and _class_name(folder, options) == EmojiPipeline.__name__:
        cls = EmojiPipeline  # Diffusers itself does not know it.
    return cls.from_pretrained(folder or options.model, dtype=options.dtype)


def step_cache(text: str) -> Any:
    """Make diffusers' config of a step cache that a command line names, for argparse."""
    name, _, value = text.partition(":")
    if name != "first-block":
        raise argparse.ArgumentTypeError(
            f"must be first-block or first-block:THRESHOLD, such as first-block:0.1; got {text!r}"
        )
    if not value:
        return diffusers.FirstBlockCacheConfig()
    threshold = finite(value)
    if threshold < 0:
        raise argparse.ArgumentTypeError(f"its threshold must be at least 0, got {value!r}")
    return diffusers.FirstBlockCacheConfig(threshold=threshold)


def _put_on_cache(pipe: Any, config: Any) -> None:
    if config is None:
        return
    for name, denoiser in denoisers(pipe).items():
        enable: Any = getattr(denoiser, "enable_cache", None)
        if enable is None:
            raise UsageError(f"--cache: diffusers has no step cache for {type(denoiser).__name__}")
        with loading(f"--cache: {name} takes no {type(config).__name__}"):
            enable(config)


def _load_loras(pipe: Any, loras: Sequence[str]) -> None:
    """Load all of them; a pipeline without a loader of its own has its transformer's."""
    if not loras:
        return
    owner = pipe if hasattr(pipe, "load_lora_weights") else pipe.transformer
    load_into = getattr(owner, "load_lora_weights", None) or owner.load_lora_adapter
    names = [f"lora{number}" for number in range(len(loras))]
    for name, lora in zip(names, loras):
        path = Path(lora).expanduser()
        with loading(f"--lora {lora}: cannot be loaded"):
            load_into(str(path) if path.exists() else lora, adapter_name=name)
    if len(names) > 1:  # Otherwise only the last one is active.
        owner.set_adapters(names)
