"""Which values a compiled step saves for backward: its joint graph as a compiler runs it, and what fits a budget."""
