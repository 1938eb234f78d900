"""The recipes on CUDA."""

from tests.recipes import *  # noqa: F403
