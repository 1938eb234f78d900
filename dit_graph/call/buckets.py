"""The token counts that prefill is recorded for; any other count is padded to the next of them."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from dit_graph.errors import ConfigError

_SCHEDULE = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
_STEP_BEYOND = 512
MAX_RATIO = 2  # of padded to live tokens; above it the padding costs more than the launches


def schedule(most: int) -> tuple[int, ...]:
    """The default buckets, up to `most`, which is always the last.

    4 to 32 tokens by 4, to 256 by 16, to 512 by 32, to 1024 by 64, to 4096 by 256, then by 512.
    """
    sizes = [n for first, last, step in _SCHEDULE for n in range(first, last + 1, step)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + _STEP_BEYOND)
    return (*(n for n in sizes if n < most), most)


class Buckets:
    """Sorted token counts.

    Raises:
        ConfigError: there is none, or they are not whole numbers in rising order.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if not isinstance(sizes, Iterable):
            raise ConfigError(f"buckets must be a sequence of token counts, got {sizes!r}")
        self.sizes = tuple(sizes)
        if not self.sizes:
            raise ConfigError("buckets is empty: nothing would be recorded; leave it out, or None")
        if any(type(n) is not int or n < 1 for n in self.sizes):
            raise ConfigError(f"buckets must be whole numbers of at least 1, got {sizes!r}")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:])):
            raise ConfigError(f"buckets must rise without duplicates, got {sizes!r}")

    def find(self, live: int) -> tuple[int, str]:
        """The smallest bucket for `live` tokens, or 0 and why there is none."""
        index = bisect_left(self.sizes, live)
        if index == len(self.sizes):
            return 0, f"{live} tokens are past the largest bucket {self.sizes[-1]}"
        if self.sizes[index] > MAX_RATIO * live:
            return (
                0,
                f"{live} tokens would be padded to {self.sizes[index]}, over {MAX_RATIO} times",
            )
        return self.sizes[index], ""
