"""What was noted lately: a table that forgets its oldest entries, so that no program makes it grow without end."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar, final

__all__ = ["Recent"]

Value = TypeVar("Value")


@final
class Recent(Generic[Value]):
    """At most `most` entries, those that were noted last; threads may use it side by side."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._entries: dict[Hashable, Value] = {}
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        """What was noted under this key, unless it is forgotten."""
        return self._entries.get(key)

    def note(self, key: Hashable, value: Value) -> None:
        """Notes a value, in the place of an older one."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = value
            if len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]

    def __len__(self) -> int:
        return len(self._entries)
