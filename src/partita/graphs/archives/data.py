"""JSON from a file that nobody vouches for, read value by value: each has the type and the form that is asked for."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator
from typing import Any, NoReturn, Self, final
from unicodedata import normalize

from torch import nn
from torch.fx import Graph, GraphModule

from partita._torch.names import ADDED_BY_EXPORT

__all__ = ["LONGEST_NAME", "Data", "MalformedError", "NotDataError", "RefusedError"]

#: Far more values than a graph of a hundred thousand nodes has; each takes up to a hundred bytes of memory.
MOST_VALUES = 20_000_000
_MOST_LETTERS = 100_000
#: To normalize a text takes time that grows like the square of its length.
LONGEST_NAME = 1_000


class RefusedError(Exception):
    """What is wrong with a file, and the member that has it, if that is another one than the text being read."""

    def __init__(self, what: str, member: str | None = None) -> None:
        super().__init__(what)
        self.member = member


class MalformedError(RefusedError):
    """Something that torch does not write: the file is damaged, or from elsewhere."""


class NotDataError(RefusedError):
    """Something that is more than data, or that could be: only a file that is trusted may have it."""


@final
class Data:
    """A value of a JSON text, and where it stands."""

    __slots__ = ("_key", "_owner", "value")

    def __init__(self, value: Any, owner: Data | None = None, key: str | int = "") -> None:
        self.value = value
        self._owner = owner
        self._key = key

    @classmethod
    def of(cls, text: bytes | str, owner: Data | None = None, key: str | int = "") -> Self:
        """What a JSON text holds."""
        here = cls(text, owner, key)
        data = text.encode() if isinstance(text, str) else text
        if sum(data.count(sign) for sign in b",[{") > MOST_VALUES:
            here.malformed(f"it has more than {MOST_VALUES} values, which no graph needs")
        try:
            return cls(json.loads(data), owner, key)
        except (ValueError, RecursionError) as error:
            here.malformed(f"it is no JSON: {type(error).__name__}")

    def malformed(self, why: str) -> NoReturn:
        raise MalformedError(f"{self._where()}{why}")

    def refuse(self, why: str) -> NoReturn:
        raise NotDataError(f"{self._where()}{why}")

    def _where(self) -> str:
        keys, here = [], self
        while here._owner is not None:
            keys.append(f"[{here._key}]" if isinstance(here._key, int) else f".{here._key[:60]}")
            here = here._owner
        return "".join(reversed(keys)).removeprefix(".") + ": " if keys else ""

    def _is_no(self, kind: str) -> NoReturn:
        self.malformed(f"{repr(self.value)[:100]} is no {kind}")

    # Containers --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Data | None:
        """What a mapping has under a key; None where that is missing or null."""
        if not isinstance(self.value, dict):
            self._is_no("mapping")
        found = self.value.get(key)
        return None if found is None else Data(found, self, key)

    def __getitem__(self, key: str) -> Data:
        found = self.get(key)
        if found is None and key not in self.value:
            self.malformed(f"there is no {key!r}")
        return Data(None, self, key) if found is None else found

    def entries(self) -> Iterator[tuple[str, Data]]:
        if not isinstance(self.value, dict):
            self._is_no("mapping")
        return ((key, Data(value, self, key)) for key, value in self.value.items())

    def __iter__(self) -> Iterator[Data]:
        if not isinstance(self.value, list):
            self._is_no("list")
        return (Data(value, self, place) for place, value in enumerate(self.value))

    def choice(self) -> tuple[str, Data]:
        """The one entry of a mapping: the kind of a value, and the value."""
        if not isinstance(self.value, dict) or len(self.value) != 1:
            self._is_no("value of one kind")
        ((kind, value),) = self.value.items()
        return kind, Data(value, self, kind)

    def nested(self) -> Data:
        """What a text holds that is JSON once more; it is as long as it likes."""
        if not isinstance(self.value, str):
            self._is_no("text")
        return Data.of(self.value.encode(errors="replace"), self._owner, self._key)

    # Values ------------------------------------------------------------------------------------------------------

    def integer(self) -> int:
        if type(self.value) is not int or not -(1 << 63) <= self.value < 1 << 63:
            self._is_no("integer of 64 bits")
        return self.value

    def number(self) -> float:
        """A float; torch writes infinities and NaN as texts."""
        if self.value in ("Infinity", "-Infinity", "NaN"):
            return float(self.value)
        if type(self.value) not in (int, float) or (abs(self.value) > _LARGEST and abs(self.value) != float("inf")):
            self._is_no("number")
        return float(self.value)

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            self._is_no("truth value")
        return self.value

    def text(self) -> str:
        """Any text; most of them are asked for in one of the forms below."""
        if not isinstance(self.value, str) or len(self.value) > _MOST_LETTERS or _SURROGATE.search(self.value):
            self._is_no("text")
        return self.value

    def plain_text(self) -> str:
        """A text without anything that could end a string: a key, a constant, the argument of an operator."""
        if not _PLAIN.fullmatch(self.text()):
            self.refuse(f"{self.value[:100]!r} has quotes, braces or signs that cannot be printed")
        return self.text()

    def plain(self, *, words: bool = False) -> Any:
        """The value as it is, when all texts in it are plain, or words."""
        if isinstance(self.value, str):
            self.words() if words else self.plain_text()
        elif isinstance(self.value, list):
            for item in self:
                item.plain(words=words)
        elif isinstance(self.value, dict):
            for key, item in self.entries():
                Data(key, self, "a key").plain(words=words)
                item.plain(words=words)
        return self.value

    def words(self) -> str:
        """A text that chooses between variants, such as "mean" or "ij,jk->ik": compilers may paste it into code."""
        if not _WORDS.fullmatch(self.text()):
            self.refuse(f"{self.value[:100]!r} chooses between no variants of an operator")
        return self.text()

    def message(self) -> str:
        """A text for people, with a sign of its own for all that could end a string: compilers paste it into code."""
        return _UNREADABLE.sub("`", self.text())

    def normal_text(self) -> str:
        """A plain text that Python would not take for another one, should it become a name."""
        found = self.plain_text()
        if not found.isascii() and (len(found) > LONGEST_NAME or normalize("NFKC", found) != found):
            self.refuse(f"{found[:100]!r} is another name for Python")
        return found

    def name(self) -> str:
        """A name of Python, of a node or an argument: it becomes a variable of the code that torch.fx generates."""
        found = self.text()
        # Python takes names that normalize alike for one name.
        is_name = len(found) <= LONGEST_NAME and found.isidentifier() and not keyword.iskeyword(found)
        if not is_name or normalize("NFKC", found) != found:
            self.refuse(f"{found[:100]!r} is no name of Python")
        if found in _OF_GENERATED_CODE:
            self.refuse(f"{found!r} means something else in the code that torch.fx generates")
        return found

    def attribute(self) -> str:
        """The name of a graph, which becomes an attribute of a module that has no such attribute."""
        found = self.name()
        if found.startswith("__") or found in _ATTRIBUTES:
            self.refuse(f"{found[:100]!r} is another attribute of modules")
        return found

    def module_path(self) -> str:
        """The dotted path of a module, or nothing."""
        found = self.text()
        is_path = found.count(".") <= 100 and all(map(_PART.fullmatch, found.split(".")))
        if found and not (is_path and normalize("NFKC", found) == found):
            self.refuse(f"{found[:100]!r} is no path of a parameter or module")
        return found

    def state_path(self) -> str:
        """The dotted path of a parameter, buffer or constant; no part of it is something else on a module."""
        found = self.module_path()
        first, *others = found.split(".")
        if not found or first == "self" or first in _ATTRIBUTES or not _OF_MODULES.isdisjoint(others):
            self.refuse(f"{found[:100]!r} is no path of a parameter or buffer")
        return found


_WORDS = re.compile(r"[\w ,.:>\-]{0,500}", re.ASCII)
_UNREADABLE = re.compile(r"[^\w ><=!.+\-*/()\[\],:;%&|]", re.ASCII)
_LARGEST = 1.7976931348623157e308
_SURROGATE = re.compile("[\ud800-\udfff]")
#: Some write files of that name.
_PART = re.compile(r"(?!__|/)[\w \-+/:@<>=]{1,500}")
#: What the code that torch.fx generates calls things by.
_OF_GENERATED_CODE = frozenset(
    ("self", "torch", "math", "_operator", "builtins", "pytree", "_pytree", "fx_pytree", "__debug__")
)
_OF_MODULES = frozenset(dir(nn.Module()))
#: What modules with graphs have, also those that torch.export makes of a program.
_ATTRIBUTES = ADDED_BY_EXPORT.union(dir(GraphModule(nn.Module(), Graph())))
_PLAIN = re.compile(r"[^'\"\\{}\x00-\x1f\x7f-\x9f\u2028\u2029]*")
