"""The shared tests of proof, gate and strictness on CUDA."""

from tests.proving import *  # noqa: F403
