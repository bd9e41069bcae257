"""A few scalars of a run in the page that people already look at: wandb, TensorBoard, MLflow, or any function.

Shapes:     rows [sites] of ROW, once a step -> at most ten scalars     Thread: training adds up; a thread of its own calls

The training thread adds the rows of a step to a window and never calls anybody. Each window goes to the function on a
thread of its own, with what that thread asks the collector: open incidents, and the address of the newest.
"""

from __future__ import annotations

import contextvars
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from fp8watch.session.arguments import EVERY
from fp8watch_agent.checks import argument
from fp8watch_agent.record import Measured, holds
from fp8watch_agent.recorder import Recorder
from fp8watch_agent.settings import AgentSettings
from fp8watch_agent.transport import Transport

if TYPE_CHECKING:
    from fp8watch.session.watch import Watch

Target = Callable[[dict[str, float | str], int], object]
"""(values by name, step) -> whatever; names begin with "fp8watch/", all values are numbers but that of INCIDENT."""

PREFIX = "fp8watch/"
INCIDENT = PREFIX + "incident"
"""The address of the newest open incident, as text; where there is one."""
LOOK_EVERY_S = 0.5
ASK_EVERY_S = 10.0
MAX_WAITING = 16  # windows; a slow function loses the oldest
STOP_S = 1.0
MAX_FAILURES = 5


def mirror(watch: Watch, *, to: Target, every: int = 10) -> Mirror | None:
    """Send at most ten scalars of a watch to a function as well, every few steps and at once where something broke.

    They are under `fp8watch/`: worst tile SQNR (dB), largest share of elements that underflow, counts of saturated and
    non-finite elements and of sentinel tiles since the last call, largest amax, overhead, lost records; with a collector
    open incidents, and in `fp8watch/incident` the newest one's address as text. What was not measured is left out. They
    are of this process's sites. The function is called on a thread of its own, with the context variables of this call;
    what it raises is counted, and after five times in a row it is called no more. It ends with the watch.

    Args:
        watch: what `fp8watch.attach` returned.
        to: called with (dict, step); `fp8watch.integrations.mirrors` makes some.
        every: steps between two calls.

    Returns:
        a handle, whose `stop()` ends it before the watch does; None where nothing is recorded.

    Raises:
        TypeError: `to` cannot be called.
        ValueError: `every` is less than 1.
    """
    if not callable(to):
        raise TypeError(f"to={to!r}: must be a function (dict, step), such as those of fp8watch.integrations.mirrors")
    argument("every", every, EVERY)
    flush, recorder = watch._flush, watch._recorder
    if flush is None or recorder is None:
        return None  # switched off: nothing is measured
    made = watch.guard.run("mirror", Mirror, to, every, watch, recorder)
    if made is not None:
        flush.mirrors.append(made)
    return made


class Window:
    """Steps that are told together: extremes and sums over them, and over the sites of this process."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.num_steps = 0

    def add(self, rows: npt.NDArray[np.void]) -> bool:
        """Merge the rows of a step; True where something in them broke. rows: [N] of ROW"""
        self.num_steps += 1

        def of(name: str, groups: Measured) -> npt.NDArray[Any]:
            column: npt.NDArray[Any] = rows[name][holds(rows["measured"], groups)]
            return column

        exact, broken = Measured.COUNTS | Measured.CAST, 0
        if len(nan := of("num_nan", Measured.COUNTS)):
            broken += self._sum("nonfinite_elements", nan.sum() + of("num_inf", exact).sum())
        if len(saturated := of("num_saturated", exact)):
            self._sum("saturated_elements", saturated.sum())
            share = of("num_underflow", exact) / np.maximum(of("num_nonzero", exact), 1)
            self._worse("underflow_ratio", share.max())
        if len(amax := of("amax_max", Measured.AMAX)):
            self._worse("amax_max", amax.max())
        if len(sentinel := of("num_sentinel_tiles", Measured.AMAX | Measured.CAST)):
            broken += self._sum("sentinel_tiles", sentinel.sum())
        tiles = of("num_tiles", Measured.ENERGIES) - of("num_zero_tiles", Measured.ENERGIES)
        noise = of("tile_noise_ratio_sum", Measured.ENERGIES) / np.maximum(tiles, 1)
        noise = noise[np.isfinite(noise) & (noise > 0)]
        if len(noise):
            self._worse("worst_tile_sqnr_db", -10.0 * np.log10(noise.max()), np.minimum)
        return broken > 0

    def _sum(self, name: str, value: float) -> int:
        self.values[name] = self.values.get(name, 0.0) + float(value)
        return int(value)

    def _worse(self, name: str, value: float, worse: np.ufunc = np.maximum) -> None:
        self.values[name] = float(worse(self.values.get(name, value), value))


class Mirror:
    """One function that is told of one watch. Made by `fp8watch.mirror`."""

    def __init__(self, to: Target, every: int, watch: Watch, recorder: Recorder) -> None:
        self._to, self._every, self._recorder, self._guard = to, every, recorder, watch.guard
        self._watch = weakref.ref(watch)
        self._window, self._last_step = Window(), -1
        self._waiting: deque[tuple[int, Window]] = deque(maxlen=MAX_WAITING)
        self._stopped = threading.Event()
        self._failures = 0
        self._open = OpenIncidents(recorder.settings, watch.identity.run_id)
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._work,), name="fp8watch-mirror", daemon=True)
        self._thread.start()

    # ---- the training thread

    def see(self, step: int, rows: npt.NDArray[np.void]) -> None:
        """Add a step. rows: [N] of ROW"""
        broken = self._window.add(rows)
        self._last_step = step
        if broken or self._window.num_steps >= self._every:
            self._hand_over()

    def _hand_over(self) -> None:
        self._waiting.append((self._last_step, self._window))  # the thread looks; it is not woken
        self._window = Window()

    def stop(self) -> None:
        """Tell what is left, within a second, and call the function no more."""
        if self._stopped.is_set() or not self._thread.is_alive():
            return
        if self._window.num_steps:
            self._hand_over()
        self._stopped.set()
        self._thread.join(STOP_S)

    # ---- its own thread

    def _work(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S) and self._watch() is not None:
            self._tell_waiting()
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        while self._waiting and self._failures < MAX_FAILURES:
            step, window = self._waiting.popleft()
            try:
                self._to(self._values(window), step)
                self._failures = 0
            except Exception as error:  # noqa: BLE001  whatever people's function raises
                self._failures += 1
                self._guard.swallow("mirror", error)

    def _values(self, window: Window) -> dict[str, float | str]:
        values: dict[str, float | str] = {PREFIX + name: value for name, value in window.values.items()}
        watch = self._watch()
        if watch is not None and (ratio := watch.overhead) is not None:
            values[PREFIX + "overhead_ratio"] = ratio
        values[PREFIX + "dropped_records"] = float(sum(self._recorder.health().records.dropped.values()))
        found = self._open.known() if self._stopped.is_set() else self._open.ask()
        if found is not None:
            values[PREFIX + "incidents_open"] = float(found[0])
            if found[1] is not None:
                values[INCIDENT] = found[1]
        return values


class OpenIncidents:
    """What the collector says of a run, asked at most once in ten seconds.

    Args:
        settings: collector and token; the token needs the scope `read` as well.
        run_id: of the run.
    """

    def __init__(self, settings: AgentSettings, run_id: str) -> None:
        self._base, self._run_id = settings.collector, run_id
        self._transport = (
            None
            if settings.collector is None
            else Transport(settings.collector, settings.token, settings.token_file, settings.request_timeout_s / 2)
        )
        self._next = 0.0
        self._found: tuple[int, str | None] | None = None

    def known(self) -> tuple[int, str | None] | None:
        """What was found last."""
        return self._found

    def ask(self) -> tuple[int, str | None] | None:
        """(how many are open, 20 at most; address of the newest); None where nobody can tell."""
        now = time.monotonic()
        if self._transport is not None and now >= self._next:
            self._next = now + ASK_EVERY_S
            answer = self._transport.get(f"/api/v1/runs/{quote(self._run_id, safe='')}/incidents?status=open&limit=20")
            self._found = self._read(json.loads(answer.body)) if answer.status == 200 else None
        return self._found

    def _read(self, body: Mapping[str, list[Mapping[str, str]]]) -> tuple[int, str | None]:
        items = body["items"]
        if not items:
            return 0, None
        address = items[0]["url"]
        return len(items), f"{self._base}{address}" if address.startswith("/") else address
