"""Thin ``@nki.jit`` kernels around nkilib's: they allocate what nkilib writes into, and return all of it.

Each module imports ``nki`` and nkilib when it is imported, so the adapter imports only those whose kernels exist. NKI
resolves module globals and no closure cells: everything a kernel uses is a global of its module or an argument. Which
options the installed function takes is found out when its module is imported.

A write into an argument that the kernel does not return is lost without an error. So no kernel here writes into an
argument: buffers are allocated in ``shared_hbm`` and returned.

Letters: S tokens, H hidden, I intermediate, T tokens, E experts, N blocks of B slots.
"""
