"""What the tests of torch's own names share."""

from __future__ import annotations

import pytest
from tests.compat.split_helpers import CUTS, Cut
from tests.helpers.selecting import slow_but


@pytest.fixture(params=slow_but(CUTS, *CUTS.keys() - {"names_and_tuples"}))
def cut(request: pytest.FixtureRequest) -> Cut:
    """Every way to cut a graph by labels."""
    return CUTS[request.param]
