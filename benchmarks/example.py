"""One product, checked, and why its kernel was chosen."""

import numpy as np

import ktlib

a = np.random.rand(32, 32).astype(np.float32)
w = np.random.rand(32, 32).astype(np.float32)  # a [N, K] weight, used through its transpose
c = ktlib.matmul(a, w.T)  # torch and CuPy arrays alike, on their device and stream
print(np.abs(c - a.astype(float) @ w.T).max() < 1e-4)
choice = ktlib.explain(a, w.T)  # the code that decides calls; nothing is launched
print(choice.kernel or "vendor")
print(choice.tier)
print(choice.reason)
