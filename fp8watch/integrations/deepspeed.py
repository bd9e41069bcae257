"""DeepSpeed: attach to an engine, with its step numbers, gradient norm and loss scale, and the steps that an overflow skips.

    watch = attach_deepspeed(engine, recipe="observe", state=client_state.get("fp8watch"))
    ...
    engine.save_checkpoint(folder, client_state={"fp8watch": watch.state_dict()})

Thread:     training

Nothing of DeepSpeed is imported. The loss is what the engine returns. A step ends where the optimizer inside the engine's
has stepped, which under ZeRO holds float32 copies of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8watch.integrations.trainer_watch import TrainerWatch


def attach_deepspeed(
    engine: Any,
    *,
    state: Mapping[str, Any] | None = None,
    mirror: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Any:
    """Attach to what `deepspeed.initialize` returned; step n is the engine's `global_steps` n.

    Args:
        engine: a DeepSpeedEngine.
        state: `watch.state_dict()` of the checkpoint, out of the client state that `engine.load_checkpoint` returned:
            the run and its delayed scales go on. The step is the engine's.
        mirror: where scalars go as well, see `fp8watch.mirror`.
        arguments: for `fp8watch.attach`.

    Returns:
        the `fp8watch.Watch`; `detach` it when training ends.

    Raises:
        TypeError: not an engine, or an argument that attach does not have.
        ValueError: as `fp8watch.attach` does, and an engine whose optimizer has no torch optimizer inside.
    """
    if not hasattr(engine, "global_steps") or getattr(engine, "optimizer", None) is None:
        raise TypeError(f"engine={type(engine).__name__}: must be an engine with an optimizer, of deepspeed.initialize")
    held = TrainerWatch("deepspeed", arguments, mirror)
    held.begin(engine, step=int(engine.global_steps) + 1, state=state, optimizer=engine.optimizer)
    watch = held.watch
    assert watch is not None
    watch.guard.run("deepspeed", lambda: watch._keep(_EngineSteps(engine, held)))
    return watch


class _EngineSteps:
    """Looks at the engine before its optimizer steps, and behind its `step`."""

    def __init__(self, engine: Any, held: TrainerWatch) -> None:
        self._engine, self._held = engine, held
        self._skipped = int(engine.skipped_steps)
        own, self._step = engine.__dict__.get("step"), engine.step
        self._before = own
        assert held.watch is not None
        self._hooks = [o.register_step_pre_hook(self._about_to_step) for o in held.watch._owner.named()]
        engine.__dict__["step"] = self._step_engine

    def _about_to_step(self, *_: Any) -> None:
        self._held.do("deepspeed", self._tell)

    def _tell(self, watch: Any) -> None:
        watch.number(int(self._engine.global_steps) + 1)
        norm = getattr(self._engine.optimizer, "_global_grad_norm", None)
        if norm is not None:
            watch.log(grad_norm=norm)

    def _step_engine(self, *args: Any, **kwargs: Any) -> Any:
        self._held.loss_scale(self._scale)  # here, as `step` may change it
        result = self._step(*args, **kwargs)
        self._held.do("deepspeed", self._look_behind)
        return result

    def _scale(self) -> Any:
        """The loss scale of a model in float16; that of others is always 1."""
        if not self._engine.fp16_enabled():
            return None
        optimizer = self._engine.optimizer
        return getattr(optimizer, "cur_scale", getattr(optimizer, "loss_scale", None))

    def _look_behind(self, watch: Any) -> None:
        if int(self._engine.skipped_steps) > self._skipped:
            self._skipped = int(self._engine.skipped_steps)
            watch._skipped(int(self._engine.global_steps))

    def remove(self) -> None:
        """Give the engine its `step` back."""
        for hook in self._hooks:
            hook.remove()
        if self._engine.__dict__.get("step") == self._step_engine:
            if self._before is None:
                del self._engine.__dict__["step"]
            else:
                self._engine.__dict__["step"] = self._before
