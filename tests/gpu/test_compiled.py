"""Compiled code in a recorded forward on CUDA."""

from tests.compiled import *  # noqa: F403
