"""Untrusted JSON, read value by value: each read checks the type and the form of its value."""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self, final
from unicodedata import normalize

from torch import nn

from partita._torch.fx.graph_writer import attributes_of_graph_modules
from partita.program.archives.container import brief

#: Far more values than a graph of a hundred thousand nodes has; each takes up to a hundred bytes of memory.
MOST_VALUES = 20_000_000
_MOST_LETTERS = 100_000
#: Of a scalar, which may be unsigned.
SMALLEST_INTEGER, LARGEST_SCALAR = -(1 << 63), (1 << 64) - 1
#: Unicode normalization takes time quadratic in the length of a string.
LONGEST_NAME = 1_000
#: How deep containers in annotations may be nested: what copies or compares them recurses.
_DEEPEST = 40
#: How much of the place of a value a message says.
_LONGEST_PLACE = 300
#: The most dots in the path of a module, which bounds the nesting of modules.
MOST_DOTS = 100


class RefusedError(Exception):
    """What is wrong with a file, and the member concerned if it is not the text being read."""

    def __init__(self, what: str, member: str | None = None) -> None:
        super().__init__(what)
        self.member = member


class MalformedError(RefusedError):
    """Something that torch never writes: the file is damaged, or was not written by torch."""


class NotDataError(RefusedError):
    """Something that is or could be more than data: only a trusted file may have it."""


@final
class Data:
    """A value of a JSON text, and its path in the text."""

    __slots__ = ("_key", "_owner", "value")

    def __init__(self, value: Any, owner: Data | None = None, key: str | int = "") -> None:
        self.value = value
        self._owner = owner
        self._key = key

    @classmethod
    def of(cls, text: bytes | str, owner: Data | None = None, key: str | int = "") -> Self:
        """The value of a JSON text."""
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
        where = "".join(reversed(keys)).removeprefix(".")
        shown = where if len(where) <= _LONGEST_PLACE else f"...{where[-_LONGEST_PLACE:]}"
        return f"{shown}: " if keys else ""

    def _as(self, kind: str, *, fits: bool) -> Any:
        """The value if it `fits`; else raises an error that it is not of this kind."""
        return self.value if fits else self.malformed(f"{brief(self.value)} is no {kind}")

    def _text_if(self, fits: object, otherwise: str) -> str:
        """The string if it `fits`; else raises an error with the reason `otherwise`."""
        return self.text() if fits else self.refuse(f"{self.text()[:100]!r} {otherwise}")

    # Containers --------------------------------------------------------------------------------------------------

    def _mapping(self) -> dict[str, Any]:
        found: dict[str, Any] = self._as("mapping", fits=isinstance(self.value, dict))
        return found

    def get(self, key: str) -> Data | None:
        """The value of a key of a mapping; None if it is missing or null."""
        found = self._mapping().get(key)
        return None if found is None else Data(found, self, key)

    def __getitem__(self, key: str) -> Data:
        found = self.value
        if not isinstance(found, dict) or key not in found:
            self._mapping()
            self.malformed(f"there is no {key!r}")
        return Data(found[key], self, key)

    def entries(self) -> Iterator[tuple[str, Data]]:
        return ((key, Data(value, self, key)) for key, value in self._mapping().items())

    def __iter__(self) -> Iterator[Data]:
        values = self._as("list", fits=isinstance(self.value, list))
        return (Data(value, self, place) for place, value in enumerate(values))

    def choice(self) -> tuple[str, Data]:
        """The one entry of a mapping: the kind of a value, and the value."""
        is_one = isinstance(self.value, dict) and len(self.value) == 1
        ((kind, value),) = self._as("value of one kind", fits=is_one).items()
        return kind, Data(value, self, kind)

    def nested(self) -> Data:
        """The value of a string that is itself JSON, of any length."""
        text = self._as("text", fits=isinstance(self.value, str))
        return Data.of(text.encode(errors="replace"), self._owner, self._key)

    # Values ------------------------------------------------------------------------------------------------------

    def integer(self, *, largest: int = (1 << 63) - 1) -> int:
        is_integer = type(self.value) is int and SMALLEST_INTEGER <= self.value <= largest
        return int(self._as("integer of 64 bits", fits=is_integer))

    def number(self) -> float:
        """A float; torch writes infinities and NaN as strings."""
        is_word = self.value in ("Infinity", "-Infinity", "NaN")
        is_number = type(self.value) in (int, float) and not _LARGEST < abs(self.value) < math.inf
        return float(self._as("number", fits=is_word or is_number))

    def boolean(self) -> bool:
        return bool(self._as("truth value", fits=isinstance(self.value, bool)))

    def text(self) -> str:
        """Any string; most are read in one of the stricter forms below."""
        found = self.value
        if type(found) is str and len(found) <= _MOST_LETTERS and (found.isascii() or not _SURROGATE.search(found)):
            return found
        return str(self._as("text", fits=False))

    def plain_text(self) -> str:
        """A string without characters that could end a literal: a key, a constant, the argument of an operator."""
        is_plain = _PLAIN.fullmatch(self.text()) and self.value.isprintable()
        return self._text_if(is_plain, "has quotes, braces or signs that cannot be printed")

    def plain(self, *, words: bool = False, depth: int = _DEEPEST) -> Any:
        """The value unchanged, if all strings in it are plain, or words, and it is not nested too deeply."""
        if depth == 0:
            self.malformed(f"it is nested more than {_DEEPEST} deep")
        if isinstance(self.value, str):
            self.words() if words else self.plain_text()
        elif isinstance(self.value, list):
            for item in self:
                item.plain(words=words, depth=depth - 1)
        elif isinstance(self.value, dict):
            for key, item in self.entries():
                Data(key, self, "a key").plain(words=words)
                item.plain(words=words, depth=depth - 1)
        return self.value

    def words(self) -> str:
        """A string that selects a variant, such as "mean" or "ij,jk->ik": compilers may paste it into code."""
        return self._text_if(_WORDS.fullmatch(self.text()), "chooses between no variants of an operator")

    def line(self) -> str:
        """A string of one line, the argument of an operator that the user allowed: compilers write it into comments."""
        return self._text_if(not _LINE_BREAK.search(self.text()), "has line breaks, which end a comment in code")

    def constant(self) -> Any:
        """An input or a result that is no tensor; compilers compare it with what is passed, in code."""
        kind, content = self.choice()
        read = _CONSTANTS.get(kind)
        return read(content) if read is not None else self.refuse("no constant of this kind is data")

    def message(self) -> str:
        """A message for users, without characters that could end a string literal: compilers paste it into code."""
        return _UNREADABLE.sub("`", self.text())

    def normal_text(self) -> str:
        """A plain string that stays the same under the normalization that Python applies to identifiers."""
        found = self.plain_text()
        is_normal = found.isascii() or (len(found) <= LONGEST_NAME and normalize("NFKC", found) == found)
        return self._text_if(is_normal, "is another name for Python")

    def name(self) -> str:
        """A Python identifier, of a node or an argument: it becomes a variable of the code that torch.fx generates."""
        found = self.text()
        is_name = len(found) <= LONGEST_NAME and found.isidentifier() and not keyword.iskeyword(found)
        # Python treats names with the same normal form as one name.
        self._text_if(is_name and normalize("NFKC", found) == found, "is no name of Python")
        is_free = found not in _OF_GENERATED_CODE
        return self._text_if(is_free, "means something else in the code that torch.fx generates")

    def attribute(self) -> str:
        """The name of a graph, which becomes an attribute of a module and must not shadow another."""
        is_free = not self.name().startswith("__") and self.value not in _ATTRIBUTES
        return self._text_if(is_free, "is another attribute of modules")

    def module_path(self) -> str:
        """The dotted path of a module, or the empty string."""
        found = self.text()
        is_path = found.count(".") <= MOST_DOTS and all(map(_PART.fullmatch, found.split(".")))
        is_normal = is_path and normalize("NFKC", found) == found
        return self._text_if(is_normal or not found, "is no path of a parameter or module")

    def state_path(self) -> str:
        """The dotted path of a parameter, buffer or constant; no component shadows an attribute of modules."""
        first, *others = self.module_path().split(".")
        is_free = first not in ("", "self") and first not in _ATTRIBUTES and _OF_MODULES.isdisjoint(others)
        is_free = is_free and not any(map(keyword.iskeyword, (first, *others)))
        return self._text_if(is_free, "is no path of a parameter or buffer")


_WORDS = re.compile(r"[\w ,.:>\-]{0,500}", re.ASCII)
_UNREADABLE = re.compile(r"[^\w ><=!.+\-*/()\[\],:;%&|]", re.ASCII)
#: What ends a line for a reader of Python, C++ or text.
_LINE_BREAK = re.compile("[\x00\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
_LARGEST = 1.7976931348623157e308
_SURROGATE = re.compile("[\ud800-\udfff]")
#: A component of a path; compilers may write files with such a name.
_PART = re.compile(r"(?!__|/)[\w \-+/:@<>=]{1,500}")
#: Names with a meaning in the code that torch.fx generates.
_OF_GENERATED_CODE = ("self", "torch", "math", "_operator", "builtins", "pytree", "_pytree", "fx_pytree", "__debug__")
_OF_MODULES = frozenset(dir(nn.Module()))
_ATTRIBUTES = attributes_of_graph_modules()
_PLAIN = re.compile(r"[^'\"\\{}]*")
_CONSTANTS: dict[str, Callable[[Data], Any]] = {
    "as_none": lambda _: None,
    "as_int": Data.integer,
    "as_float": Data.number,
    "as_bool": Data.boolean,
    "as_string": Data.plain_text,
}
