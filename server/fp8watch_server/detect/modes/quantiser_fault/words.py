"""What is said of quantiser-fault: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_agent.fault_names import COPY_STALE
from fp8watch_server.detect.families.fault_why import EXPLAINED, numbers
from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.modes.quantiser_fault.why_words import reason, remedy, stale_copy
from fp8watch_server.detect.phrases import evidence, number, site_words, tile_words
from fp8watch_server.detect.remedies import OF_CONFIG, STOCK, TORCHAO, Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    kind = str(f.extra.get("why", ""))
    if kind == COPY_STALE:
        return _of_stale_copy(f, s)
    because = reason(kind, numbers(f.extra))
    where = f"{site_words(s)}, {s.direction}" if s else "an operand"
    said, causes = [], []
    if nan := evidence(f, "num_nan_codes"):
        said.append(f"{number(nan)} NaN from finite elements")
        causes.append("codes are NaN where the operand is finite")
    if zeroed := evidence(f, "num_zeroed_tiles"):
        said.append(f"{number(zeroed)} tiles became zero")
        causes.append("all codes of a tile are 0 although its amax is above what the format flushes to 0")
    if scales := evidence(f, "num_wrong_scales"):
        said.append(f"{number(scales)} tiles with a wrong scale")
        causes.append("scale_inv is not what the amax of its tile gives: of another tile or step, or in another format")
    if off := evidence(f, "num_off_grid"):
        said.append(f"{number(off)} elements further than half a step from the operand")
        causes.append("codes stand where other elements are, or are those of something else")
    if (bias := evidence(f, "gain_error")) is not None:
        said.append(f"the operand comes out {100 * float(bias):+.1f} %")
        causes.append(
            f"its size changes by {100 * float(bias):+.1f} %, which rounding to nearest cannot do: a scale is read as another, or in "
            "another format"
        )
    db = evidence(f, "tile_sqnr_db")
    if not said and db is not None:
        said.append(f"{number(db)} dB")
        causes.append(
            f"its tile SQNR is {number(db)} dB: with a scale of its own amax no tile can lose half of its energy to rounding"
        )
    tiles = evidence(f, "num_checked_tiles")
    of = f" In {number(tiles)} sampled tiles" if tiles else " It was so in a full sample"
    if because is not None:
        explains = number(evidence(f, EXPLAINED))
        causes = (
            [f"{because[1]}. That explains {explains} % of what is wrong: {', '.join(said)}"] if said else [because[1]]
        )
        said = [because[0]]
    return (
        f"The quantiser of {where} is broken{': ' + said[0] if said else ''}{tile_words(f)}",
        f"What the {s.gemm if s else ''} GEMM reads of this operand is not the operand: {'; '.join(causes)}."
        f"{of} of step {f.step}. No data do that, and finer tiles do not heal it."
        if causes
        else f"What the {s.gemm if s else ''} GEMM reads of this operand was found not to be the operand.",
    )


def _of_stale_copy(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    gemms = f.extra.get("gemms") or ([s.gemm] if s else [])
    right = " and ".join(f.extra.get("right_gemms", []))
    title, cause = stale_copy(
        s.module if s else "a module", str(f.extra.get("direction")), "/".join(gemms), right, numbers(f.extra)
    )
    return title, f"{cause} It was found in step {f.step}; since when is not known."


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    turned = p.extra.get("direction") == "columnwise"
    version = (
        "Upgrade Transformer Engine, or go back to the version before: quantisers and their layouts change with it."
        if p.backend == STOCK
        else "Upgrade the library that quantises, or go back to the version before: kernels and layouts change with it."
    )
    layout = (
        "Check how the transposed copy is written: strides, padding, and that it is written before the GEMM reads it."
        if turned
        else "Check the layout that the kernel is told: strides of the operand, shape and padding of scale_inv, its format."
    )
    another = {
        STOCK: "Try another kernel: another recipe of Transformer Engine has other kernels; compare the two.",
        TORCHAO: f"Try another kernel: {OF_CONFIG.format('emulate=True')}, multiplies in plain torch, and eager for compiled code.",
    }.get(
        p.backend,
        "Try another kernel: attach(backend='reference') quantises in plain torch. If that is right, the kernel is wrong.",
    )
    known = remedy(str(p.extra.get("why", "")))
    return [
        *([known] if known is not None else []),
        p.keep_out,
        *([Fix("code", layout)] if known is None else []),
        Fix("code", version),
        Fix("code", another),
        Fix("code", "Report it with the table of `fp8watch check-gemm`, which repeats it outside of training."),
    ]
