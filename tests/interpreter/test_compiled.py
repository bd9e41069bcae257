"""The kernels compile for the GPUs that they are meant for, without one: what the interpreter cannot see.

A wrong rounding mode, flushing of subnormal numbers, a fused multiply-add or registers that do not suffice show in the
code that is generated.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.counts import in_turn

pytest.importorskip("triton.language", reason="needs triton: pip install triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter was chosen: nothing is compiled", allow_module_level=True)

_OUTPUTS = {"out": "*u8", "scale_inv_out": "*fp32", "amax_out": "*fp32", "marks_out": "*u8", "workspace": "*i32"}
_POINTERS = {"x": "*bf16", **{name + side: kind for name, kind in _OUTPUTS.items() for side in ("", "_c")}}
_POINTERS |= {"lines": "*i32", "buffer": "*u8", "given": "*fp32", "given_c": "*fp32", "y": "*bf16"}
_ALIGNED = {"M", "K", "stride_m", "stride_om", "stride_ck", "Mt", "Kt"}
_QUANTIZE = {
    "BM": 128, "BK": 128, "WHOLE": False, "E4M3": True, "LARGEST_INPUT": 3.4e38, "POWER_2": True,
    "GUARD": True, "GIVEN": False, "INVARIANT": True, "STATS": True, "HEAVY": False, "OUTPUT": 0,
    "HARDWARE": False, "amax_in": None, "given": None, "stride_k": 1, "stride_ok": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks": ("quantize_kernel", {**_QUANTIZE, "TM": 128, "TK": 128, "POWER_2": False}),
    "both": ("both_kernel", {**_QUANTIZE, "given_c": None, "stride_cm": 1}),
    "statistics alone": ("both_kernel", {**_QUANTIZE, "given_c": None, "stride_cm": 1, "OUTPUT": 2}),
    "look": ("look_kernel", {"BLOCK": 1024, "TIMES": 16, "DENSE": True, "ENERGY": False}),
    "merge of a look": ("merge_kernel", {"CHUNK": 256, "ENERGY": True}),
    "fold": ("fold_kernel", {"WHOLE": False, "HEAVY": True, "CHUNK": 256, "COLUMNS": 8, "BOTH": False}),
    "fold of both directions": (
        "fold_kernel",
        {"WHOLE": False, "HEAVY": True, "CHUNK": 256, "COLUMNS": 8, "BOTH": True},
    ),
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "look by strides, with energy": ("look_kernel", {"BLOCK": 1024, "TIMES": 16, "DENSE": False, "ENERGY": True}),
    "merge of a look at an output": ("merge_output_kernel", {"CHUNK": 256, "NAN_ONLY": False}),
    "rowwise": ("quantize_kernel", {**_QUANTIZE, "TM": 1, "TK": 128}),
    "columnwise": ("quantize_kernel", {**_QUANTIZE, "TM": 128, "TK": 1}),
    "no statistics": ("quantize_kernel", {**_QUANTIZE, "TM": 1, "TK": 128, "STATS": False}),
    "rowwise, all": ("quantize_kernel", {**_QUANTIZE, "TM": 1, "TK": 128, "HEAVY": True}),
    "columnwise, all": ("quantize_kernel", {**_QUANTIZE, "TM": 128, "TK": 1, "HEAVY": True}),
    "blocks, all": ("quantize_kernel", {**_QUANTIZE, "TM": 128, "TK": 128, "HEAVY": True}),
    "both, all": ("both_kernel", {**_QUANTIZE, "given_c": None, "stride_cm": 1, "HEAVY": True}),
    "given": ("quantize_kernel", {**{k: v for k, v in _QUANTIZE.items() if k != "given"}, "TM": 1, "TK": 32, "GIVEN": True}),
    "E5M2": ("quantize_kernel", {**_QUANTIZE, "TM": 1, "TK": 128, "E4M3": False, "OUTPUT": 1}),
    "the cast instruction": ("quantize_kernel", {**_QUANTIZE, "TM": 1, "TK": 128, "HARDWARE": True}),
}  # fmt: skip


def compile_for(target: int, kernel: str, constants: dict[str, Any]) -> Any:
    """The compiled kernel, for operands that are aligned as training's are."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fp8watch.kernels import triton_fold, triton_launch, triton_look, triton_tiles

    function = next(
        found for m in (triton_tiles, triton_fold, triton_look) if (found := getattr(m, kernel, None)) is not None
    )
    if "BM" in constants:
        constants = {**constants, "SUB": triton_launch.strip_of((constants["BM"], constants["BK"]), constants["HEAVY"])}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        kind = _POINTERS.get(name, "fp32" if name == "eps" else "i32")
        kind = "fp32" if kernel == "quantize_kernel" and constants["OUTPUT"] == 1 and name == "out" else kind
        kind = "*fp32" if kind == "fp32" and name == "out" else kind
        signature[name] = "constexpr" if name in constants else kind
        if name not in constants and (name in _POINTERS or name in _ALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": 1 if "merge" in kernel else 4, "enable_fp_fusion": False},
    )


def registers_and_stack(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of what did not fit into them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    said = subprocess.run(
        [tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    got = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert got is not None, said
    return int(got[1]), int(got[2])


def check(name: str, target: int, tmp_path: Path) -> None:
    kernel, constants = {**CASES, **LONG}[name]
    made = compile_for(target, kernel, constants)
    ptx = made.asm["ptx"]
    assert ".ftz" not in ptx, "subnormal numbers are flushed to zero"
    assert "div.full" not in ptx, "a division is not IEEE's"
    assert "div.approx" not in ptx
    assert "rcp.approx" not in ptx
    assert not re.search(r"fma\.rn\.f32", ptx), "a product and a sum are rounded once"
    assert "atom.global" not in ptx, "the order of programs would show"
    if "HARDWARE" in constants:
        assert "div.rn.f32" in ptx
        assert ("cvt.rn.satfinite.e4m3x2" in ptx) == constants["HARDWARE"]
    registers, stack = registers_and_stack(made.asm["cubin"], tmp_path)
    assert stack <= 64, f"{registers} registers and {stack} bytes of stack: the kernel spills"
    print(f"{name}, sm_{target}: {registers} registers, {stack} bytes of stack")


@pytest.mark.parametrize("name", CASES)
def test_compiles_for_hopper(name: str, tmp_path: Path) -> None:
    check(name, 90, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("target", in_turn([80, 89, 90, 100]))
@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_compiles_for_every_target(name: str, target: int, tmp_path: Path) -> None:
    if target < 89 and name == "the cast instruction":
        pytest.skip("sm_80 has no cast to E4M3")
    check(name, target, tmp_path)
