"""What to change for the modes that statistics, ranks and static facts find.

Upstream:   fp8watch_server.detect.playbook   Downstream: fp8watch_server.incidents.fixes
Shapes:     Place -> fixes
Thread:     any; only data and pure functions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FixKind = Literal["env", "flag", "code", "data", "hardware"]

EPS_VARIABLE = {
    "input": "FP8_QUANT_FWD_INP_AMAX_EPS",
    "weight": "FP8_QUANT_FWD_WEIGHT_AMAX_EPS",
    "grad_output": "FP8_QUANT_BWD_GRAD_AMAX_EPS",
}
POWER_2_VARIABLE = {
    "input": "NVTE_FP8_BLOCK_SCALING_FWD_INP_POWER2",
    "weight": "NVTE_FP8_BLOCK_SCALING_FWD_WEIGHT_POWER2",
    "grad_output": "NVTE_FP8_BLOCK_SCALING_BWD_GRAD_POWER2",
}
QPARAMS = {
    "input": "fp8_quant_fwd_inp",
    "weight": "fp8_quant_fwd_weight",
    "grad_output": "fp8_quant_bwd_grad",
}
OPERANDS = ("input", "weight", "grad_output")
STOCK = "transformer_engine"
"""Backend of an operand that NVIDIA's own Transformer Engine quantises: it reads none of the variables above."""
FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 takes power-of-two rounding out (not on Blackwell)."


@dataclass(frozen=True)
class Fix:
    """One thing to change, most likely first in a list of them."""

    kind: FixKind
    text: str

    def as_json(self) -> dict[str, str]:
        """As CONTRACT names it."""
        return {"kind": self.kind, "text": self.text}


@dataclass(frozen=True)
class Place:
    """Where it is, and what else the finding knows."""

    module: str
    operand: str
    eps: float
    extra: Mapping[str, Any]
    backend: str = ""
    power_2_scale: bool = True
    verdict: str = "unknown"


def set_to(backend: str, operands: Sequence[str], eps: float | None, power_2_scale: bool) -> tuple[FixKind, str]:
    """What sets eps (or, where that is None, the kind of scale) of operands, in the framework that quantises them.

    fp8watch and LoongForge's Transformer Engine read a variable an operand; NVIDIA's own reads attributes of its recipe.
    """
    if backend == STOCK:
        value = f"QParams(power_2_scale={power_2_scale}, amax_epsilon={eps or 0.0:g})"
        return "code", "; ".join(f"`recipe.{QPARAMS[o]} = {value}`" for o in operands)
    if eps is None:
        return "env", " ".join(f"{POWER_2_VARIABLE[o]}={int(power_2_scale)}" for o in operands)
    return "env", " ".join(f"{EPS_VARIABLE[o]}={eps:g}" for o in operands)


def _dying(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    kind, text = set_to(p.backend, [p.operand if p.operand in OPERANDS else "input"], 1e-12, p.power_2_scale)
    return [
        Fix(kind, f"{text}; if tiles still degenerate, 1e-10."),
        Fix(
            "code",
            f"Look at what feeds {p.module}: one group of channels fades; weight decay on a gain, a gate that closed.",
        ),
        Fix("code", "Or use a kernel that sets the scale of a zero tile to 1, as Transformer Engine's does."),
    ]


def _dead(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    first = (
        "Look at the router: load-balancing loss, capacity factor, expert bias."
        if p.extra.get("tokens") == 0
        else (f"Look at requires_grad of {p.module} and of what feeds it, and at the gate before it.")
    )
    return [
        Fix("code", first),
        Fix("code", "If it is frozen or pruned on purpose, silence dead-layer for this module."),
    ]


def _clip(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    fixes = [
        Fix(
            "flag",
            "Blockwise or current scaling: --fp8-recipe blockwise (or tensorwise): their scale is of this tensor, not of the last.",
        ),
        Fix(
            "flag", "A longer history and the maximum over it: --fp8-amax-history-len 1024 --fp8-amax-compute-algo max."
        ),
        Fix("flag", "Head room: --fp8-margin 1, or 2."),
    ]
    if p.extra.get("swiglu"):
        fixes.insert(
            1,
            Fix(
                "code",
                f"Smooth SwiGLU, or keep the input of {p.module} in BF16: weight decay does not stop aligned channels.",
            ),
        )
    return [*fixes, keep_out]


def _frozen(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    return [
        Fix("code", "Reset the amax history of the module: a NaN or an Inf in it keeps the old scale for good."),
        Fix(
            "code",
            "Check the group that amax is reduced over: fp8_autocast(fp8_group=...) must hold every rank that shares the tensor.",
        ),
        Fix(
            "code",
            "Check is_first_microbatch and that each forward runs inside fp8_autocast: outside, the history is not rolled.",
        ),
    ]


def _mismatch(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    changes = p.extra.get("changes", [])
    names = {c[0] for c in changes}
    if "coverage" in names:
        left = next((c[1] for c in changes if c[0] == "left_out"), "them")
        return [
            Fix(
                "code", f"Correct the filter so that it matches {left}, or leave them out on purpose and silence this."
            ),
            Fix(
                "code",
                "Print the coverage at start: watch.summary() and the line that attach prints name what is left out.",
            ),
        ]
    if p.extra.get("resumed") and "scale" in names:
        return [
            Fix(
                "code",
                "Load the FP8 state with the checkpoint: scales and amax histories are in the modules' extra state.",
            ),
            Fix("flag", "Save and load with the same flags: --fp8-recipe, --fp8-param-gather, --fp8-amax-history-len."),
        ]
    fixes = [
        Fix("flag", f"Give {name} the value it had: {old}." if old not in (None, "") else f"Resolve: {value}.")
        for name, value, old, _ in changes[:3]
        if name != "fingerprint"
    ]
    if any("recomputation" in c[3] for c in changes):
        fixes.insert(
            0,
            Fix(
                "code",
                "Run recomputation under the same fp8_autocast as the forward: te.checkpoint, not torch.utils.checkpoint.",
            ),
        )
    return [*fixes, Fix("flag", "Start from the checkpoint with the FP8 flags and the eps with which it was saved.")]


def _outlier(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    return [
        Fix("code", f"If {p.module} is behind a SwiGLU: smooth SwiGLU, which scales its channels apart."),
        keep_out,
        Fix("code", "Weight decay on this layer, a lower LR for it, or a clamp of its input."),
    ]


def _attention(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    first = [Fix("code", "Log it to be sure: watch.log(max_attention_logit=...) from an eager pass each 100 steps.")]
    return [
        *(first if p.extra.get("bound") else []),
        Fix("code", "QK norm: an RMSNorm on q and k before the rotary embedding."),
        Fix(
            "code",
            "Or QK clip: scale the weights of q and k down by sqrt(100 / max_attention_logit) when it is above 100.",
        ),
        *([Fix("code", "Do not change FP8 flags for this: BF16 does the same.")] if p.verdict == "shared" else []),
    ]


def _bad_batch(p: Place, _keep_out: Fix, batch: Fix) -> list[Fix]:
    about = p.extra.get("inputs")
    if not about or not about.get("ordinary"):
        return [
            Fix(
                "code",
                "Measure these steps: attach(..., overhead_budget=None), from the checkpoint before, on the same batches.",
            ),
            batch,
        ]
    if p.extra.get("shift"):
        return [
            batch,
            Fix(
                "data",
                "If the mixture was changed on purpose: nothing. Else compare source and tokenizer before and after.",
            ),
        ]
    return [
        batch,
        Fix(
            "data",
            "Skip it: keep the ids of bad batches, and go back to the checkpoint before when the loss did not come back whole.",
        ),
        Fix("code", "Clip the gradient norm at 1.0, so that one batch cannot do more."),
    ]


def _corruption(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    host = p.extra.get("host")
    return [
        Fix(
            "hardware",
            f"Drain {host or 'the node of that rank'} and test its memory and links; keep it out until it passes.",
        ),
        Fix(
            "code",
            "Recompute the step from the checkpoint before on other hardware and compare the weights bit by bit.",
        ),
        Fix(
            "code",
            "Reload: take weights and optimizer state from a replica that agrees with the others, or from the checkpoint.",
        ),
    ]


def _accumulator(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    return [
        Fix(
            "code",
            "Use the split accumulator: use_split_accumulator=True for fprop as for dgrad and wgrad (fp8_gemm_fprop of the recipe).",
        ),
        Fix("code", "Or a kernel that adds into FP32 registers each 128 products (promotion), as DeepGEMM's does."),
    ]


def _kernel(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    if p.extra.get("gain") is not None:
        return [
            Fix(
                "code",
                "Check the formats that the kernel is told: E5M2 gradients read as E4M3 are too small by 2^-7. --fp8-format e4m3 avoids the mix.",
            ),
            Fix("code", f"Check that each scale_inv is applied once in the GEMMs of {p.module}."),
            keep_out,
        ]
    return [
        Fix(
            "code",
            f"Mask what no token wrote: zero the output of {p.module} where an expert got no tokens, and the padded rows.",
        ),
        Fix("code", "Guard the kernel: allocate its output with zeros instead of empty, and see whether the NaN goes."),
        Fix(
            "code",
            "Report it with shapes and token counts: the operands are finite, so it is a bug of the kernel."
            if p.extra.get("operands_seen")
            else "Look at the operands first: watch.shadow of this module measures them and the output together.",
        ),
    ]


def _sensitive(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    names = p.extra.get("modules") or [p.module]
    return [
        Fix(
            "code",
            f"Leave it out: attach(model, filter_fn=lambda module, fqn: False if fqn in {tuple(names)!r} else None).",
        ),
        Fix("flag", "In Megatron: keep the first and last layers in BF16 with --first-last-layers-bf16."),
    ]


def _ranks(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    axes, blamed = ", ".join(p.extra.get("axes", [])), ", ".join(p.extra.get("blamed", []))
    over = f" over {axes}" if axes else ""
    missing = f"; now it is not reduced over {blamed}" if blamed else ""
    return [
        Fix(
            "code",
            f"Reduce amax{over}{missing}: fp8_autocast(fp8_group=...) must be the group of every rank that holds a part.",
        ),
        Fix(
            "code",
            "With tensor parallelism take amax of the whole tensor, not of the shard: all_reduce(amax, MAX) over tp before the scale.",
        ),
        Fix("flag", "Or a recipe without reduction: --fp8-recipe blockwise."),
    ]


def _chronic(p: Place, keep_out: Fix, _batch: Fix) -> list[Fix]:
    kind, text = set_to(p.backend, [p.operand if p.operand in OPERANDS else "input"], 1e-12, p.power_2_scale)
    eps = [Fix(kind, f"{text}: {p.eps:g} is in use, and may clamp whole tiles.")] if p.eps > 1e-12 else []
    return [
        *eps,
        Fix("flag", "Finer granularity: --fp8-recipe blockwise (1×128), or mxfp8 (1×32)."),
        Fix("flag", "Less margin under delayed scaling: --fp8-margin 0."),
        Fix("env", FP32_SCALES),
        keep_out,
    ]


def _collapse(p: Place, _keep_out: Fix, _batch: Fix) -> list[Fix]:
    if p.extra.get("grad_scaler"):
        return [
            Fix("code", "Find what overflows: the first non-finite gradient of the skipped steps names the module."),
            Fix("code", "Lower the LR, and clip the gradient norm at 1.0 after unscale_."),
            Fix("code", "Train in BF16 instead of FP16 where the hardware has it: it needs no loss scale."),
        ]
    return [
        Fix("code", f"Find what grows in {p.module}: outlier-growth and attention-logit-growth say where it begins."),
        Fix("code", "Lower the LR by 10 to 20 %, and add weight decay there."),
        Fix("flag", "Head room until then: --fp8-margin 1, or 2."),
    ]


LATER: dict[str, Callable[[Place, Fix, Fix], list[Fix]]] = {
    "dying-tile": _dying,
    "dead-layer": _dead,
    "delayed-clip": _clip,
    "frozen-scale": _frozen,
    "recipe-mismatch": _mismatch,
    "outlier-growth": _outlier,
    "attention-logit-growth": _attention,
    "bad-batch": _bad_batch,
    "silent-data-corruption": _corruption,
    "accumulator-precision": _accumulator,
    "kernel-output-fault": _kernel,
    "sensitive-layer-quantized": _sensitive,
    "cross-rank-disagreement": _ranks,
    "chronic-quantization-noise": _chronic,
    "scale-collapse": _collapse,
}
