"""What we touch of torch's insides is listed: the list shrinks easily, and grows only by an edit of it."""

from __future__ import annotations

from tests.private_names import LISTED, found, listed


def test_every_private_name_attribute_and_patch_is_listed() -> None:
    missing = found() - listed()
    assert not missing, (
        f"the source touches more of torch's insides; find a public way, or add to {LISTED.name}: {missing}"
    )


def test_nothing_is_listed_that_the_source_no_longer_touches() -> None:
    gone = listed() - found()
    assert not gone, f"take these lines out of {LISTED.name}: {gone}"
