"""The functions by which a graph switches grad, inference and autocast modes on and off."""

from __future__ import annotations

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import grad_mode

SET_GRAD = torch._C._set_grad_enabled
IS_GRAD_ENABLED = torch.is_grad_enabled
ENTER_AUTOCAST = _enter_autocast
EXIT_AUTOCAST = _exit_autocast
ENTER_INFERENCE = grad_mode._enter_inference_mode
EXIT_INFERENCE = grad_mode._exit_inference_mode

TOGGLES = frozenset((SET_GRAD, ENTER_AUTOCAST, EXIT_AUTOCAST, ENTER_INFERENCE, EXIT_INFERENCE))
