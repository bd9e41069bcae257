"""The enumerations of the extension, as pybind makes them: `int()`, `__members__`, and no number in `str()`."""

import enum

import torch


class Enumeration(enum.Enum):
    def __int__(self):
        return self.value

    def __index__(self):
        return self.value

    def __eq__(self, other):
        return other is not None and int(self) == int(other)

    def __hash__(self):
        return hash(self.value)


def _counted(name, members):
    return Enumeration(name, {member: i for i, member in enumerate(members.split())})


DType = Enumeration(
    "DType",
    {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
        "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
    },
)  # fmt: skip
FP8FwdTensors = _counted(
    "FP8FwdTensors", " ".join(f"GEMM{i}_{o}" for i in (1, 2, 3) for o in ("INPUT", "WEIGHT", "OUTPUT"))
)
FP8BwdTensors = _counted("FP8BwdTensors", " ".join(f"GRAD_{o}{i}" for i in (1, 2, 3) for o in ("OUTPUT", "INPUT")))
Float8BlockScaleTensorFormat = _counted("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
CommOverlapType = _counted("CommOverlapType", "RS AG")

TORCH = {
    0: torch.uint8, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16,
    7: torch.float8_e4m3fn, 8: torch.float8_e5m2,
}  # fmt: skip
LARGEST = {7: 448.0, 8: 57344.0}


class _Counting(type):
    def __getattr__(cls, name):
        if name == "__members__":
            return cls.known
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.known.setdefault(name, len(cls.known))


def any_enumeration(name):
    """An enumeration that nothing here depends on: members are numbered as they are asked for."""
    return _Counting(name, (), {"known": {}})
