"""Megatron-core: attach to the chunks of a model, with its optimizer's gradient norm, loss scale and the steps that it skips.

    watch = attach_megatron(model, optimizer, iteration=args.iteration, recipe="observe")

Thread:     training

Nothing of Megatron is imported. Its loss is made behind the model, by the `loss_func` that `forward_step` returns: log it
there, `watch.log(loss=loss)`. Iterations are counted by Megatron's training loop, so the first one is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fp8watch.integrations.trainer_watch import TrainerWatch


def attach_megatron(
    model_chunks: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    iteration: int = 0,
    state: Mapping[str, Any] | None = None,
    mirror: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Any:
    """Attach to what Megatron's `setup_model_and_optimizer` made; step n is its iteration n.

    Args:
        model_chunks: the model, or its chunks under interleaved pipelines: names of sites then begin with the chunk's number.
        optimizer: a MegatronOptimizer, chained or not.
        iteration: how many are over, `args.iteration` behind a checkpoint.
        state: `watch.state_dict()` of the checkpoint: the run and its delayed scales go on.
        mirror: where scalars go as well, see `fp8watch.mirror`.
        arguments: for `fp8watch.attach`.

    Returns:
        the `fp8watch.Watch`; `detach` it when training ends.

    Raises:
        TypeError: no optimizer, or an argument that attach does not have.
        ValueError: as `fp8watch.attach` does, and an optimizer without a torch optimizer inside.
    """
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(f"optimizer={type(optimizer).__name__}: must be a MegatronOptimizer")
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    held = TrainerWatch("megatron", arguments, mirror)
    model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    held.begin(model, step=iteration + 1, state=state, optimizer=optimizer)
    watch = held.watch
    assert watch is not None
    watch.guard.run("megatron", lambda: watch._keep(_OptimizerCalls(optimizer, held, iteration)))
    return watch


class _OptimizerCalls:
    """Looks at what the optimizer's own methods return: its norm, and whether it stepped."""

    def __init__(self, optimizer: Any, held: TrainerWatch, iteration: int) -> None:
        self._optimizer, self._held, self._iteration = optimizer, held, iteration
        self._own = {}
        for name, look in (("get_grad_norm", self._norm), ("clip_grad_norm", self._norm), ("step", self._stepped)):
            method = getattr(optimizer, name, None)
            if callable(method):
                self._own[name] = optimizer.__dict__.get(name)
                before = self._look_at_scale if name == "step" else None
                optimizer.__dict__[name] = _looked_at(method, look, before)

    def _look_at_scale(self) -> None:
        self._held.loss_scale(self._scale)

    def _scale(self) -> Any:
        """The loss scale of what is in float16; that of others is always 1."""
        chained = getattr(self._optimizer, "chained_optimizers", None) or [self._optimizer]
        scaled = getattr(chained[0], "grad_scaler", None) is not None
        return chained[0].get_loss_scale() if scaled else None

    def _norm(self, norm: Any) -> None:
        if norm is not None:
            self._held.do("megatron", lambda watch: watch.log(grad_norm=norm))

    def _stepped(self, result: Any) -> None:
        self._iteration += 1
        success = result[0] if isinstance(result, tuple) and result else True
        if not success:
            self._held.do("megatron", lambda watch: watch._skipped(self._iteration))
        self._held.number(self._iteration + 1)

    def remove(self) -> None:
        """Give the optimizer its methods back."""
        for name, own in self._own.items():
            if own is None:
                self._optimizer.__dict__.pop(name, None)
            else:
                self._optimizer.__dict__[name] = own


def _looked_at(
    method: Callable[..., Any], look: Callable[[Any], None], before: Callable[[], None] | None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:  # the call may change it
            before()
        result = method(*args, **kwargs)
        look(result)
        return result

    return call
