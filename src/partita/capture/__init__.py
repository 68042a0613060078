"""Programs where they come from: a model that is captured, or a graph inside torch.compile."""

from partita.capture.capture import capture
from partita.capture.joint import capture_joint
from partita.torch_compile.joint import joint_partition

__all__ = ["capture", "capture_joint", "joint_partition"]
