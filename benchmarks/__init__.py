"""Measures Partita beside torch, in one run: `python -m benchmarks`."""
