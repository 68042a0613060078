"""What the tests of torch's own names share."""

from __future__ import annotations

import pytest
from tests.compat.split_helpers import CUTS, Cut


@pytest.fixture(params=list(CUTS))
def cut(request: pytest.FixtureRequest) -> Cut:
    """Every way to cut a graph by labels."""
    return CUTS[request.param]
