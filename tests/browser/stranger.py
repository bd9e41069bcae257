"""Somebody who has never seen the pages: clicks what can be seen, reads, and takes time for both.

What a script takes is not what a person takes. The time of a question is made of what the pages took to show what was clicked
(measured), of the clicks (READY_S to find what to do, CLICK_S to point and press), of screens that were scrolled (SCROLL_S), and of
words: all headings, names and buttons that stand before the answer, and everything in the panel that holds it, at WORDS_A_MINUTE.
The figures are those of the keystroke-level model of Card, Moran and Newell, and a slow reader.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from playwright.sync_api import Locator, Page, expect

READY_S, CLICK_S, SCROLL_S, WORDS_A_MINUTE = 1.35, 1.3, 1.5, 180.0
READ = """(e) => {
  const near = e.closest("section, .headline, #head, tr, details, dl, .card") ?? e;
  const named = "h1, h2, h3, th, dt, button, summary, nav a, .button, .headline .says, .card strong";
  const shown = (x) => x.checkVisibility() && x.getBoundingClientRect().width > 0;
  const words = (t) => t.trim().split(/\\s+/).filter(Boolean).length;
  const top = near.getBoundingClientRect().top;
  const before = [...document.querySelectorAll(named)].filter((x) => shown(x) && !near.contains(x) && x.getBoundingClientRect().top <= top);
  return [before.reduce((n, x) => n + words(x.innerText), 0) + words(near.innerText),
          Math.max(0, Math.ceil((e.getBoundingClientRect().bottom - innerHeight) / (innerHeight * 0.8)))];
}"""


@dataclass
class Answer:
    """One question: what was read, and what it took."""

    asked: str
    read: str = ""
    clicks: int = 0
    pages_s: float = 0.0
    words: int = 0
    screens: int = 0

    @property
    def seconds(self) -> float:
        """Of a person."""
        reading = self.words / WORDS_A_MINUTE * 60
        return self.pages_s + READY_S + self.clicks * (READY_S + CLICK_S) + self.screens * SCROLL_S + reading

    def __str__(self) -> str:
        return (
            f"{self.asked:48} {self.clicks} clicks {self.screens} screens {self.words:4} words "
            f"{self.pages_s:5.1f} s of pages {self.seconds:5.0f} s: {self.read[:150]}"
        )


@dataclass
class Stranger:
    """Starts each question on the first page, and remembers nothing of the one before."""

    page: Page
    url: str
    answers: list[Answer] = field(default_factory=list)

    def asks(self, question: str) -> None:
        """The next question."""
        self.answers.append(Answer(question))
        self._timed(lambda: self.page.goto(self.url))

    def clicks(self, on: Locator) -> None:
        """On something that is to be found: what stands before it is read."""
        expect(on).to_be_visible()
        self._find(on)
        self.answers[-1].clicks += 1
        self._timed(lambda: on.click())

    def reads(self, at: Locator) -> str:
        """What stands there."""
        expect(at).to_be_visible()
        self._find(at)
        said = " ".join(at.inner_text().split())
        self.answers[-1].read = f"{self.answers[-1].read} {said}".strip()
        return said

    def _find(self, at: Locator) -> None:
        words, screens = at.evaluate(READ)
        self.answers[-1].words += words
        self.answers[-1].screens += screens

    def _timed(self, act: object) -> None:
        began = time.monotonic()
        act()  # type: ignore[operator]
        self.page.wait_for_load_state("load")
        self.answers[-1].pages_s += time.monotonic() - began
