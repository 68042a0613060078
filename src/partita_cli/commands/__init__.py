"""The commands, one module each: what it takes, what it does, and what it prints."""
