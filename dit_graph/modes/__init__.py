"""What a kind of workload brings to the one Runner, as data and small helpers."""

from typing import Any

import torch

from dit_graph.modes.denoise import denoisers


def parts(target: Any, mode: str) -> dict[str, torch.nn.Module]:
    """The modules of a target that are graphed, by name. Raises ConfigError when there are none."""
    if mode == "denoise":
        return denoisers(target)
    from dit_graph.modes.prefill import bodies  # transformers is slow to import

    return bodies(target)
