from collections.abc import Iterator

import pytest

from quire.ops import table


@pytest.fixture(autouse=True)
def reference_ops() -> Iterator[None]:
    """Sample with the executable specification."""
    before = table.in_use()
    table.use("reference")
    yield
    if before:
        table.use(before)
