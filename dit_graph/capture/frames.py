"""Reads off the frames of this thread which code runs now: its line, module and caller."""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast

import torch

_MODULE_CALL = cast(Any, torch.nn.Module.__call__).__code__


def calls_from(package: str) -> bool:
    """Tell whether the torch function that runs now was called by a package."""
    frame = sys._getframe(2)
    return bool(frame.f_back and frame.f_back.f_globals.get("__name__", "").startswith(package))


def raised_in(error: BaseException) -> bool:
    """Tell whether an error was raised in model code, a user's code, or in what either has called.

    A library other than torch counts to whoever calls it.
    """
    theirs, tb = False, error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_globals.get("__name__", "")
        root = name.partition(".")[0]
        if root in ("torch", "triton") or (root == "dit_graph" and ".embedded" not in name):
            theirs = False
        elif root not in sys.stdlib_module_names and root != "numpy":
            theirs = True
        tb = tb.tb_next
    return theirs


def source_line() -> str:
    """Give `file:line in function` of the model code that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "").split(".")
        ours = name[0] == "dit_graph" and name[1:2] != ["embedded"]
        if not ours and name[0] not in ("torch", "functools", "contextlib", "warnings"):
            break
        frame = frame.f_back
    code = frame.f_code
    file = "/".join(code.co_filename.rsplit("/", 2)[-2:])
    return f"{file}:{frame.f_lineno} in {code.co_name}"


def module_path(names: Mapping[int, str]) -> str | None:
    """Find the path of the innermost module of `names` (id → path) whose call runs now, if any.

    This reads only the frames of `Module.__call__`, which lie around every forward and drop none of
    their locals. Up to Python 3.12 a look at a frame's locals keeps them for as long as the frame
    lives, and in a forward's own frame that would keep old activations.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            path = names.get(id(frame.f_locals["self"]))
            if path is not None:
                return path
        frame = frame.f_back
    return None
