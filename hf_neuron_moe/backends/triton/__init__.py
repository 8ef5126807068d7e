"""Triton kernels of the grouped path, one source for Hopper and Blackwell. No GPU has run them.

They take plain tensors: rows sorted by expert, and each expert's end row as int32 on the device. Grids have the worst
case's size, so nothing depends on a value of the device.
"""
