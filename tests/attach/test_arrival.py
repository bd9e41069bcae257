"""A step is handed over when it has arrived from the device: with copies that arrive when the test says so."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from torch import nn

from fp8watch.session import step_boundary
from fp8watch.session.step_flush import MAX_ON_THE_WAY
from fp8watch.sketch.host_copy import ARRIVAL_TIMEOUT_S, MAX_PINNED_BYTES, HostCopies, HostCopy
from fp8watch_agent.record import StepStatus


class Event:
    """As torch.cuda.Event, for a device that is told when it has got so far."""

    def __init__(self):
        self.arrived, self.waited = False, 0

    def query(self):
        return self.arrived

    def synchronize(self):
        self.waited += 1
        self.arrived = True


class Device(HostCopies):
    """Copies of a device that lags behind. Values are taken when a copy is begun, as in the order of a stream."""

    def __init__(self, device="cpu"):
        super().__init__(device)
        self.late, self.events, self.released = True, [], 0

    def begin(self, *tensors):
        event = Event()
        self.events.append(event)
        return HostCopy([t.detach().clone().as_subclass(torch.Tensor) for t in tensors], event, self._back)

    def _back(self, tensors):
        self.released += 1
        for t in tensors:
            t.zero_()  # whoever still reads it now reads nonsense

    def arrive(self):
        for event in self.events:
            event.arrived = True


@pytest.fixture
def late(attach, monkeypatch):
    """attach, with a device whose copies are late."""
    monkeypatch.setattr("fp8watch.sketch.host_copy.ARRIVAL_TIMEOUT_S", 0.2)

    def run(model, **kwargs):
        watch = attach(model, **kwargs)
        watch._flush.copies = watch._flush.maps.copies = Device()
        return watch, watch._flush.copies

    return run


def recorded(watch):
    return [(int(h["step"]), StepStatus(int(h["status"])).name) for h, *_ in watch._recorder.steps]


def test_a_step_is_consumed_a_step_later_and_nothing_is_waited_for(late, mlp, train):
    watch, device = late(mlp)
    train(mlp, steps=1)
    assert recorded(watch) == []
    device.arrive()
    train(mlp, steps=1)
    assert recorded(watch) == [(0, "OK")]
    device.arrive()
    train(mlp, steps=1)
    assert recorded(watch) == [(0, "OK"), (1, "OK")]
    assert not any(e.waited for e in device.events)
    assert device.released >= 2


def test_the_host_runs_no_more_than_eight_steps_ahead(late, mlp, train):
    watch, device = late(mlp)
    train(mlp, steps=MAX_ON_THE_WAY)
    assert recorded(watch) == []
    assert not any(e.waited for e in device.events)
    train(mlp, steps=1)
    assert recorded(watch) == [(0, "OK")]


def test_a_late_step_is_the_same_step(late, attach, mlp, train):
    torch.manual_seed(0)
    twin = type(mlp)()
    twin.load_state_dict(mlp.state_dict())
    prompt = attach(twin, hash_every=1)
    train(twin, steps=5)
    watch, device = late(mlp, hash_every=1)
    train(mlp, steps=5)
    device.arrive()
    watch.flush()
    assert [s.id for s in watch._recorder.sites] == [s.id for s in prompt._recorder.sites]
    assert watch._recorder.losses() == prompt._recorder.losses()
    for i in range(5):
        a, b = watch._recorder.steps[i], prompt._recorder.steps[i]
        assert a[2].tobytes() == b[2].tobytes(), i
        assert {n: a[0][n] for n in ("step", "lr", "loss", "status")} == {
            n: b[0][n] for n in ("step", "lr", "loss", "status")
        }


@pytest.mark.parametrize("how", ["detach", "exception", "exit", "sigterm", "flush"])
def test_what_is_on_its_way_goes_out_where_training_ends(late, mlp, train, how):
    watch, device = late(mlp)
    train(mlp, steps=2)
    timer = threading.Timer(0.05, device.arrive)
    mlp(torch.randn(32, 64)).backward()
    timer.start()
    if how == "exception":
        with pytest.raises(ZeroDivisionError), watch:
            timer.join()
            device.arrive()
            _ = 1 / 0
    elif how == "exit":
        timer.join()
        for event in device.events:
            event.arrived = True
        step_boundary._at_exit()
    elif how == "sigterm":
        watch._on_death()  # waits for what arrives meanwhile
    elif how == "flush":
        watch.flush()
        assert recorded(watch) == [(0, "OK"), (1, "OK")]
        return
    else:
        watch.detach()
    assert recorded(watch)[:2] == [(0, "OK"), (1, "OK")]
    timer.join()


def test_a_device_that_hangs_does_not_keep_the_process_from_ending(late, mlp, train):
    watch, _ = late(mlp)
    train(mlp, steps=2)
    began = time.monotonic()
    watch._on_death()
    assert time.monotonic() - began < 5 * ARRIVAL_TIMEOUT_S
    assert recorded(watch) == []
    assert watch.guard.errors["arrival"] == 1
    assert watch._recorder.closed == 1


def test_a_tile_map_of_a_late_step_is_that_steps(late, mlp):
    watch, device = late(mlp)
    for bad in (False, True, False, False):
        x = torch.randn(32, 64)
        if bad:
            x[3, 5] = float("inf")
        mlp(x).backward()
        device.arrive()
        watch.step()
    watch.flush()
    by_id = {s.id: s for s in watch._recorder.sites}
    of_up = [m for m in watch._recorder.maps if (by_id[m.site].module, by_id[m.site].operand) == ("up", "input")]
    assert {m.step for m in of_up} >= {0, 1}
    (event,) = [m for m in of_up if m.step == 1 and by_id[m.site].direction == "rowwise"]
    assert int(event.num_nonfinite.sum()) == 1


def test_a_fused_optimizers_skip_is_known_when_it_has_arrived(late, mlp):
    watch, device = late(mlp)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    for found in (0.0, 1.0, 0.0):
        mlp(torch.randn(32, 64)).backward()
        watch._scalars.of_optimizer["found_inf"] = torch.tensor(found)
        optimizer.step()
        device.arrive()
    watch.flush()
    assert [s for _, s in recorded(watch)] in (["OK", "SKIPPED", "OK"], ["OK", "OK", "OK"])


def test_nothing_ends_while_a_graph_is_captured(attach, mlp, train, monkeypatch):
    watch = attach(mlp)
    with monkeypatch.context() as m:
        m.setattr(step_boundary.torch.cuda, "is_initialized", lambda: True)
        m.setattr(step_boundary.torch.cuda, "is_current_stream_capturing", lambda: True)
        # a build of torch with CUDA asks the driver for the stream
        m.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda _: None, raising=False)
        train(mlp, steps=2)
        assert recorded(watch) == []
    watch.step()
    assert recorded(watch) == [(0, "OK")]
    assert {int(r["num_calls"]) for r in watch._recorder.step(0)[1].values()} == {2}


def test_pinned_memory_is_used_again_and_bounded():
    class Pinning(HostCopies):
        made = 0

        def _pinned(self, like):
            free = self._free.get((like.shape, like.dtype))
            self.made += not free
            return super()._pinned(like) if free else torch.empty_like(like)

    copies = Pinning("cuda")
    for _ in range(5):
        buffers = [copies._pinned(torch.empty(100)), copies._pinned(torch.empty(7, dtype=torch.float64))]
        copies._take_back(buffers)
    assert copies.made == 2
    copies._take_back([torch.empty(MAX_PINNED_BYTES, dtype=torch.uint8)])
    assert copies._free_bytes < MAX_PINNED_BYTES


def test_sigterm_in_the_middle_of_a_step_hands_it_over_once(tmp_path, attach, mlp):
    watch = attach(mlp)
    before = signal.getsignal(signal.SIGTERM)
    inner = watch._recorder.record_step

    def interrupted(*args):
        inner(*args)
        watch._on_death()  # the handler runs between two lines of the hand-over

    watch._recorder.record_step = interrupted
    mlp(torch.randn(32, 64)).backward()
    watch.step()
    assert len(watch._recorder.steps) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_scalars_on_the_device_are_not_read_where_the_step_ends(late):
    model = nn.Sequential(nn.Linear(32, 32))
    watch, device = late(model)

    class Unread(torch.Tensor):
        """A tensor that fails when a number is taken out of it."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.tolist):
                raise AssertionError(f"{func} waits for the device")
            return super().__torch_function__(func, types, args, kwargs or {})

    model(torch.randn(8, 32)).sum().backward()
    watch.log(grad_norm=torch.tensor(3.0).as_subclass(Unread), mine=torch.tensor([1.0, 3.0]).as_subclass(Unread))
    watch.step()
    assert not watch.guard.errors
    device.arrive()
    watch.flush()
    header, *_, logs, _ = watch._recorder.steps[0]
    assert float(header["grad_norm"]) == 3.0
    assert logs["mine"] == 2.0
