"""What can be pasted out of the sentence of a fix."""

from __future__ import annotations

import pytest

from fp8watch_server.pages.fixes import has_code, render, to_copy


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("FP8_QUANT_FWD_INP_AMAX_EPS=1e-12; if tiles still degenerate, 1e-10.", "FP8_QUANT_FWD_INP_AMAX_EPS=1e-12"),
        ("The same: FP8_A_EPS=1e-12 FP8_B_EPS=1e-12.", "FP8_A_EPS=1e-12 FP8_B_EPS=1e-12"),
        ("Remove --fp8-param-gather first: it is stale.", "--fp8-param-gather"),
        ("Use E5M2: --fp8-format hybrid (fp8_format HYBRID).", "--fp8-format hybrid"),
        (
            "A longer history: --fp8-amax-history-len 1024 --fp8-amax-compute-algo max.",
            "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
        ),
        ("Head room: --fp8-margin 1, or 2.", "--fp8-margin 1"),
        ("Less: --fp8-margin 0.", "--fp8-margin 0"),
        ("After each update: is_first_microbatch=True in the first.", "is_first_microbatch=True"),
        ("Clip it before the cast: x.clamp(-3e4, 3e4).", "x.clamp(-3e4, 3e4)"),
        (
            "BF16: attach(model, filter_fn=lambda m, fqn: isinstance(m, torch.nn.Linear) and fqn not in ('a', 'b')).",
            "attach(model, filter_fn=lambda m, fqn: isinstance(m, torch.nn.Linear) and fqn not in ('a', 'b'))",
        ),
        ("Look at the batch of step 90 (one token).", "Look at the batch of step 90 (one token)."),
    ],
)
def test_variables_flags_and_calls_are_copied_else_the_sentence(text: str, copied: str) -> None:
    assert to_copy(text) == copied


def test_rendered_fix_is_the_sentence_with_code_in_it() -> None:
    html = str(render("Set A_B=1 <now>, then f(x)."))
    assert html == "Set <code>A_B=1</code> &lt;now&gt;, then <code>f(x)</code>."


def test_names_in_a_fix_are_no_markup() -> None:
    text = "Look at layers.*.mlp.up, layers.*.mlp.down and [x](https://evil.example/)."
    assert str(render(text)) == text


def test_a_long_hostile_fix_is_rendered_quickly_and_cut() -> None:
    html = str(render("f(" * 50_000 + "<script>"))
    assert len(html) < 10_000
    assert "<script>" not in html


def test_prose_has_nothing_to_copy() -> None:
    assert not has_code("Look at the LR schedule.")
    assert has_code("FP8_QUANT_FWD_INP_AMAX_EPS=1e-12")
