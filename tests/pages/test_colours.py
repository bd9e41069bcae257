"""What is told by colour is told to every eye: computed from the style sheet, for each theme and each way to see.

Ways to see are the matrices of Machado, Oliveira and Fernandes (2009), severity 1, on linear sRGB.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from fp8watch_server.pages import templating

SHEET = (Path(templating.__file__).parent / "static" / "fp8watch.css").read_text()
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
RAMPS = {"map": 7, "ramp": 5}
TEXTS = ("text", "muted", "critical", "warning", "info", "good", "accent")
LEAST_CONTRAST = 4.5
"""Of text on what it stands on: WCAG 2.2, level AA."""


def colours(theme: str) -> dict[str, str]:
    """Name -> #rrggbb."""
    found = re.search(rf'\[data-theme="{theme}"\] \{{(.*?)\n\}}', SHEET, re.S)
    assert found is not None
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", found[1]))


def luminance(colour: str, eye: str = "all cones") -> float:
    """Relative luminance, 0 to 1."""
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in srgb]
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in EYES[eye]]
    return 0.2126 * seen[0] + 0.7152 * seen[1] + 0.0722 * seen[2]


def lightness(colour: str, eye: str) -> float:
    """CIE L*, 0 to 100: equal steps look equal."""
    y = luminance(colour, eye)
    return float(116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y)


def contrast(a: str, b: str) -> float:
    """1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_is_read_by_brightness_alone(theme: str, eye: str, ramp: str) -> None:
    of = colours(theme)
    steps = [lightness(of[f"{ramp}-{k}"], eye) for k in range(RAMPS[ramp])]
    apart = [b - a for a, b in itertools.pairwise(steps)]
    assert all(d > 0 for d in apart) or all(d < 0 for d in apart), f"brightness turns round: {steps}"
    assert min(map(abs, apart)) > 8, f"two neighbours look alike: {steps}"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_stands_out_from_what_it_stands_on(theme: str) -> None:
    of = colours(theme)
    pairs = [(text, on) for text in TEXTS for on in ("ground", "panel", "raised")]
    pairs += [(severity, f"{severity}-ground") for severity in ("critical", "warning", "info")]
    weak = {pair: round(contrast(of[pair[0]], of[pair[1]]), 2) for pair in pairs}
    assert {pair: c for pair, c in weak.items() if c < LEAST_CONTRAST} == {}


def test_a_severity_has_a_form_and_a_word_of_its_own() -> None:
    macros = templating.environment().get_template("macros.html").module
    said = [str(macros.severity(s)) for s in ("critical", "warning", "info")]  # type: ignore[attr-defined]
    forms = [re.search(r'aria-hidden="true">(.)</span>(\w+)', html) for html in said]
    assert all(forms)
    assert len({form[1] for form in forms if form}) == 3
    assert [form[2] for form in forms if form] == ["critical", "warning", "info"]
