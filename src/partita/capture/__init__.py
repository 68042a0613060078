"""A model into a program: its forward, or forward and backward as one joint graph."""

from partita.capture.capture import capture
from partita.capture.joint import capture_joint

__all__ = ["capture", "capture_joint"]
