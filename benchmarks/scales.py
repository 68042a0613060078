"""How much is measured: a smoke test, a look, the usual run, or everything."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCALES", "Scale"]


@dataclass(frozen=True, slots=True)
class Scale:
    """Which sizes each section uses; the targets belong to the sizes, so small scales have few."""

    #: Graphs that are cut beside torch, by nodes, with the number of turns.
    beside_torch: dict[int, int]
    #: Larger graphs, cut in a process of their own, without torch's slow `split_module` unless asked for.
    beside_simple: tuple[int, ...]
    with_slow_torch: bool
    kinds: tuple[str, ...]
    #: Of the exported model; none at all is 0.
    layers: int
    analysed_nodes: int
    grown: tuple[int, int]
    #: The kinds for large graphs and for growth.
    large_kinds: tuple[str, ...]
    memory_nodes: int
    turns_of_calls: int
    #: Graphs with modes.
    mode_nodes: tuple[int, ...]
    #: Graphs that are partitioned by what is supported, beside torch.
    partitioned_nodes: tuple[int, ...] = (1_000, 4_000)
    #: Nests of modes, by their depth.
    nest_depths: tuple[int, int] = (32, 256)
    #: Models of equal blocks, the smaller one beside the whole compile; how often each way compiles them.
    equal_blocks: tuple[int, int] = (24, 96)
    compile_turns: int = 1


_ALL = ("residual", "chain", "fan-out", "random", "writes")

SCALES = {
    "tiny": Scale(
        {200: 1},
        (),
        False,
        ("residual", "writes"),
        0,
        200,
        (200, 400),
        ("residual",),
        400,
        2,
        (50, 100),
        (100,),
        (8, 32),
        (2, 3),
        1,
    ),
    "quick": Scale(
        {1_000: 3, 4_000: 3},
        (),
        False,
        ("residual", "random", "writes"),
        2,
        4_000,
        (4_000, 40_000),
        ("residual",),
        16_000,
        10,
        (1_000, 4_000),
        (1_000,),
        (16, 64),
        (4, 8),
        1,
    ),
    "default": Scale(
        {1_000: 7, 4_000: 5, 16_000: 3, 64_000: 2},
        (256_000,),
        False,
        _ALL,
        32,
        64_000,
        (100_000, 1_000_000),
        _ALL,
        256_000,
        30,
        (1_000, 4_000, 16_000, 64_000, 256_000),
    ),
    "full": Scale(
        {1_000: 15, 4_000: 11, 16_000: 9, 64_000: 7},
        (256_000,),
        True,
        _ALL,
        32,
        64_000,
        (100_000, 1_000_000),
        _ALL,
        256_000,
        200,
        (1_000, 4_000, 16_000, 64_000, 256_000),
        compile_turns=3,
    ),
}
