"""The contract suite on CUDA."""

from tests.contract import *  # noqa: F403
