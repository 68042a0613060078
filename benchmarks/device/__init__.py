"""Measurements that need a GPU; each is a script of its own."""
