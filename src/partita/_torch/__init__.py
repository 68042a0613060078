"""The only folder that touches torch's private names."""
