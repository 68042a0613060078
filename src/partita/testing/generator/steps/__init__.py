"""Steps: what a generated program can do, one module for each group of families."""
