"""Draws the pictures of one process: makes each call's arguments, and a file for each picture."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from tqdm import tqdm

import dit_graph
from dit_graph.cli import files, model
from dit_graph.cli.errors import told
from dit_graph.cli.parser import Size
from dit_graph.explain.report import summed

if TYPE_CHECKING:
    from dit_graph.cli.generate import GenerateOptions


@dataclass(frozen=True)
class Call:
    """One call of the pipeline draws all pictures of a prompt and a size together.

    `first` counts the pictures before it, over all processes. The seeds follow from it.
    """

    prompt: str
    size: Size
    first: int


@dataclass
class Share:
    """All processes get to know by this what one of them has done."""

    saved: dict[int, Path] = field(default_factory=dict)  # The keys are places among all pictures.
    stats: dict[str, Any] = field(default_factory=lambda: summed([]))  # Without graphs they are 0.
    report: str = ""
    failed: str = ""


def say(text: str, options: "GenerateOptions") -> None:
    """Print a line for people on stdout, or on stderr where stdout is for a program."""
    file = sys.stderr if options.report == "json" else sys.stdout
    # The line goes out in one piece, because other processes write there too.
    tqdm.write(f"{text}\n", file=file, end="")


@dataclass
class Run:
    """One pipeline draws a part of what the options ask for.

    `numbers` are those of all files; None takes the first that is free when a picture is saved.
    """

    pipe: Any
    options: "GenerateOptions"
    share: Share
    numbers: Sequence[int] | None

    def __post_init__(self) -> None:
        self.fixed = model.arguments(type(self.pipe), self.options)

    def warm_up(self, handle: dit_graph.Handle) -> None:
        """Record the warm-up sizes with the batch and the prompt of the first picture."""
        call = self._arguments(Call(self.options.prompts[0], {}, 0))
        for name in ("num_inference_steps", "output_type"):  # Warming up sets these itself.
            call.pop(name, None)
        sizes = [(size["height"], size["width"]) for size in self.options.warmup_sizes]
        with told("warming up"):
            handle.warmup(sizes=sizes, **call)

    def draw(self, calls: Sequence[Call], shows: bool) -> None:
        """Draw `calls` and save each picture as soon as it is there; `shows` shows a bar."""
        total = len(calls) * self.options.count
        with tqdm(total=total, unit="picture", file=sys.stderr, disable=not shows) as bar:
            for call in calls:
                for number, picture in enumerate(self._pictures(call), call.first):
                    self._save(picture, call.prompt, number)
                    bar.update()

    def _arguments(self, call: Call) -> dict[str, Any]:
        """Make one call's arguments. Each picture has its own generator, so it stands alone."""
        first = self.options.seed + call.first
        seeds = range(first, first + self.options.count)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return {**self.fixed, **call.size, "prompt": call.prompt, "generator": generators}

    def _pictures(self, call: Call) -> list[Image.Image]:
        with told(f"drawing {call.prompt!r}"):
            output = self.pipe(**self._arguments(call))
        if hasattr(output, "images"):
            return list(output.images)
        return [frames[0] for frames in output.frames]  # A video has one frame here.

    def _save(self, picture: Image.Image, prompt: str, number: int) -> None:
        path, seed = self.options.output, self.options.seed + number
        if not self.options.single_file:
            free = self.numbers[number] if self.numbers else files.free_numbers(path, 1)[0]
            path = files.named(path, free, prompt, picture.size, seed)
        files.save(picture, path, self._settings(picture, prompt, seed))
        self.share.saved[number] = path
        say(f"{path} seed {seed}", self.options)

    def _settings(self, picture: Image.Image, prompt: str, seed: int) -> dict[str, str]:
        """Say what the picture was made with, so that it can be made again."""
        options, cls = self.options, type(self.pipe)
        eager = not options.graph or options.device == "cpu"
        settings = {
            "prompt": prompt,
            "negative_prompt": options.negative_prompt or "",
            "size": "x".join(map(str, picture.size)),
            "steps": str(model.effective(cls, self.fixed, "num_inference_steps")),
            "guidance_scale": str(model.effective(cls, self.fixed, "guidance_scale")),
            "seed": str(seed),
            "model": options.model or "embedded",
            "dtype": str(options.dtype).removeprefix("torch."),
            "dit_graph": dit_graph.__version__,
            "backend": "eager" if eager else options.backend,
        }
        if options.loras:
            settings["lora"] = json.dumps(options.loras)
        if options.cache is not None:
            settings["cache"] = repr(options.cache)
        if options.pipeline_kwargs:
            settings["pipeline_kwargs"] = json.dumps(options.pipeline_kwargs)
        return settings
