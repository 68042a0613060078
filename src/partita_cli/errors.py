"""What is wrong with the words on a command line."""

from __future__ import annotations


class CommandError(Exception):
    """What is wrong with the input of a command, in one line, and what would fix it."""
