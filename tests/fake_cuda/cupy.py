"""A stand-in for the module `cupy`: an array with the attributes ktlib reads, in host memory or nowhere."""

import ctypes
from types import SimpleNamespace

import numpy as np

CURRENT = SimpleNamespace(device=0, stream=0x5000)
VENDOR_CALLS = []


class ndarray:  # noqa: N801 (CuPy's name)
    def __init__(self, shape, dtype, address=None, strides=None, device=None):
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        if strides is None:
            strides = np.empty(self.shape, self.dtype).strides
        self.strides = tuple(strides)
        if address is None:
            span = 1 + sum((n - 1) * abs(s) for n, s in zip(self.shape, self.strides, strict=True))
            self._memory = ctypes.create_string_buffer(span + 512)
            address = (ctypes.addressof(self._memory) + 255) // 256 * 256
        self.data = SimpleNamespace(ptr=address, device_id=CURRENT.device if device is None else device)


class _Cuda:
    @staticmethod
    def get_current_stream():
        return SimpleNamespace(ptr=CURRENT.stream)


cuda = _Cuda


def matmul(a, b, out=None):
    VENDOR_CALLS.append((a.shape, b.shape))
    return out if out is not None else ndarray((a.shape[0], b.shape[1]), a.dtype)
