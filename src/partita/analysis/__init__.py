"""Questions about a graph: what is in it, what orders it, under which modes it runs."""
