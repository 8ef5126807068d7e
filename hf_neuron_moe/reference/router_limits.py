"""What the device's router kernel can do (nki-library 2.29 ``router_topk``); values do not depend on any of it."""

from __future__ import annotations

from hf_neuron_moe.errors import ConfigError, NeuronMoEError, ShapeError

MAX_EXPERTS = 512
"""The moving free size of one matmul."""

PARTITIONS = 128
"""Partitions of the tensor engine: H is tiled by it, and token tiles have this many rows."""

MAX_TOP_K = 8
"""The selection instruction finds eight maxima."""

_OFF_DEVICE = "Pass device_limits=False to compute the mathematical definition anyway."


def check_device_limits(
    sizes: tuple[int, int, int, int], *, sigmoid_after_selection: bool, indirect_scatter: bool, eager: bool
) -> None:
    """Refuse what the device refuses.

    Args:
        sizes: T, H, E, K.
        sigmoid_after_selection: SIGMOID with ``router_pre_norm=False``.
        indirect_scatter: ``use_indirect_dma_scatter``.
        eager: ``return_eager_affi``.

    Raises:
        ShapeError: a size beyond the kernel's.
        ConfigError: sigmoid after the selection without the indirect scatter.
    """
    T, H, E, K = sizes
    rules: list[tuple[bool, type[NeuronMoEError], str, str, str]] = [
        (E <= MAX_EXPERTS, ShapeError, "E of w", f"at most {MAX_EXPERTS}", str(E)),
        (H % PARTITIONS == 0, ShapeError, "H of w", f"a multiple of {PARTITIONS}", str(H)),
        (K <= MAX_TOP_K, ShapeError, "k", f"at most {MAX_TOP_K}", str(K)),
        (
            indirect_scatter or not sigmoid_after_selection,
            ConfigError,
            "use_indirect_dma_scatter",
            "True for SIGMOID with router_pre_norm=False",
            "False",
        ),
        (
            not indirect_scatter or T <= PARTITIONS or T % PARTITIONS == 0,
            ShapeError,
            "T of x",
            f"at most {PARTITIONS} or a multiple of it with use_indirect_dma_scatter",
            str(T),
        ),
        (
            not eager or T <= PARTITIONS,
            ShapeError,
            "T of x",
            f"at most {PARTITIONS} with return_eager_affi",
            str(T),
        ),
    ]
    for holds, kind, argument, expected, got in rules:
        if not holds:
            raise kind.about(argument, expected, got, _OFF_DEVICE)
