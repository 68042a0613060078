"""`python -m partita_cli` runs the command line, without importing torch for help."""

from partita_cli import main

raise SystemExit(main())
