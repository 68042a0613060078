"""`python -m partita` runs the command line, which is a package of its own so that it can start without torch."""

from partita_cli import main

raise SystemExit(main())
