"""The 23 failure modes: the only table of their names, and what else each could be.

Upstream:   fp8watch_server.detect.finding   Downstream: fp8watch_server.incidents.explain, fp8watch_server.incidents.fixes
Shapes:     slug -> Mode
Thread:     any; only data

Slugs are frozen: alert rules, runbook addresses and silences are written with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """One failure mode."""

    number: int
    slug: str
    name: str  # a few words, for a title where nothing better is known
    remedy: str  # one line; the built modes have longer ones in `fixes`
    alternatives: tuple[tuple[str, str], ...] = ()  # (slug, how to tell it apart)


MODES: tuple[Mode, ...] = (
    Mode(
        1,
        "nan-in-loss",
        "NaN born in the loss or the data",
        "check labels, masks and the batch; it is not FP8",
        (
            ("bad-batch", "the loss was finite but far off, and came back within 5 steps"),
            ("kernel-output-fault", "a Linear's output is NaN although its operands are finite: put a probe on it"),
        ),
    ),
    Mode(
        2,
        "zero-tile-eps",
        "zero tile quantised without eps",
        "set the operand's eps to 1e-12, then 1e-10: the fix names the switch of the framework",
        (
            ("dying-tile", "amax_min_nonzero of the site fell for many steps before"),
            ("dead-layer", "every tile of the site is zero, and its gradients too"),
        ),
    ),
    Mode(
        3,
        "dying-tile",
        "tile dying away",
        "set the operand's eps to 1e-12, then 1e-10: the fix names the switch of the framework",
        (
            ("dead-layer", "all tiles of the site fall, and its gradients too"),
            ("zero-tile-eps", "the tile is zero already: scale_inv is 0 or not finite"),
        ),
    ),
    Mode(
        4,
        "dead-layer",
        "dead layer or expert",
        "look at the router and at requires_grad",
        (
            ("dying-tile", "one tile falls, the largest stands"),
            ("gradient-underflow", "the input is as it was, only gradients vanish"),
            ("bad-batch", "it lasts a step or two, with a masked batch"),
        ),
    ),
    Mode(
        5,
        "delayed-clip",
        "outlier clipped by a delayed scale",
        "blockwise or current scaling, or margin 1 to 2",
        (
            ("frozen-scale", "scale_inv is the same for six steps and more while it clips"),
            ("outlier-growth", "amax grew for many steps before: the chart of the site shows a slope"),
            ("cross-rank-disagreement", "other ranks have another scale for the same tensor"),
        ),
    ),
    Mode(
        6,
        "frozen-scale",
        "frozen scale",
        "reset the amax history; check the amax group and is_first_microbatch",
        (
            ("delayed-clip", "scale_inv moves in the step after the clip"),
            ("cross-rank-disagreement", "the scale answers to the amax of other ranks"),
            ("stale-weight-scale", "it is a weight, and its recipe is current scaling"),
        ),
    ),
    Mode(
        7,
        "stale-weight-scale",
        "stale weight scale",
        "disable --fp8-param-gather, then lower the LR by 10 to 20 %",
        (
            ("scale-rounding", "inputs and gradients are off the invariant too"),
            ("silent-data-corruption", "one block of one rank only, and the weight hash differs between replicas"),
        ),
    ),
    Mode(
        8,
        "gradient-underflow",
        "gradients quantised with a scale far too small",
        "lower the eps of grad_output, or use E5M2 for gradients",
        (
            ("scale-rounding", "the ratio is above 1 instead of far below"),
            ("scale-collapse", "the GradScaler's scale fell step by step before"),
        ),
    ),
    Mode(
        9,
        "scale-rounding",
        "scale computed or rounded wrongly",
        "round scale_inv up; check power_2_scale of each operand, and FP32_SCALES",
        (
            ("stale-weight-scale", "only weights are off the invariant"),
            ("recipe-mismatch", "power_2_scale as registered is not what the kernel does"),
        ),
    ),
    Mode(
        10,
        "recipe-mismatch",
        "recipe changed",
        "the same FP8 flags and eps as when the checkpoint was saved",
        (
            ("scale-rounding", "facts are as they were, the ratio is off"),
            ("sensitive-layer-quantized", "a module was added to the FP8 path, not changed on it"),
        ),
    ),
    Mode(
        11,
        "outlier-growth",
        "outliers growing in one layer",
        "smooth SwiGLU, keep that input in BF16, weight decay",
        (
            ("optimizer-divergence", "most layers grow together"),
            ("attention-logit-growth", "it is the q and the k projection of one attention"),
            ("silent-data-corruption", "it is a leap in one step, not a slope"),
        ),
    ),
    Mode(
        12,
        "attention-logit-growth",
        "attention logits growing",
        "QK norm or QK clip",
        (
            ("outlier-growth", "only one of q and k grows, or another layer"),
            ("optimizer-divergence", "the weights of most layers grow with it"),
        ),
    ),
    Mode(
        13,
        "optimizer-divergence",
        "optimizer diverging",
        "lower the LR by 10 to 20 % or more; it is not FP8",
        (
            ("outlier-growth", "one layer grows, the others do not"),
            ("stale-weight-scale", "scale_ratio of a weight is outside its bounds"),
            ("bad-batch", "loss and gradient norm jumped and came back within 5 steps"),
        ),
    ),
    Mode(
        14,
        "bad-batch",
        "bad batch or data shift",
        "look at the batch ids, skip the batch",
        (
            ("optimizer-divergence", "the weights of most layers grow, the loss does not come back"),
            ("nan-in-loss", "the loss was not finite"),
            ("silent-data-corruption", "the loss stays high, and one weight leaped in the step before"),
        ),
    ),
    Mode(
        15,
        "silent-data-corruption",
        "silent data corruption",
        "drain the node, recompute, reload",
        (
            ("optimizer-divergence", "more than a tenth of the weights leaped, or the LR did"),
            ("recipe-mismatch", "a checkpoint was loaded in that step: the timeline shows a restart"),
            ("outlier-growth", "the weight grew over many steps"),
        ),
    ),
    Mode(
        16,
        "accumulator-precision",
        "accumulator too narrow",
        "split accumulator, promotion every 128",
        (
            ("kernel-output-fault", "the gain is a factor other than 1: no noise, a wrong scale"),
            ("chronic-quantization-noise", "tile_sqnr_db of the operands is low already"),
        ),
    ),
    Mode(
        17,
        "inf-laundering",
        "Inf laundered by the cast",
        "find the source or clip it; BF16 for that layer until then",
        (
            ("nan-in-activation", "the loss turns NaN in the same step: the Inf did not stay inside the tile"),
            ("outlier-growth", "amax of the site grew for many steps before it reached Inf"),
        ),
    ),
    Mode(
        18,
        "sensitive-layer-quantized",
        "sensitive layer on the FP8 path",
        "exclude it with filter_fn",
        (("chronic-quantization-noise", "any other layer whose SQNR is under its band"),),
    ),
    Mode(
        19,
        "kernel-output-fault",
        "kernel output fault",
        "mask or guard; a bug of the kernel",
        (
            ("nan-in-activation", "an operand of that GEMM was not finite"),
            ("zero-tile-eps", "scale_inv of an operand is 0 or Inf"),
            ("silent-data-corruption", "only one rank, one host, and it does not come again: check the hardware"),
        ),
    ),
    Mode(
        20,
        "cross-rank-disagreement",
        "ranks disagree",
        "check the amax reduction group (TP or DP)",
        (
            ("silent-data-corruption", "it is one rank only, and weights differ as well"),
            ("frozen-scale", "the odd rank's scale does not move at all"),
            ("recipe-mismatch", "the odd rank runs other flags: compare fingerprints"),
        ),
    ),
    Mode(
        21,
        "chronic-quantization-noise",
        "too much quantisation noise",
        "finer granularity, or leave the layer out",
        (
            ("delayed-clip", "clip depth is above 1 in the same steps"),
            ("outlier-growth", "kurtosis of the site is far above that of its like"),
            ("recipe-mismatch", "an eps of 1e-6 and more, or another format than meant"),
        ),
    ),
    Mode(
        22,
        "scale-collapse",
        "scale collapsing",
        "lower the LR, find the outliers, more margin",
        (
            ("outlier-growth", "one layer's amax grows, the scale follows"),
            ("optimizer-divergence", "the weights of most layers grow"),
            ("gradient-underflow", "gradients vanish while the scale stands"),
        ),
    ),
    Mode(
        23,
        "nan-in-activation",
        "non-finite value from outside the GEMMs",
        "look at that module's inputs, eps and mask; clip",
        (
            ("kernel-output-fault", "the Linear before it got finite operands: put a probe on its output"),
            ("nan-in-loss", "the forward operands are finite and only the loss is NaN"),
        ),
    ),
)

MODE_BY_SLUG: dict[str, Mode] = {m.slug: m for m in MODES}
SLUGS: tuple[str, ...] = tuple(m.slug for m in MODES)
