"""A model into a program: its forward, or forward and backward as one joint graph."""

from partita.capture.capture import capture, capture_joint
from partita.capture.train_eval import TrainEval

__all__ = ["TrainEval", "capture", "capture_joint"]
