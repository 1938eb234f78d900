"""The hard cases, grouped by kind. Their plain asserts say what they compared."""

import pytest

for _name in ("case", "aliasing", "host_values", "adapters", "signatures", "failures", "company"):
    pytest.register_assert_rewrite(f"{__name__}.{_name}")
