"""Which of torch's switches decide what kernels a device runs: part of every signature's key.

All are in every key, the recorder's too: attention on the CPU asks the same ones as on CUDA.
"""

from typing import Any

import torch

# They are read at every call, so nothing is looked up on the way to them.
_C, _cuda, _matmul = torch._C, torch.backends.cuda, torch.backends.cuda.matmul


def backend_switches() -> tuple[tuple[bool, ...], tuple[Any, ...], tuple[Any, ...], Any]:
    """The switches as they are now: cuDNN's, attention's, reduced precision, the BLAS library."""
    return (
        (_C._get_cudnn_enabled(), _C._get_cudnn_deterministic(), _C._get_cudnn_benchmark()),
        (_cuda.flash_sdp_enabled(), _cuda.mem_efficient_sdp_enabled(), _cuda.math_sdp_enabled(),
         _cuda.cudnn_sdp_enabled(), _cuda.fp16_bf16_reduction_math_sdp_allowed(),
         *_C._get_sdp_priority_order()),
        (*(_C._get_fp32_precision_getter("cuda", op) for op in ("matmul", "conv", "rnn")),
         _matmul.allow_fp16_reduced_precision_reduction,
         _matmul.allow_bf16_reduced_precision_reduction, _matmul.allow_fp16_accumulation),
        _C._get_blas_preferred_backend(),
    )  # fmt: skip
