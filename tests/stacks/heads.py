"""What stands before the rows of the two measured tables of docs/integrations.md: markers, command, settings of attach, columns."""

from __future__ import annotations

from pathlib import Path

from benchmarks.operating_point import not_at_defaults

HERE = Path(__file__).parent
FAMILIES = "<!-- families -->", "<!-- /families -->"
TRAINERS = "<!-- trainers -->", "<!-- /trainers -->"


def families(versions: str, steps: int) -> list[str]:
    """Of `make families`; `steps`: of each training."""
    return [
        FAMILIES[0],
        f"Made by `make families` ({versions}; CPU, tiny models, observe mode, {steps} steps).",
        f"{not_at_defaults(HERE / 'families.py')} The share is of the GEMM FLOPs",
        "of a forward as torch's dispatcher counts them, without products of activations (attention); the second leaves out",
        "heads and routers, which the precision map keeps in high precision; the third counts them where what they are given and",
        "what they put out is looked at. What is missing from the first stands beside it: heads, which tiny models make large, and",
        "routers. Last column: the first incident after an Inf was put into one weight.",
        "",
        "| family | observed | in high precision | of what is meant for FP8 | with inputs and outputs looked at | losses bit-identical | steps | an Inf in a weight |",
        "|---|---|---|---|---|---|---|---|",
    ]


def trainers(versions: str) -> list[str]:
    """Of `make stacks`."""
    return [
        TRAINERS[0],
        f"Made by `make stacks` ({versions}; CPU, tiny models, observe mode).",
        f"{not_at_defaults(HERE / 'trainer_runs.py')} A loss is the trainer's own where the recorded one is",
        "within 0.0001 of it in each step. Losses, and weights after the last step, are held against the same training without a",
        "watch, bit by bit. Last column: the first incident after an Inf was put into one weight.",
        "",
        "| trainer | loss of a step | losses and weights bit-identical | steps | an Inf in a weight |",
        "|---|---|---|---|---|",
    ]
