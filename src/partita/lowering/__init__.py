"""Lowering: regions that a backend compiles at their first call, specialized on their inputs and the global state."""
