"""Number formats and tensor layouts: pure tensor-to-tensor functions, no modules, no configuration, no files.

``mx`` quantizes. ``swizzle`` and ``scales`` arrange the result as the kernels read it; ``moe_mx`` does the same for
expert weights. ``layouts`` moves weights between Hugging Face's and the kernels' axes. ``group_fp8`` stores
activations. ``source_codes`` decodes the weights of quantized checkpoints. The facts they are built on are in
``constants``.
"""

from __future__ import annotations

from hf_neuron_moe.formats.constants import (
    E2M1 as E2M1,
    E4M3FN as E4M3FN,
    E5M2 as E5M2,
    ELEMENT_FORMATS as ELEMENT_FORMATS,
    ElementFormat as ElementFormat,
    ScaleRule as ScaleRule,
    SwizzleScheme as SwizzleScheme,
)
from hf_neuron_moe.formats.e8m0 import e8m0_to_float32 as e8m0_to_float32
from hf_neuron_moe.formats.group_fp8 import (
    group_dequantize_fp8 as group_dequantize_fp8,
    group_quantize_fp8 as group_quantize_fp8,
    group_scales as group_scales,
)
from hf_neuron_moe.formats.moe_mx import (
    MoEWeightMX as MoEWeightMX,
    dequantize_moe_down as dequantize_moe_down,
    dequantize_moe_gate_up as dequantize_moe_gate_up,
    moe_bias_from_lanes as moe_bias_from_lanes,
    moe_bias_to_lanes as moe_bias_to_lanes,
    pack_moe_scales as pack_moe_scales,
    padded_intermediate as padded_intermediate,
    quantize_moe_down as quantize_moe_down,
    quantize_moe_gate_up as quantize_moe_gate_up,
    unpack_moe_scales as unpack_moe_scales,
)
from hf_neuron_moe.formats.mx import (
    MXTensor as MXTensor,
    dequantize_mx as dequantize_mx,
    dequantize_mx_natural as dequantize_mx_natural,
    fake_quantize_mx as fake_quantize_mx,
    quantize_mx as quantize_mx,
    quantize_mx_swizzled as quantize_mx_swizzled,
)
from hf_neuron_moe.formats.scales import (
    ScaleLayout as ScaleLayout,
    detect_scale_layout as detect_scale_layout,
    oversized_to_packed as oversized_to_packed,
    packed_to_oversized as packed_to_oversized,
    scale_row_count as scale_row_count,
    scale_rows as scale_rows,
    to_compact as to_compact,
    to_oversized as to_oversized,
    to_packed as to_packed,
)
from hf_neuron_moe.formats.source_codes import (
    dequantize_fp8_blocks as dequantize_fp8_blocks,
    dequantize_mxfp4_blocks as dequantize_mxfp4_blocks,
    dequantize_packed_fp4 as dequantize_packed_fp4,
)
from hf_neuron_moe.formats.swizzle import (
    k_map as k_map,
    pack_x4 as pack_x4,
    swizzle as swizzle,
    tile_segments as tile_segments,
    unpack_x4 as unpack_x4,
    unswizzle as unswizzle,
)

__all__ = ["ELEMENT_FORMATS"]  # the rest knows its module
__all__ += [name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith(__name__)]
