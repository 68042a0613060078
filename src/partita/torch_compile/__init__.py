"""Inside torch.compile: the backend `partita`, and a partitioner of joint graphs for AOTAutograd and Inductor."""

from partita.torch_compile.backend import InputKind, backend, input_kinds
from partita.torch_compile.frames import FramePlan, plans
from partita.torch_compile.joint import joint_partition
from partita.torch_compile.peak import memory_partition

__all__ = ["FramePlan", "InputKind", "backend", "input_kinds", "joint_partition", "memory_partition", "plans"]
