"""Effects: what a call mutates, aliases, takes from the RNG and does besides, and the order of nodes that follows.

`Effects` (`terms`) answers for one call, and for one body that is called. They come from the schemas of operators
(`operators`), from the names and signatures of functions and methods without one (`functions`) and from modules of
torch.nn (`modules`); `calls` has those of every node, bodies included, and which values share memory. `graph` makes of
them the edges between nodes that must keep their order.
"""
