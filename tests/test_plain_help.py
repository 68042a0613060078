"""What `help()` shows of public classes."""

from __future__ import annotations

import pickle
import pydoc

import partita


def test_fields_have_their_type_and_what_is_written_above_them() -> None:
    text = pydoc.render_doc(partita.Plan, renderer=pydoc.plaintext)
    assert (
        "treatments\n |      tuple[Treatment, ...]\n |      One for each region, in the order of `partition`.\n" in text
    )
    assert "puts_back_modes\n |      bool = False\n" in text
    assert "failures\n |      Failures\n" in text
    assert "field(" not in text
    assert "__eq__" not in text


def test_classes_stay_what_they_are() -> None:
    tolerance = partita.Tolerance(relative=0.5)
    assert pickle.loads(pickle.dumps(tolerance)) == tolerance
    assert not hasattr(tolerance, "__dict__")
