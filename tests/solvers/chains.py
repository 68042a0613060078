"""Generated chains of segments, small enough to try all of their plans."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from partita.solvers.peak import Choice, IfSaved, Stage

_VALUES = st.frozensets(st.integers(0, 2))
_CHOICES = st.builds(
    Choice,
    seconds=st.integers(0, 9).map(float),
    held=st.integers(-3, 9),
    forward=st.integers(0, 20),
    backward=st.integers(0, 20),
    saves=_VALUES,
    if_saved=st.lists(
        st.builds(IfSaved, st.integers(0, 2), *(3 * [st.integers(0, 4)])), max_size=2, unique_by=lambda one: one.value
    ).map(tuple),
)
STAGES = st.lists(
    st.builds(
        Stage,
        st.lists(_CHOICES, min_size=1, max_size=4).map(tuple),
        st.integers(0, 9),
        _VALUES,
        st.dictionaries(st.integers(0, 2), st.integers(0, 4), max_size=2).map(lambda sizes: tuple(sizes.items())),
    ),
    min_size=1,
    max_size=5,
)


def all_plans(stages: list[Stage]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(stage.choices)) for stage in stages)))
