from .gemm import general_gemm, general_grouped_gemm

__all__ = ["general_gemm", "general_grouped_gemm"]
