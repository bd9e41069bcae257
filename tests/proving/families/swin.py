"""Windows that move: Swin of transformers with random weights on digits. Attention within windows of 2 × 2 patches with a learnt bias
for each distance, windows that are shifted in every other layer, patches that are merged four to one between two widths,
blocks that are left out at random; rates that fall from the head to the first layers, MXFP8."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from proving.data import images
from proving.families import parts
from proving.training import Training
from torch import Tensor, nn

NEEDS = ("transformers", "sklearn")

_BLOCK = r"swin\.encoder\.layers\.\d+\.blocks\.\d+"
ROLES = {
    "blocks": _BLOCK,
    "attention": _BLOCK + r"\.attention",
    "attention.q": _BLOCK + r"\.attention\.q_proj",
    "attention.k": _BLOCK + r"\.attention\.k_proj",
    "attention.v": _BLOCK + r"\.attention\.v_proj",
    "attention.out": _BLOCK + r"\.attention\.o_proj",
    "mlp.up": _BLOCK + r"\.mlp\.fc1",
    "mlp.down": _BLOCK + r"\.mlp\.fc2",
    "norm": _BLOCK
    + r"\.layernorm_\w+|swin\.layernorm|swin\.encoder\.layers\.\d+\.downsample\.norm|swin\.embeddings\.norm",
    "embedding": r"swin\.embeddings\.patch_embeddings\.projection",
    "head": r"classifier",
}


def by_depth(model: nn.Module, share: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters: each stage has `share` of the rate of the next one; vectors and tables of biases do not decay."""
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    stages = 0
    for name, p in model.named_parameters():
        found = re.match(r"swin\.encoder\.layers\.(\d+)\.", name)
        depth = int(found[1]) + 1 if found else 0 if name.startswith("swin.embeddings") else 99
        stages = max(stages, depth if depth < 99 else 0)
        groups.setdefault((depth, p.ndim >= 2 and "bias" not in name), []).append(p)
    return [
        {
            "params": of,
            "lr_scale": share ** (stages + 1 - min(depth, stages + 1)),
            "weight_decay": weight_decay * decays,
        }
        for (depth, decays), of in groups.items()
    ]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(pixel_values=batch["pixels"][:, None]).logits.float(), batch["labels"])


def build(seed: int, rank: int = 0) -> Training:
    """A stage of 2 blocks of 64 and one of 1 of 128, 24 or 32 digits in patches of 2 × 2."""
    from transformers import SwinConfig, SwinForImageClassification

    rng = parts.drawing("swin", seed)
    model = SwinForImageClassification(
        SwinConfig(
            image_size=8, patch_size=2, num_channels=1, embed_dim=64, depths=[2, 1],
            num_heads=[2, 4], window_size=2, mlp_ratio=2.0, drop_path_rate=float(rng.choice([0.0, 0.1])),
            use_absolute_embeddings=True, initializer_range=0.08, num_labels=10,
        )
    )  # fmt: skip
    model.train()
    peak, share = parts.learning_rate(rng, 1e-3, 3e-3), float(rng.uniform(0.6, 0.9))
    t = Training(
        family="swin",
        model=model,
        optimizer=torch.optim.AdamW(by_depth(model, share, 0.05), lr=peak, betas=(0.9, 0.99)),
        batch=images(seed, int(rng.choice([24, 32]))),
        loss=loss,
        recipe="mxfp8",
        clip_norm=5.0,
        seed=seed,
        notes=parts.roles(model, ROLES) | {"causal": False, "tokens": False, "classes": 10},
    )
    t.schedule = parts.warm_cosine(peak, t.steps, warm=16, floor=0.01)
    return t
