"""Starts a test's two processes with accelerate or with torchrun, and reads what they drew."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
# --multi_gpu is accelerate's word for torchrun underneath; without GPUs it starts CPU processes
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]


def launch(
    launcher: list[str], cwd: Path, *argv: Any, gpus: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python -m argv` in two processes, on the CPU or on the CUDA devices `gpus` of ours."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and gpus:
        gpus = ",".join(visible.split(",")[int(gpu)] for gpu in gpus.split(","))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = "--main_process_port" if launcher is ACCELERATE else "--master-port"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *launcher, name, str(port), "-m", *map(str, argv)],
        cwd=cwd, env=os.environ | more, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """Each picture's pixels and settings by its name; all files must be pictures."""
    found = {}
    for path in folder.iterdir():
        with Image.open(path) as image:
            found[path.name] = image.tobytes(), image.text  # type: ignore[attr-defined]
    return found
