"""`python -m partita_cli.demo.reload FILE`: loads what the chapter on modes saved, and verifies it in this process."""

from __future__ import annotations

import sys

import partita
from partita_cli.demo.modes import seeded


def main(path: str) -> int:
    """Compares the saved program with the model itself; the status is 1 if they differ."""
    model, args = seeded()
    comparison = partita.compare(model, partita.Program.of(path), args)
    print(comparison)
    return 0 if comparison.equal else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
