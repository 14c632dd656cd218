"""Faults of the libraries below torch, put into torch.linalg.eigh, qr and svd."""

import torch

# What the libraries report; each must lead to another attempt.
REPORTED = {
    "LAPACK": torch.linalg.LinAlgError("linalg.eigh: (Batch element 0): The algorithm failed"),
    "cuSOLVER": RuntimeError(
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnXsyevBatched`"
    ),
    "hipSOLVER": RuntimeError("hipsolver error: HIPSOLVER_STATUS_INTERNAL_ERROR, when calling"),
    "rocSOLVER": RuntimeError("rocsolver error: 6, when calling `rocsolver_ssyevd`"),
    "MAGMA": RuntimeError("MAGMA: magma_ssyevd_gpu returned an error"),
    "illegal value": RuntimeError(
        "linalg.svd: Argument 4 has illegal value. Most certainly there is a bug in the"
        " implementation calling the backend library."
    ),
    "CUDA memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cuBLAS memory": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "host memory": RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't"
                                " allocate memory: you tried to allocate 8 bytes."),
}  # fmt: skip

# What must end a run: the device is lost, or the call was wrong.
FATAL = {
    "illegal access": RuntimeError(
        "CUDA error: an illegal memory access was encountered\n... in cusolver"
    ),
    "assert": RuntimeError("CUDA error: device-side assert triggered"),
    "shape": RuntimeError("linalg.eigh: A must be batches of square matrices"),
    "type": TypeError("linalg_qr(): argument 'A' must be Tensor"),
}

SILENT = ("nan", "not orthogonal")


class Faults:
    """torch.linalg's functions, of which one fails as told, by an error or without a word."""

    def __init__(self, monkeypatch, name, fails, fault):
        self.real, self.fails, self.fault = getattr(torch.linalg, name), fails, fault
        self.orthogonal = 1 if name == "eigh" else 0  # which result is
        self.calls = []
        monkeypatch.setattr(torch.linalg, name, self)

    def __call__(self, A):
        self.calls.append((A.dtype, tuple(A.shape)))
        if not self.fails(A):
            return self.real(A)
        if isinstance(self.fault, Exception):
            raise self.fault
        results = tuple(self.real(A))
        if self.fault == "nan":
            return tuple(torch.full_like(X, float("nan")) for X in results)
        return tuple(1.5 * X if i == self.orthogonal else X for i, X in enumerate(results))
