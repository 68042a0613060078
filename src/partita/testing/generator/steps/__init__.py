"""Steps: what a generated program can do, one file a family."""
