"""Programs where they come from: a model that is captured, or a graph inside torch.compile."""

from partita.tracing.capture import capture

__all__ = ["capture"]
