"""Programs where they come from: a model that is captured, or a graph inside torch.compile."""

from partita.tracing.capture import capture
from partita.tracing.joint_capture import capture_joint
from partita.tracing.joint_partition import joint_partition

__all__ = ["capture", "capture_joint", "joint_partition"]
