"""Programs where other tools make them: inside torch.compile."""
