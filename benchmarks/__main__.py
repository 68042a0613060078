"""`python -m benchmarks`: measures, prints a table, keeps JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import (
    analyses,
    calling,
    code_generation,
    commands,
    compile_once,
    first_call,
    fusing,
    growth,
    held,
    importing,
    lowering,
    memory,
    modes,
    reporting,
    splitting,
)
from benchmarks.report import as_json, from_json, line, merged, put_into_readme
from benchmarks.scales import SCALES

SECTIONS = {
    "split": splitting.rows,
    "first-call": first_call.rows,
    "call": calling.rows,
    "code": code_generation.rows,
    "steps": analyses.rows,
    "modes": modes.rows,
    "fuse": fusing.rows,
    "capability": lowering.capability_rows,
    "lowering": lowering.rows,
    "memory": memory.rows,
    "held": held.rows,
    "growth": growth.rows,
    "import": importing.rows,
    "commands": commands.rows,
    "report": reporting.rows,
    "repeats": growth.repeat_rows,
    "compile-once": compile_once.rows,
    "compile-many": compile_once.many_rows,
    "compile-distinct": compile_once.distinct_rows,
    "compile-scaled": compile_once.scaled_rows,
    "compile-captured": compile_once.captured_rows,
}
_HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    """Runs the sections that are asked for; 1 if `--check` is given and a target is missed."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    command = " ".join(["python -m benchmarks", *arguments])
    out = options.out or _HERE / "results" / f"{options.scale}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = from_json(out.read_text()) if options.sections and out.exists() else []
    for section in options.sections or SECTIONS:
        made = []
        for row in SECTIONS[section](SCALES[options.scale]):
            print(line(row), flush=True)
            made.append(row)
        rows = merged(rows, made)
        out.write_text(as_json(rows, command))  # After each: what is measured stays, if a later one fails.
    if options.readme:
        put_into_readme(_HERE / "README.md", rows, command)
    missed = [row for row in rows if row.verdict == "MISSED"]
    with_target = sum(row.target is not None for row in rows)
    print(f"{len(rows)} rows, {with_target} with a target, {len(missed)} MISSED; kept in {out}")
    return 1 if missed and options.check else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}")
    scale = parser.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "small graphs, under a minute"),
        ("full", "more turns, and torch's split_module at 256k nodes"),
        ("tiny", "only to see that everything runs"),
    ):
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name, default="default", help=text)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--out", type=Path, help="where the JSON goes; benchmarks/results/SCALE.json if not given")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
