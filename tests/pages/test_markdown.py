"""Runbooks: the part of Markdown that is known, and nothing that could be more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8watch_server.pages.markdown import inline, prose, render
from fp8watch_server.pages.runbooks import runbook, slugs


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("# Title", "<h1>Title</h1>"),
        ("## Title\nright below", "<h2>Title</h2><p>right below</p>"),
        ("one\ntwo\n\nthree", "<p>one two</p>\n<p>three</p>"),
        ("- a\n- b\n  goes on", "<ul><li>a</li><li>b goes on</li></ul>"),
        ("1. a\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("So:\n- a", "<p>So:</p><ul><li>a</li></ul>"),
        ("```bash\na <b>\n\n  c\n```", "<pre><code>a &lt;b&gt;\n\n  c</code></pre>"),
        ("```\nnever closed", "<pre><code>never closed\n</code></pre>"),
        ("a `x < *y*` **b** *c*", "<p>a <code>x &lt; *y*</code> <strong>b</strong> <em>c</em></p>"),
        ("[t](https://a.example/b?c=1)", '<p><a href="https://a.example/b?c=1">t</a></p>'),
        ("[t](frozen-scale.md#why)", '<p><a href="/runbooks/frozen-scale#why">t</a></p>'),
        ("[t](javascript:alert)", "<p>t</p>"),
        ("[t](//evil.example)", "<p>t</p>"),
        ('[t](https://a" onclick="x)', "<p>[t](https://a&#34; onclick=&#34;x)</p>"),
        ("a_b_c * d *", "<p>a_b_c * d *</p>"),
        ("> quoted\n> on", "<blockquote><p>quoted on</p></blockquote>"),
        (
            "| a | b |\n|---|---|\n| 1 | `2` |",
            "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>2</code></td></tr>"
            "</tbody></table>",
        ),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>"),
    ],
)
def test_known_markdown(source: str, html: str) -> None:
    assert str(render(source)) == html


@given(st.text(alphabet="ab <>&\"'`*[]()#-1.|\n:/>jvscript", max_size=200))
def test_anything_else_is_text(source: str) -> None:
    html = str(render(source))
    assert "<script" not in html
    assert "javascript:" not in "".join(part.split('"')[0] for part in html.split('href="')[1:])
    for tag in html.split("<")[1:]:
        assert tag.split(">")[0].split(" ")[0].strip("/") in {
            "h1", "h2", "h3", "h4", "p", "ul", "ol", "li", "pre", "code", "strong", "em", "a", "table", "thead",
            "tbody", "tr", "th", "td", "blockquote",
        }  # fmt: skip


def test_inline_has_no_blocks() -> None:
    assert str(inline("# not a heading")) == "# not a heading"


def test_a_sentence_keeps_its_stars_and_links_nowhere() -> None:
    text = "not observed: layers.*.experts.*.up, layers.*.mlp.down of [Sign in](https://evil.example/) <b>**x**"
    assert str(prose(text)) == text.replace("<b>", "&lt;b&gt;")
    assert str(prose("stores `448 <`")) == "stores <code>448 &lt;</code>"


def test_every_shipped_runbook_is_found_and_renders() -> None:
    for slug in slugs():
        assert runbook(slug)
    assert runbook("../routes") is None
