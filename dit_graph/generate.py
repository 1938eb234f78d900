"""Draw pictures from the command line: `python -m dit_graph.generate fox`.

Owns the order of things: check all that can be checked, load, record, draw, report.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

import dit_graph
from dit_graph.cli import files, model
from dit_graph.cli.errors import UsageError, exit_code, one_line, told
from dit_graph.cli.options import Options, parse
from dit_graph.cli.parser import Size

_NOTHING = {"calls": 0, "cold": 0, "captures": 0, "replays": 0, "eager": {}}
"""The counters of a run under --no-graph, where nothing counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`.

    Returns:
        0, 2 after an error that was told in one line, 130 when interrupted.
    """
    return exit_code("generate", lambda: _run(parse(argv)))


def _run(options: Options) -> None:
    files.check(options)
    model.check(options)
    pipe = model.load(options)
    with _graphed(pipe, options) as handle:
        run = _Run(pipe, options)
        if handle is not None and options.warmup_sizes:
            run.warm_up(handle)
        run.draw()
        _report(handle, options)


@contextmanager
def _graphed(pipe: Any, options: Options) -> Iterator[dit_graph.Handle | None]:
    """The pipeline's handle, or None under --no-graph; on `cpu` it is eager and says so."""
    if not options.graph:
        yield None
        return
    device = "recorder" if options.device == "recorder" else "auto"
    try:
        handle = dit_graph.enable(pipe, device=device, backend=options.backend)
    except dit_graph.DitGraphError as error:
        raise UsageError(f"{one_line(error)}; --no-graph draws without graphs") from error
    with handle:
        yield handle


def _report(handle: dit_graph.Handle | None, options: Options) -> None:
    if options.report == "json":
        print(json.dumps(_NOTHING if handle is None else handle.stats()))
    elif handle is not None:
        print(handle.report())


def _say(text: str, options: Options) -> None:
    """A line for people: on stdout, or on stderr where stdout is for a program."""
    tqdm.write(text, file=sys.stderr if options.report == "json" else sys.stdout)


@dataclass
class _Run:
    """One pipeline drawing what the options ask for."""

    pipe: Any
    options: Options

    def __post_init__(self) -> None:
        self.fixed = model.arguments(type(self.pipe), self.options)
        self.thumbnails: list[Image.Image] = []

    def warm_up(self, handle: dit_graph.Handle) -> None:
        """Record the warm-up sizes with the batch and the prompt of the first picture."""
        call = self._call(self.options.prompts[0], {}, 0)
        for name in ("num_inference_steps", "output_type"):  # which warmup sets itself
            call.pop(name, None)
        sizes = [(size["height"], size["width"]) for size in self.options.warmup_sizes]
        with told("warming up"):
            handle.warmup(sizes=sizes, **call)

    def draw(self) -> None:
        """All pictures, each saved as soon as it is there, then their contact sheet."""
        done = 0
        with tqdm(total=self.options.total, unit="picture", file=sys.stderr) as bar:
            for prompt in self.options.prompts:
                for size in self.options.sizes:
                    for offset, picture in enumerate(self._pictures(prompt, size, done)):
                        self._save(picture, prompt, self.options.seed + done + offset)
                        bar.update()
                    done += self.options.count
        if len(self.thumbnails) > 1:
            path = files.sheet_path(self.options.output)
            _write(files.contact_sheet(self.thumbnails), path, {})
            _say(str(path), self.options)

    def _call(self, prompt: str, size: Size, done: int) -> dict[str, Any]:
        """The arguments of one call. Each picture has its own generator, so it stands alone."""
        first = self.options.seed + done
        seeds = range(first, first + self.options.count)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return {**self.fixed, **size, "prompt": prompt, "generator": generators}

    def _pictures(self, prompt: str, size: Size, done: int) -> list[Image.Image]:
        with told(f"drawing {prompt!r}"):
            output = self.pipe(**self._call(prompt, size, done))
        if hasattr(output, "images"):
            return list(output.images)
        return [frames[0] for frames in output.frames]  # of a video model: its one frame each

    def _save(self, picture: Image.Image, prompt: str, seed: int) -> None:
        path = self.options.output
        if not self.options.single_file:
            path = files.numbered(path, prompt, picture.size, seed)
            self.thumbnails.append(files.thumbnail(picture))
        _write(picture, path, self._settings(picture, prompt, seed))
        _say(f"{path} seed {seed}", self.options)

    def _settings(self, picture: Image.Image, prompt: str, seed: int) -> dict[str, str]:
        """What the picture was made with, so that it can be made again."""
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
        if options.pipeline_kwargs:
            settings["pipeline_kwargs"] = json.dumps(options.pipeline_kwargs)
        return settings


def _write(picture: Image.Image, path: Any, settings: dict[str, str]) -> None:
    try:
        files.save(picture, path, settings)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
