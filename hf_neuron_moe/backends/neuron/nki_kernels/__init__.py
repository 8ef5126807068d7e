"""Thin ``@nki.jit`` kernels around nkilib's: they allocate what nkilib writes into, and return all of it.

Each module imports ``nki`` and nkilib, and finds out which options the installed function takes, when it is imported:
the adapter imports only those whose kernels exist. NKI resolves module globals and no closure cells. Buffers are in
``shared_hbm`` and returned: a write into an argument that a kernel does not return is lost without an error.

Letters: S tokens, H hidden, I intermediate, T tokens, E experts, N blocks of B slots.
"""
