"""Modules that compute SwiGLU blocks with the kernels' numerics, whichever layout their weights live in."""
