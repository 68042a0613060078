"""Policies: who decides what a region is."""

from partita.policies.by_label import ByLabel

__all__ = ["ByLabel"]
