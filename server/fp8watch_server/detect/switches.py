"""What a change of the recipe is called in the framework that quantises at the site.

Shapes:     backend of a site -> fixes
Thread:     any; only data and pure functions

A switch that the user's framework does not read is worse than none: it is set, and nothing changes. Megatron's flags are
named beside the attributes of Transformer Engine's recipes, which scripts without Megatron set; where the backend is not
known, those are named too.
"""

from __future__ import annotations

from fp8watch_server.detect.remedies import (
    LOONGFORGE,
    OF_CONFIG,
    OWN_FILTER,
    OWN_FORWARD,
    STOCK,
    TORCHAO,
    Fix,
    Place,
    set_to,
)

LONG_HISTORY = 1024
"""Passes: the default of Transformer Engine's DelayedScaling."""
_OF_TE = ("", STOCK, LOONGFORGE)
BLOCKWISE = "--fp8-recipe blockwise --fp8-format e4m3"
"""Both: blockwise with the format of another recipe is no recipe of Megatron's."""
_FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 takes power-of-two rounding out (not on Blackwell)."


def finer(p: Place) -> list[Fix]:
    """The next finer recipe than the one that is set."""
    most = '`Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")`, which leaves grad_weight in high precision'
    if p.recipe == "nvfp4" or p.format == "E2M1":  # no tile is as fine as its own: what is coarse are the elements
        return _one(
            p.backend,
            te="FP8 in place of FP4: --fp8-recipe mxfp8 --fp8-format e4m3 in place of the --fp4 flags in Megatron, `MXFP8BlockScaling()` elsewhere.",
            ours='FP8 in place of FP4: `attach(model, recipe="mxfp8")`.',
        )
    if p.recipe == "mxfp8":
        return []
    if p.recipe == "rowwise" and p.backend == TORCHAO:
        return [Fix("code", f"Where it is of grad_weight: {most}.")]
    if p.recipe == "blockwise":
        return _one(
            p.backend,
            te="Finer granularity (1×32, on Blackwell): --fp8-recipe mxfp8 in Megatron, `MXFP8BlockScaling()` elsewhere.",
            ours='Finer granularity (1×32): `attach(model, recipe="mxfp8")`.',
        )
    return _one(
        p.backend,
        te=f"Finer granularity: {BLOCKWISE} (1×128) in Megatron, `Float8BlockScaling()` as the recipe elsewhere.",
        torchao=f'Finer granularity: `Float8LinearConfig.from_recipe_name("rowwise")`, or {most}.',
        own="Finer granularity in the module's own cast: one scale a row, or for each 128 elements of it.",
        ours='Finer granularity: `attach(model, recipe="blockwise")` (1×128), or "mxfp8" (1×32).',
    )


def gradients_in_e5m2(p: Place) -> list[Fix]:
    """The format with the wider range for gradients; nothing where they have it, or where the recipe is one of E4M3 alone."""
    gradient = p.format if p.operand == "grad_output" else ""
    if "E5M2" in (gradient, p.already.get("grad_output.format")) or "E2M1" in (gradient, p.format):
        return []
    of_e4m3 = p.recipe in ("blockwise", "mxfp8", "nvfp4")
    if p.backend in _OF_TE and of_e4m3:
        return []
    maker = p.recipe if p.recipe in ("delayed", "current") else "blockwise"
    both = "target_dtype=torch.float8_e5m2 in cast_config_grad_output and cast_config_grad_output_for_grad_weight"
    return _one(
        p.backend,
        te="Use E5M2 for gradients: --fp8-format hybrid in Megatron, fp8_format=Format.HYBRID of the recipe elsewhere.",
        torchao=f"Use E5M2 for gradients: {both}, each by dataclasses.replace: a new CastConfig is tensorwise.",
        own="Use E5M2 for gradients: torch.float8_e5m2 in the module's own cast of grad_output.",
        ours=f'Use E5M2 for gradients: `attach(model, recipe=fp8watch.{maker}(fp8_format="HYBRID"))`.',
    )


def granularity(p: Place) -> list[Fix]:
    """What sets the tile of an operand."""
    return _one(
        p.backend,
        te="Use the recipe of the tiles that were declared: --fp8-recipe in Megatron, the recipe's class elsewhere.",
        torchao=f"Set `Float8LinearConfig.cast_config_{p.operand}.scaling_granularity` as the recipe says.",
        own=f"Take the scale of {p.operand} over the tile that the recipe says, in the module's own cast.",
        ours="Use the tile that the recipe says: `attach(model, recipe=...)`, and look for what replaces its quantiser.",
    )


def format_of(p: Place) -> list[Fix]:
    """What sets the FP8 format of an operand."""
    return _one(
        p.backend,
        te="Use the format that was declared: --fp8-format in Megatron, fp8_format of the recipe elsewhere.",
        torchao=f"Set `Float8LinearConfig.cast_config_{p.operand}.target_dtype` as the recipe says.",
        own=f"Cast {p.operand} to the format that the recipe says, in the module's own cast.",
        ours='Use the format that the recipe says: `attach(model, recipe=fp8watch.blockwise(fp8_format="E4M3"))` or "HYBRID".',
    )


def fp32_scales(p: Place) -> list[Fix]:
    """What takes the rounding of scales to powers of two out, where they are rounded so. The variable is read by block scaling alone."""
    if not p.power_2_scale or p.recipe in ("mxfp8", "nvfp4"):
        return []
    if p.backend in (TORCHAO, OWN_FORWARD):
        kind, text = set_to(p.backend, (), None, False)
        return [Fix(kind, f"{text}: it takes power-of-two rounding out.")]
    return [Fix("env", _FP32_SCALES)] if p.recipe in ("", "blockwise") else []


def scales_of_this_tensor(backend: str) -> list[Fix]:
    """Current scaling in place of a history."""
    why = "their scale is of this tensor, not of the last"
    return _one(
        backend,
        te=f"Blockwise or current scaling: {BLOCKWISE} (or --fp8-recipe tensorwise) in Megatron, `Float8BlockScaling()` or "
        f"`Float8CurrentScaling()` as the recipe elsewhere: {why}.",
        torchao=f"Dynamic scaling, `ScalingType.DYNAMIC` of each cast_config: {why}.",
        own=f"Take the scale from the tensor that is cast, in the module's own cast: {why}.",
        ours=f'Blockwise or current scaling, `attach(model, recipe="blockwise")` or "current": {why}.',
    )


def without_reduction(backend: str) -> list[Fix]:
    """Scales that no other rank has a part in."""
    return _one(
        backend,
        te=f"Or a recipe without reduction: {BLOCKWISE} in Megatron, `Float8BlockScaling()` elsewhere.",
        torchao='Or a recipe without reduction: `Float8LinearConfig.from_recipe_name("rowwise")`.',
        own="Or scales without reduction: one for each 128 elements of a row.",
        ours='Or a recipe without reduction: `attach(model, recipe="blockwise")`.',
    )


def longer_history(p: Place) -> list[Fix]:
    """A window of amax that outliers stay in; only what of it is not set already."""
    num, algo = p.number("amax_history_len"), str(p.already.get("amax_compute_algo", ""))
    longer = num is None or num < LONG_HISTORY
    words = [f"A longer history{f' than the {num} passes of now' if num else ''}"] if longer else []
    words += ["the maximum over it" if longer else "The maximum over the history"] if algo != "max" else []
    if not words:
        return []
    flags = [f"--fp8-amax-history-len {LONG_HISTORY}"] if longer else []
    values = [f"amax_history_len={LONG_HISTORY}"] if longer else []
    if algo != "max":
        flags.append("--fp8-amax-compute-algo max")
        values.append('amax_compute_algo="max"')
    said, arguments = " and ".join(words), ", ".join(values)
    return _one(
        p.backend,
        te=f"{said}: {' '.join(flags)} in Megatron, `DelayedScaling({arguments})` elsewhere.",
        own=f"{said}, in the module's own cast.",
        ours=f"{said}: `fp8watch.delayed({arguments})`.",
    )


def margin(p: Place, num: int, why: str) -> list[Fix]:
    """Powers of two left free above the amax, under delayed scaling: at least `num`, one more than is set.

    `num` 0 takes a margin away: nothing where none is set.
    """
    now = p.number("margin")
    if num == 0 and (now == 0 or p.already.get("recipe", "delayed") != "delayed"):
        return []
    if num and now is not None and now >= num:
        why, num = f"{why}, {now} is set", now + 1
    return _one(
        p.backend,
        te=f"{why}: --fp8-margin {num} in Megatron, DelayedScaling(margin={num}) elsewhere.",
        own=f"{why}: 2^{num} below the format's maximum, in the module's own cast.",
        ours=f"{why}: `fp8watch.delayed(margin={num})`.",
    )


def fresh_weights(backend: str) -> list[Fix]:
    """Weights cast anew after each update."""
    first = _one(
        backend,
        te="Remove --fp8-param-gather first (Megatron; elsewhere fp8_model_init): it keeps weights and scales that can go "
        "stale apart.",
        torchao="Leave enable_fsdp_float8_all_gather=True out first, or call precompute_float8_dynamic_scale_for_fsdp(model) "
        "after each optimizer step: it keeps scales of weights.",
        own="Cast the weight anew in each forward, or drop what is cached of it after each update.",
        ours="Look for what writes weights between forward and backward: fp8watch casts each weight anew in each forward, and "
        "keeps no scale of it.",
    )
    if backend in _OF_TE:
        first.append(
            Fix("code", "Drop cached weights after each update: is_first_microbatch=True in the first micro-batch.")
        )
    return first


def split_accumulator(backend: str) -> list[Fix]:
    """What makes a GEMM add in full precision."""
    return _one(
        backend,
        te="Use the split accumulator: use_split_accumulator=True for fprop as for dgrad and wgrad (fp8_gemm_fprop of the recipe).",
        torchao="Take fast accumulation out: "
        + OF_CONFIG.format("gemm_config_output=Float8GemmConfig(use_fast_accum=False)")
        + ", and so of the other two GEMMs.",
        own="Take fast accumulation out: use_fast_accum=False of torch._scaled_mm in the module's own forward.",
        ours="Look for what replaces the GEMM: fp8watch never asks for fast accumulation.",
    )


def recomputation(backend: str) -> list[Fix]:
    """What makes recomputation do what the forward did."""
    return _one(
        backend,
        te="Run recomputation under the same fp8_autocast as the forward: te.checkpoint, not torch.utils.checkpoint.",
        torchao="Run recomputation under the same autocast, and with the same modules, as the forward.",
        own="Run recomputation under the same autocast, and with the same casts, as the forward.",
        ours="Run recomputation under the same autocast, and with the same modules, as the forward.",
    )


def same_format(backend: str) -> str:
    """What avoids two formats in one GEMM; empty where nothing is to be set."""
    return {
        **dict.fromkeys(_OF_TE, f" One format avoids the mix: {BLOCKWISE} in Megatron, Format.E4M3 elsewhere."),
        TORCHAO: " One format avoids the mix: target_dtype=torch.float8_e4m3fn in the cast_config of each operand.",
    }.get(backend, "")


def amax_group(backend: str, text: str) -> list[Fix]:
    """The group that amax is reduced over: an argument of Transformer Engine's."""
    return [Fix("code", text)] if backend in _OF_TE else []


def leave_out(p: Place, names: tuple[str, ...]) -> list[Fix]:
    """Layers that stay out of FP8 for good."""
    ours = f"attach(model, filter_fn=lambda module, fqn: False if fqn in {names!r} else None)"
    torchao = (
        f"convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn not in {names!r} and {OWN_FILTER})"
    )
    found = _one(
        p.backend,
        te=f"Leave {', '.join(names)} out: run it under fp8_autocast(enabled=False).",
        torchao=f"Leave it out: {torchao}; torchtitan: its filter_fqns.",
        own=f"Leave it out: make {', '.join(names)} an nn.Linear.",
        ours=f"Leave it out: {ours}.",
    )
    if p.backend == "":
        found.append(Fix("code", f"Where fp8watch computes in FP8: {ours}."))
    if p.backend in _OF_TE:
        found.append(Fix("flag", "In Megatron: name it in the file of --te-precision-config-file."))
    return found


def _one(backend: str, *, te: str, ours: str, torchao: str | None = None, own: str | None = None) -> list[Fix]:
    """The sentence of the framework; nothing where it has no such switch."""
    if backend in _OF_TE:
        return [Fix("flag" if "--" in te else "code", te)]
    text = {TORCHAO: torchao, OWN_FORWARD: own}.get(backend, ours)
    return [] if text is None else [Fix("code", text)]
