"""Modules that compute SwiGLU blocks with the kernels' numbers, whichever layout their weights live in."""
