"""What lives at run time: calls that compile when they are first needed, and what went wrong there."""
