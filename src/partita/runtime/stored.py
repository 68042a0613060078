"""Stored variants: compiled functions as bytes, where their backend can store them, to run in another process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from partita.runtime.rehearsal import Findings
from partita.runtime.variant import Cause, Fit, Variant

__all__ = ["Stored", "restored", "stored"]

log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """A variant as data."""

    fit: Fit
    findings: Findings | None
    function: bytes


def stored(compiler: Any, variants: Iterable[Variant]) -> tuple[Stored, ...]:
    """The variants that can be stored; the others will be compiled again."""
    return tuple(_stored(compiler, variants)) if hasattr(compiler, "save") and hasattr(compiler, "load") else ()


def restored(compiler: Any, functions: Iterable[Stored]) -> tuple[Variant, ...]:
    """The variants that these were; what cannot be loaded here will be compiled again."""
    return tuple(_restored(compiler, functions))


def _stored(compiler: Any, variants: Iterable[Variant]) -> Iterator[Stored]:
    for variant in variants:
        try:
            yield Stored(variant.fit, variant.findings, compiler.save(variant.function))
        except Exception as error:
            reason = Cause.of(error).reason
            log.warning("%s cannot store a function, so it will be compiled again: %s", compiler.name, reason)


def _restored(compiler: Any, functions: Iterable[Stored]) -> Iterator[Variant]:
    for fit, findings, function in functions:
        try:
            yield Variant(fit, compiler.load(function), findings)
        except Exception as error:
            log.info("%s cannot load a function, so it is compiled again: %s", compiler.name, Cause.of(error).reason)
