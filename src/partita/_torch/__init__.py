"""Thin adapters to torch's private names that several packages share."""
