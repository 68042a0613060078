"""A ladder of plans for a step: one for each number of bytes, none of which takes more than a higher one.

The rungs do not depend on which is asked for, nor on what was asked before, so that less room never gives a plan that
takes more memory, nor less time, however the plans are found and whatever their peaks turn out to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

#: How often the bytes between two plans are halved to find one between them.
_HALVINGS = 10
#: A plan that leaves less than one in so many bytes is good enough.
_SPARE = 1_000


@final
class Ladder:
    """Plans from a slow one to a fast one, its rungs: none takes fewer bytes or more time than the one before it.

    `find` looks for a fast plan within some bytes, and need not find the fastest, nor one that fits. `measured` gives
    the peak of a plan, `seconds` its time. The bytes between the ends are halved again and again: a plan for the middle
    that is between the two around it, in bytes and in time, is a rung; any other is left out. So where two rooms part,
    the smaller one gets a rung below, and the larger one a rung above.
    """

    def __init__(
        self,
        find: Callable[[int], tuple[int, ...] | None],
        *,
        measured: Callable[[tuple[int, ...]], int],
        seconds: Callable[[tuple[int, ...]], float],
        slow: tuple[int, ...],
        fast: tuple[int, ...],
        rooms: tuple[int, int] | None = None,
    ) -> None:
        """`rooms` are the least and the most that `find` is asked for, the peaks of both ends if omitted."""
        self._find, self._measured, self._seconds = find, measured, seconds
        self._slow, self._fast = slow, fast
        self._rooms = rooms or (measured(slow), measured(fast))
        self._plans: dict[int, tuple[int, ...]] = {}

    def at(self, room: int) -> tuple[int, ...]:
        """A plan of about `room` bytes and not more, if `slow` fits and `fast` does not."""
        plan, _ = self._around(lambda plan: self._measured(plan) <= room, enough=room - room // _SPARE)
        return plan

    def at_by_trial(self, room: int, tried: Callable[[tuple[int, ...]], int]) -> tuple[int, ...]:
        """The same where a trial of a plan may give another peak than `measured` does, though not for both ends.

        A rung counts if its trial is nearer to its own peak than to those of the rungs around it, so that trials have
        the order of rungs. Usually the first that is tried does; at the worst all below it are tried.
        """
        plan = self.at(room)
        while plan != self._slow:
            peak = tried(plan)
            if peak <= room and self._is_nearest(plan, peak):
                break
            plan = self._below(plan)
        return plan

    def _below(self, plan: tuple[int, ...]) -> tuple[int, ...]:
        """The rung before this one."""
        place = self._place(plan)
        found, _ = self._around(lambda other: self._place(other) < place)
        return found

    def _is_nearest(self, plan: tuple[int, ...], peak: int) -> bool:
        """Whether a peak is nearer to that of a rung than to those of its neighbours."""
        own, place = self._measured(plan), self._place(plan)
        if peak == own:
            return True
        _, after = self._around(lambda other: self._place(other) <= place)
        return self._measured(self._below(plan)) + own < 2 * peak < own + self._measured(after)

    def _around(
        self, comes: Callable[[tuple[int, ...]], bool], *, enough: int | None = None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The last rung that `comes` before some place, and the first that does not.

        The search ends early with a rung that takes `enough` bytes.
        """
        slow, fast = self._slow, self._fast
        low, high = self._rooms
        for _ in range(_HALVINGS):
            if low >= high or (enough is not None and self._measured(slow) >= enough):
                break
            middle = (low + high) // 2
            plan = self._plan_for(middle)
            if self._place(plan) >= self._place(fast) or self._seconds(plan) < self._seconds(fast):
                high = middle
            elif self._place(plan) <= self._place(slow) or self._seconds(plan) > self._seconds(slow):
                low = middle
            elif comes(plan):
                low, slow = middle, plan
            else:
                high, fast = middle, plan
        return slow, fast

    def _plan_for(self, room: int) -> tuple[int, ...]:
        if room not in self._plans:
            self._plans[room] = self._find(room) or self._slow
        return self._plans[room]

    def _place(self, plan: tuple[int, ...]) -> tuple[int, float]:
        """Where a plan is in the order of rungs."""
        return self._measured(plan), -self._seconds(plan)
