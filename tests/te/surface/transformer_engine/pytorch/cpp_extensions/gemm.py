"""Products, by layout: TN weight and input, NN weight and grad_output, NT input and grad_output."""


def general_gemm(A, B, out_dtype=None, quantization_params=None, *, layout="TN", grad=False):
    if layout == "TN":
        return (B.wide(False) @ A.wide(False).t(),)
    if layout == "NN":
        return (B.wide(False) @ A.wide(True),)
    return (B.wide(True).t() @ A.wide(True),)


def general_grouped_gemm(A, B, *, layout="TN", m_splits=None, grad=False):
    return [general_gemm(a, b, layout=layout, grad=grad)[0] for a, b in zip(A, B, strict=True)]
