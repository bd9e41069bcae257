"""What is said of chronic-quantization-noise: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.phrases import baseline, evidence, number, since, site_words
from fp8watch_server.detect.remedies import OPERANDS, Fix, Place, set_to
from fp8watch_server.detect.switches import finer, fp32_scales, margin


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    if f.extra.get("onset") is not None:
        return (
            f"Quantisation noise rose in {site_words(s)}: {number(f.extra.get('sqnr_db'))} dB",
            f"The tile SQNR of {site_words(s)} fell from {number(baseline(f, 'tile_sqnr_db'))} to {number(f.extra.get('sqnr_db'))} dB at step "
            f"{f.extra['onset']}, and nothing else explains it.",
        )
    said = []
    by = f.extra.get("by")
    if by == "gain":
        return _biased(f, s)
    if by == "eps":
        return _clamped(f, s)
    if by != "underflow" and (db := evidence(f, "tile_sqnr_db")) is not None:
        said.append(f"the tile SQNR is {number(db)} dB")
    if by != "sqnr" and (share := evidence(f, "underflow_ratio")) is not None:
        said.append(f"{number(share)} of the elements become 0")
    if f.extra.get("small"):
        return _small(f, s)
    what = " and ".join(said)
    beside = "tiles" if evidence(f, "faint_tiles") else "elements"
    much = f"Quantisation noise beside faint {beside}" if f.extra.get("faint") else "Too much quantisation noise"
    return (
        f"{much} in {site_words(s)}{': ' + said[0] if said else ''}",
        f"In most of the measured steps of {site_words(s)}{since(f)}{' ' + what if what else ' too much is lost'}. "
        f"{_since_when(f)}{_faint(f)}",
    )


def _since_when(f: Finding) -> str:
    if f.extra.get("from_first", True):
        return "No chart shows an onset: it was so from the first of them."
    return "It was within its limit before that: something has grown or moved, little by little."


def _small(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Of small elements beside many that are not."""
    share, crest = evidence(f, "underflow_ratio"), evidence(f, "amax_over_rms")
    depth = 32 if s is not None and s.format == "E5M2" else 18
    told = "" if share is None else f": {number(share)} of all"
    parts = [f"amax is {number(crest)} times the root mean square"] if crest is not None else []
    parts += [f"the kurtosis is {number(k)}"] if (k := evidence(f, "kurtosis")) is not None else []
    parts += [f"the tile SQNR is {number(db)} dB"] if (db := evidence(f, "spread_sqnr_db")) is not None else []
    return (
        f"Small elements of {site_words(s)} become 0{told}",
        f"In most of the measured steps of {site_words(s)}{since(f)} {number(share)} of the elements become 0: those that are 2^{depth} times "
        "smaller than the largest of their tile, or more, as is what GELU and SiLU leave of negative values. The energy is spread over many "
        f"elements: {', '.join(parts)}. In a product beside those the small ones count for nothing.",
    )


def _faint(f: Finding) -> str:
    """That the operand as a whole is well, where that was measured."""
    if not f.extra.get("faint"):
        return ""
    db = evidence(f, "sqnr_db")
    whole = "was inside the band of its format when that was measured last" if db is None else f"is at {number(db)} dB"
    tiles, elements = evidence(f, "faint_tiles"), evidence(f, "faint_elements")
    parts = [f"{_percent(tiles)} of its tiles are 2^30 times smaller than its largest, or more"] if tiles else []
    if elements:
        parts.append(
            f"{_percent(elements)} of its elements are 2^30 times smaller than the largest of their tile, or more"
        )
    told = ", ".join(parts)
    return (
        f" The operand as a whole {whole}. {told[:1].upper()}{told[1:]}. What these hold is enough for what is lost; that it is what "
        "was lost is not measured."
    )


def _percent(share: object) -> str:
    """0.71 as "about 71 %"."""
    value = 100 * float(str(share))
    return "less than 0.1 %" if value < 0.1 else f"about {value:.2g} %"


def _biased(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    bias = evidence(f, "gain_error")
    by = "" if bias is None else f" by {100 * float(bias):+.2f} %"
    return (
        f"Quantising {site_words(s)} is biased{by}",
        f"In most of the measured steps of {site_words(s)}{since(f)} quantising changes the size of the operand{by}. "
        "Noise averages out over steps, and a bias adds up.",
    )


def _clamped(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    eps, amax, unused = s.eps if s else None, f.extra.get("amax"), f.extra.get("unused")
    db = evidence(f, "tile_sqnr_db")
    costs = f"Its tile SQNR is {number(db)} dB." if db is not None else "Its SQNR was not measured in this step."
    return (
        f"The eps of {site_words(s)} is above every amax: {number(eps)} against {number(amax)}",
        f"Every tile of {site_words(s)}{since(f)} lies below the eps of {number(eps)}, the largest with an amax of {number(amax)}: all "
        f"get the same scale, and {number(round(float(unused or 0), 1))} octaves of the format stand unused. {costs}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first."""
    if p.extra.get("small"):
        return [
            Fix("code", f"Nothing need change. If small values of this input are to count: keep {p.module} in BF16.")
        ]
    if p.extra.get("faint"):  # no granularity helps a tile whose every element is tiny
        return [
            Fix(
                "code",
                f"Nothing need change where these features fade on purpose, as those of distances do. If they are to count beside "
                f"the others, scale them before {p.module}.",
            )
        ]
    kind, text = set_to(p.backend, [p.operand if p.operand in OPERANDS else "input"], 1e-12, p.power_2_scale)
    eps = [Fix(kind, f"{text}: {p.eps:g} is in use, and may clamp whole tiles.")] if p.eps > 1e-12 else []
    return [
        *eps,
        *(
            [
                Fix(
                    "code",
                    "Check how it rounds: to nearest even, not towards zero. `fp8watch check-gemm` tries each quantiser.",
                )
            ]
            if p.extra.get("by") == "gain"
            else []
        ),
        *finer(p),
        *margin(p, 0, "Less margin under delayed scaling"),
        *fp32_scales(p),
        p.keep_out,
    ]
