"""The layout of the embedded model's pixels and positions: patches, ids, channels.

Shapes: B pictures, H and W pixels, N = H/4 * W/4 patches.
"""

import torch

PATCH = 4
CHANNELS = 3
MIN_SIZE, MAX_SIZE = 32, 128
DRAWING = 64
"""Side in pixels of the training drawings: a larger canvas has white around one."""
PERIODS = (32, 16, 8, 4)
"""Wavelengths, in patches, of the position channels."""
IN_CHANNELS = PATCH * PATCH * CHANNELS + 4 * len(PERIODS)
OUT_CHANNELS = PATCH * PATCH * CHANNELS


def pack(pixels: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) pixels as (B, N, 48) patches, row by row."""
    batch, channels, height, width = pixels.shape
    grid = pixels.reshape(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * PATCH * PATCH)


def unpack(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`: (B, N, 48) patches as (B, 3, `height`, `width`) pixels."""
    batch, rows, columns = len(patches), height // PATCH, width // PATCH
    grid = patches.reshape(batch, rows, columns, -1, PATCH, PATCH)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, height, width)


def _grid(rows: int, columns: int, step: float) -> torch.Tensor:
    """(rows * columns, 2) float32 places, `step` apart, measured from the centre."""
    y = (torch.arange(rows) - (rows - 1) / 2) * step
    x = (torch.arange(columns) - (columns - 1) / 2) * step
    return torch.cartesian_prod(y, x)


def patch_ids(height: int, width: int) -> torch.Tensor:
    """(N, 3) float32 rotary places of the patches, on the CPU.

    They count from the centre of the canvas, so that a drawing has the same places on a canvas of
    any size and what was learnt at 64x64 holds on the others.
    """
    return torch.nn.functional.pad(_grid(height // PATCH, width // PATCH, 1.0), (1, 0))


def caption_ids(num_tokens: int) -> torch.Tensor:
    """(num_tokens, 3) float32 rotary places of the caption tokens, a square grid over a drawing."""
    side = round(num_tokens**0.5)
    return torch.nn.functional.pad(_grid(side, side, DRAWING / PATCH / side), (1, 0))


def position_channels(ids: torch.Tensor) -> torch.Tensor:
    """(N, 16) sines and cosines of (N, 3) `patch_ids`; they ride along with the pixels.

    Rotary places alone are relative, and a memorised drawing wants to know where a patch is.
    """
    angles = [ids[:, 1:] * (2 * torch.pi / period) for period in PERIODS]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1)


def check_size(height: int, width: int) -> None:
    """Raise ValueError unless both are multiples of the patch within what the model can draw."""
    for name, size in (("height", height), ("width", width)):
        if size % PATCH or not MIN_SIZE <= size <= MAX_SIZE:
            raise ValueError(
                f"{name} must be a multiple of {PATCH} from {MIN_SIZE} to {MAX_SIZE}, got {size}"
            )
