"""What is said of limit-ahead: title, cause, and what to change."""

from __future__ import annotations

from fp8watch_server.detect.finding import Finding, SiteFacts
from fp8watch_server.detect.modes.attention_logit_growth.words import fixes as logit_fixes
from fp8watch_server.detect.modes.chronic_quantization_noise.words import fixes as noise_fixes
from fp8watch_server.detect.modes.delayed_clip.words import fixes as clip_fixes
from fp8watch_server.detect.modes.limit_ahead.quantities import CLIP_DEPTH, LOGITS, told
from fp8watch_server.detect.phrases import site_words
from fp8watch_server.detect.remedies import Fix, Place


def words(f: Finding, s: SiteFacts | None) -> tuple[str, str]:
    """Title and cause."""
    found = told(f)
    if found is None:
        return "A limit is ahead", "A lasting trend leads to a limit; its numbers were not kept."
    quantity, now = found
    x = f.extra
    where = f" of {site_words(s)}" if s else ""
    where = f" ({x['name']})" if x.get("name") else where
    value, limit = (quantity.shown(float(v)) for v in (now.value or 0.0, now.baseline or 0.0))
    others = int(x.get("num_sites", 1)) - 1
    also = f" {others} more site{'s are' if others > 1 else ' is'} heading for a limit as well." if others > 0 else ""
    return (
        f"{quantity.label}{where} heads for {limit}, in about {x.get('steps')} steps",
        f"{quantity.label}{where} is {value} and has grown steadily over steps {x.get('first')} to {x.get('last')}. If it goes on so, it "
        f"passes {limit}, {quantity.means}, in about {x.get('steps')} steps: between {x.get('soonest')} and {x.get('latest')}. A line knows "
        f"nothing of a schedule that changes, and nothing has failed yet.{also}",
    )


def fixes(p: Place) -> list[Fix]:
    """What to change, most likely first: what would be changed behind the limit."""
    if p.extra.get("quantity") == LOGITS.field or p.name is None:
        return logit_fixes(p)
    return clip_fixes(p) if p.extra.get("quantity") == CLIP_DEPTH.field else noise_fixes(p)
