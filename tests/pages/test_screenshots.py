"""docs/images is what `make screenshots` makes: the failure on every page, in both themes, and the README shows it."""

from __future__ import annotations

import re
import runpy
import struct
from pathlib import Path

import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_MODULE

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1280
PARTS = ("forecast", "compare", "fix-files", "checkpoints", "costs", "precision")


@pytest.fixture(scope="module")
def script() -> dict[str, object]:
    """docs/screenshots.py, not run."""
    return runpy.run_path(str(ROOT / "docs" / "screenshots.py"))


def test_every_page_is_taken_with_the_failure_on_it(
    script: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    app = make_app(tmp_path_factory.mktemp("screenshots"))
    with serving(app) as client:
        synthetic.faulty_run(client, app.state.engine, synthetic.FAULT_STEP + 5)
        pages = script["pages_of"](str(client.base_url).rstrip("/"))  # type: ignore[operator]
        for name, address in pages.items():
            answer = client.get(address)
            assert answer.status_code == 200, name
            assert ("inf-laundering" if name in ("runs", "incidents") else FAULT_MODULE) in answer.text, name
    made = {f"{name}{theme}.png" for name in pages for theme in ("", "-dark")}
    made |= {f"failure-{fault}.png" for fault in script["FAULTS"]}  # type: ignore[attr-defined]
    made |= {f"{name}.png" for name in PARTS}
    assert {p.name for p in IMAGES.glob("*.png")} == made, "make screenshots"
    assert (IMAGES / "flight.gif").read_bytes().startswith(b"GIF89a")


def test_an_image_is_a_picture_of_a_page() -> None:
    for path in IMAGES.glob("*.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n", path.name
        width, height = struct.unpack(">II", data[16:24])
        part = path.stem in PARTS
        assert 600 <= width <= WIDTH if part else (width, height >= 900) == (WIDTH, True), path.name
        assert len(data) > (8_000 if part else 20_000), f"{path.name}: next to nothing is on it"


def test_what_pages_show_is_what_is_there() -> None:
    shown = {
        (text.parent / url).resolve()
        for text in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for url in re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", text.read_text())
    }
    assert IMAGES / "incident.png" in shown, "the README shows what the product is for"
    assert set(IMAGES.glob("failure-*.png")) <= shown, "the gallery shows each failure"
    assert {IMAGES / f"{name}.png" for name in PARTS} <= shown, "docs show each question"
    assert all(path.is_file() for path in shown)
    assert "docs/screenshots.py" in (ROOT / "Makefile").read_text()
