"""Starts a test's two processes on the CPU, with accelerate or with torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# --multi_gpu is accelerate's word for torchrun underneath; without GPUs it starts CPU processes
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "2"]


def launch(launcher: list[str], cwd: Path, *argv: Any) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = "--main_process_port" if launcher is ACCELERATE else "--master-port"
    more = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *launcher, name, str(port), "-m", *map(str, argv)],
        cwd=cwd, env=os.environ | more, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
