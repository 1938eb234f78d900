"""Puts pictures on disk, under free names and with their settings inside, whole or not at all."""

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dit_graph.cli.errors import UsageError, writing

if TYPE_CHECKING:
    from dit_graph.cli.generate import GenerateOptions

THUMBNAIL = 256
"""The longest side of a picture on the contact sheet has so many pixels."""


def check(options: "GenerateOptions") -> None:
    """Raise UsageError unless the pictures can go to where they are asked to go."""
    path = options.output
    if options.single_file:
        if options.total > 1:
            raise UsageError(
                f"--output {path}: is one file for {options.total} pictures; give a folder"
            )
        if path.exists():
            raise UsageError(f"--output {path}: is there already; give another name or delete it")
        path = path.parent
    elif path.exists() and not path.is_dir():
        raise UsageError(f"--output {path}: is no folder and no .png; give one of them")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    check_writable("--output", options.output, there)


def check_writable(option: str, path: Path, folder: Path) -> None:
    """Raise UsageError unless `folder`, in which the `path` of an option will lie, takes files."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path}: nothing can be written in {folder}")


def free_numbers(folder: Path, count: int) -> list[int]:
    """Find the first `count` numbers that no picture in `folder` has."""
    found = (re.match(r"(\d{4,})-.*\.png$", name) for name in _names(folder))
    used = {int(match[1]) for match in found if match}
    return list(itertools.islice((n for n in itertools.count(1) if n not in used), count))


def named(folder: Path, number: int, prompt: str, size: tuple[int, int], seed: int) -> Path:
    """Make a picture's path from what it shows; `size` is (width, height)."""
    words = re.sub(r"[\W_]+", "-", prompt.lower()).strip("-")[:40].strip("-")
    width, height = size
    return folder / f"{number:04d}-{words or 'picture'}-{width}x{height}-seed{seed}.png"


def _sheet_path(folder: Path) -> Path:
    """Give `contact-sheet.png` in `folder` a number where that is there already."""
    used = set(_names(folder))
    more = map("contact-sheet-{}.png".format, itertools.count(2))
    names = itertools.chain(["contact-sheet.png"], more)
    return folder / next(name for name in names if name not in used)


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def save(picture: Image.Image, path: Path, settings: dict[str, str]) -> None:
    """Write a PNG with `settings` as its text; `path` has all of it or does not exist.

    Raises:
        UsageError: it cannot be written.
    """
    info = PngInfo()
    for name, value in settings.items():
        info.add_text(name, value)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{path.name[:40]}.partial")
        try:
            with partial.open("xb") as file:
                picture.save(file, format="PNG", pnginfo=info)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def save_sheet(pictures: Sequence[Path], folder: Path) -> Path:
    """Save a contact sheet of saved pictures.

    Its text under `pictures` is JSON: each file's name and what it was made with.
    """
    path = _sheet_path(folder)
    told_of = [{"file": saved.name, **_settings_of(saved)} for saved in pictures]
    sheet = contact_sheet([_thumbnail(saved) for saved in pictures])
    save(sheet, path, {"pictures": json.dumps(told_of)})
    return path


def _thumbnail(path: Path) -> Image.Image:
    """Make a small copy of a saved picture for the contact sheet."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def _settings_of(path: Path) -> dict[str, str]:
    """Read what a saved picture was made with."""
    with Image.open(path) as picture:
        text: dict[str, str] = dict(getattr(picture, "text", {}))
    return text


def contact_sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """Put the pictures in reading order on a white grid that is about square."""
    columns = math.ceil(math.sqrt(len(pictures)))
    width, height = (max(p.size[axis] for p in pictures) + 4 for axis in (0, 1))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    for place, picture in enumerate(pictures):
        row, column = divmod(place, columns)
        left = column * width + (width - picture.width) // 2
        sheet.paste(picture, (left, row * height + (height - picture.height) // 2))
    return sheet
