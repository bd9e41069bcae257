"""What the browser tests share: the collector under test, what a page did, waiting for charts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI
from pages import synthetic
from playwright.sync_api import Page


@dataclass
class Collector:
    """The collector under test."""

    app: FastAPI
    client: httpx.Client
    runs: dict[str, synthetic.Run] = field(default_factory=dict)

    def url(self, path: str) -> str:
        """An address of it."""
        return f"{self.client.base_url}".rstrip("/") + path


@dataclass
class Watched:
    """What pages did: errors on their consoles, requests that left the origin."""

    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


def until(page: Page, expression: str, timeout_s: float = 20.0) -> None:
    """Wait until an expression is true in the page. Playwright's own way needs eval there, which the policy forbids."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"not true within {timeout_s} s: {expression}"
        page.wait_for_timeout(40)


def drawn(page: Page) -> None:
    """Wait until every chart of the page is drawn."""
    until(
        page,
        "[...document.querySelectorAll('figure.chart')]"
        ".every(f => f.classList.contains('ready') || f.querySelector('.nothing') !== null)",
    )


def marks(page: Page, chart: str) -> list[list[object]]:
    """[step, text] of every non-finite mark of a chart."""
    found: list[list[object]] = page.evaluate(
        "(id) => document.getElementById(id).data.filter(t => t.name?.endsWith('non-finite'))"
        ".flatMap(t => t.x.map((x, i) => [x, t.customdata[i]]))",
        chart,
    )
    return found


def point_of_tile(page: Page, row: int, column: int) -> tuple[float, float]:
    """Where a tile of the map lies on the screen."""
    until(page, "document.querySelector('[data-tile-map]').dataset.loaded !== undefined")
    page.locator("[data-canvas-box]").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([r, c]) => {
            const view = document.querySelector("[data-tile-map]").tileMap;
            const [x, y] = view.at.place(r * view.map.shape[1] + c);
            const box = view.canvas.getBoundingClientRect();
            return [box.left + x + view.at.cellX / 2, box.top + y + view.at.cellY / 2];
        }""",
        [row, column],
    )
    return x, y
