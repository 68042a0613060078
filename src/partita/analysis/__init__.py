"""Analyses of a graph: its nodes, the dependencies between them, their effects and modes."""
