"""The command line of Partita: one module for each command; torch is imported when a command runs, not for help."""

from partita_cli.app import main

__all__ = ["main"]
