"""`python -m partita.cli` runs the command line."""

from partita.cli import main

raise SystemExit(main())
