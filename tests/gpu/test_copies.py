"""The suite on copies of what is enabled, on CUDA."""

from tests.copies import *  # noqa: F403
