"""Odd objects, on CUDA."""

from tests.odd import *  # noqa: F403
