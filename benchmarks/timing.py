"""CPU seconds, taken in turns, with the garbage collector as a user has it."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

__all__ = ["CPU", "Clock", "clocked", "interleaved", "median", "quotient", "within"]

#: Reads a clock, in seconds.
Clock = Callable[[], float]

#: The CPU seconds of this process, all threads together: other processes on the machine do not show in them.
CPU: Clock = time.process_time

#: CPU seconds after which an action has left much to collect.
_MUCH = 0.05


def clocked(action: Callable[[], object], *clocks: Clock) -> list[float]:
    """What one call takes by each clock; dropping the result does not count."""
    starts = [clock() for clock in clocks]
    result = action()
    spent = [clock() - start for clock, start in zip(clocks, starts, strict=True)]
    del result
    return spent


def interleaved(actions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The CPU seconds of each action, `repeats` times: in turns, starting with another one each time."""
    names = list(actions)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        gc.collect()
        for name in names[first:] + names[:first]:
            (spent,) = clocked(actions[name], CPU)
            taken[name].append(spent)
            # Nobody shall pay for what others left; a full collection visits all of torch, so little is left to lie.
            gc.collect(2 if spent > _MUCH else 1)
    return taken


def quotient(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the quotients turn by turn: what slows a whole turn down cancels out."""
    return median(a / b for a, b in zip(above, below, strict=True))


def within(limit_s: float, action: Callable[[], object]) -> tuple[float, bool]:
    """The CPU seconds of an action, and whether it came to its end within the limit."""
    try:
        with _stopped_after(limit_s):
            return clocked(action, CPU)[0], True
    except _LimitError:
        return limit_s, False


class _LimitError(Exception):
    pass


@contextmanager
def _stopped_after(limit_s: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
