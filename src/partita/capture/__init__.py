"""A model into a program: its forward, or forward and backward as one joint graph."""

from partita.capture.capture import capture, capture_joint

__all__ = ["capture", "capture_joint"]
