"""Names the machine and the software of a run, without which its numbers say nothing."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import dit_graph

_PACKAGES = ("diffusers", "transformers", "accelerate", "triton")


def machine(on: torch.device) -> dict[str, Any]:
    """Tell what a reader needs to judge the numbers; what cannot be known is None."""
    cuda = on.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(on) if cuda else None,
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in _PACKAGES},
        "dit_graph": dit_graph.__version__,
        "github_sha": commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _driver() -> str | None:
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def commit() -> str | None:
    """Name the commit of the checkout that this runs from, with `+` where files differ from it."""
    here = str(Path(__file__).parent)
    sha = _said("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    changed = sha and _said("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{sha}+" if changed else sha


def _said(*command: str) -> str | None:
    """Give the first line that a program prints; None where it cannot be run or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
