"""Exporting a model with all that its mode blocks mean, the part that hangs on its caller included.

A model may ask for the modes of its caller, and gets a plain True or False while it is traced. So one that does is
traced again under another answer, and the difference tells what is its caller's: gradients that are off then and on
before, or blocks that switch autocast off only if it was on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.export import ExportedProgram

from partita._torch.capture_callers_grad import GradSwitch
from partita._torch.capture_export import export_recorded
from partita.errors import CaptureError
from partita.tracing.function_module import name_of
from partita.tracing.region_passes import Stopping, Traced, Wrapping

__all__ = ["ModelCall"]

_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model and the arguments that it is traced with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    dynamic_shapes: Any

    def exported(self) -> ExportedProgram:
        """The model as an exported program whose modes are set by operators."""
        wrapping = Wrapping()
        program = self._run(wrapping, grad=True)
        if wrapping.recorder.asks_for_autocast:
            program, wrapping = self._told_of_autocast(program, wrapping)
        recorder = wrapping.recorder
        if not recorder.hangs_on_callers_grad:
            return program
        callers = self._callers_switches(wrapping)
        if not callers:
            return program
        return self._run(Wrapping(says_autocast=recorder.says_autocast, callers=callers), grad=True)

    def _told_of_autocast(self, program: ExportedProgram, without: Wrapping) -> tuple[ExportedProgram, Wrapping]:
        """What the model does if its caller has autocast on, provided that this is right as well if it has not."""
        wrapping = Wrapping(says_autocast=True)
        try:
            other = self._run(wrapping, grad=True)
        except Exception as error:
            self._warn(
                "cannot be traced as if autocast were on (%s); captured is what it does with autocast off", error
            )
            return program, without
        if wrapping.trace.only_switches_off_more(without.trace):
            return other, wrapping
        self._warn("does something else when its caller has autocast on; captured is what it does with autocast off")
        return program, without

    def _callers_switches(self, with_grad: Wrapping) -> tuple[GradSwitch, ...]:
        """The toggles that switch gradients on only because the caller had them on."""
        without = Stopping(says_autocast=with_grad.recorder.says_autocast)
        try:
            self._run(without, grad=False)
        except Traced:
            pass
        except Exception as error:
            self._warn("cannot be traced with gradients off (%s); captured is what it does with gradients on", error)
            return ()
        if not without.trace.differs_in_grad_only(with_grad.trace):
            self._warn("does something else when gradients are off; captured is what it does with gradients on")
            return ()
        on, off = with_grad.grads, without.grads
        if any(was_off is False and is_on for was_off, is_on in zip(on.grads, off.grads, strict=True)):
            raise CaptureError(
                "it switches gradients off where its caller has them on, and on where its caller has them off, and no "
                "graph can say that; set the grad mode to a constant, or to the caller's own"
            )
        return tuple(switch for switch, number in on.holds_for.items() if off.grads[number] is False)

    def _warn(self, what: str, *values: object) -> None:
        _LOG.warning(f"%s {what}", name_of(self.model), *values)

    def _run(self, region_pass: Wrapping | Stopping, *, grad: bool) -> ExportedProgram:
        return export_recorded(
            self.model,
            self.args,
            self.kwargs,
            dynamic_shapes=self.dynamic_shapes,
            recorder=region_pass.recorder,
            region_pass=region_pass,
            grad=grad,
        )
