"""torchtitan's real Trainer on a CPU: what it asks of an accelerator is answered, and its data are made up.

Imported before anything of torchtitan, which asks for the kind of device once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._utils

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.tools import utils  # noqa: E402


class _NoMemory:
    device_name, device_capacity = "cpu", 1

    def reset_peak_stats(self) -> None:
        pass

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)


metrics.build_device_memory_monitor = _NoMemory
utils.get_local_device = lambda: torch.device("cpu")
dist_utils.set_pg_timeouts = lambda **_: None  # waits for a numbered device
attention._compiled_create_block_mask = attention.create_block_mask  # compiling takes half a minute


def _dense_attention(q: Any, k: Any, v: Any, **more: Any) -> tuple[Any, Any]:
    """In place of flex_attention, which has no backward on a CPU; each row of the data is one document."""
    made = torch.nn.functional.scaled_dot_product_attention
    return made(q, k, v, is_causal=True, scale=more["scale"], enable_gqa=more["enable_gqa"]), None


attention.FlexAttention._compiled_flex_attn = staticmethod(_dense_attention)

VOCAB = 256
CONFIGS = {"llama3": "llama3_debugmodel", "qwen3": "qwen3_moe_debug", "deepseek_v3": "deepseek_v3_debugmodel"}


class NoTokenizer(BaseTokenizer):
    """Tokens are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCAB


class Numbers(BaseDataLoader):
    """The same tokens in each training; it goes on behind those of a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._shape, self._next = (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._next += 1
            tokens = torch.randint(0, VOCAB, self._shape, generator=torch.Generator().manual_seed(self._next))
            positions = torch.arange(self._shape[1] - 1).expand(self._shape[0], -1).contiguous()
            labels = tokens[:, 1:].contiguous()
            labels[:, : self._next % 5] = -100  # batches differ in what counts
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


def config(family: str, folder: Path, **training: Any) -> Any:
    """A configuration of torchtitan's own small model of a family; `training` is put into its training."""
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    made = getattr(registry, CONFIGS[family])()
    made.tokenizer, made.dataloader, made.dump_folder = NoTokenizer.Config(), Numbers.Config(), str(folder)
    made.validator.enable = False
    made.metrics.log_freq, made.debug.seed = 1, 0
    wanted = {"seq_len": 32, "local_batch_size": 2, "steps": 6, "disable_cuda_graphs": True} | training
    for key, value in wanted.items():
        setattr(made.training, key, value)
    return made
