"""Number formats and tensor layouts: pure tensor-to-tensor functions, no modules, no configuration, no files.

``mx`` quantises, ``swizzle`` and ``scales`` arrange the result as the kernels read it, ``moe_mx`` does the same for
expert weights, ``layouts`` moves weights between Hugging Face's and the kernels' axes, ``group_fp8`` stores
activations. The facts they are built on are in ``constants``.

Errors: DTypeError for a dtype that is not documented, ShapeError for shapes and sizes, ConfigError for unknown names
and other option values, DeviceError for operands on different devices.
"""

from __future__ import annotations

from hf_neuron_moe.formats.constants import (
    E2M1 as E2M1,
)
from hf_neuron_moe.formats.constants import (
    E4M3FN as E4M3FN,
)
from hf_neuron_moe.formats.constants import (
    E5M2 as E5M2,
)
from hf_neuron_moe.formats.constants import (
    ELEMENT_FORMATS as ELEMENT_FORMATS,
)
from hf_neuron_moe.formats.constants import (
    ElementFormat as ElementFormat,
)
from hf_neuron_moe.formats.constants import (
    ScaleRule as ScaleRule,
)
from hf_neuron_moe.formats.constants import (
    SwizzleScheme as SwizzleScheme,
)
from hf_neuron_moe.formats.e8m0 import e8m0_to_float32 as e8m0_to_float32
from hf_neuron_moe.formats.group_fp8 import (
    group_dequantize_fp8 as group_dequantize_fp8,
)
from hf_neuron_moe.formats.group_fp8 import (
    group_quantize_fp8 as group_quantize_fp8,
)
from hf_neuron_moe.formats.group_fp8 import (
    group_scales as group_scales,
)
from hf_neuron_moe.formats.moe_mx import (
    MoEWeightMX as MoEWeightMX,
)
from hf_neuron_moe.formats.moe_mx import (
    dequantize_moe_down as dequantize_moe_down,
)
from hf_neuron_moe.formats.moe_mx import (
    dequantize_moe_gate_up as dequantize_moe_gate_up,
)
from hf_neuron_moe.formats.moe_mx import (
    moe_bias_from_lanes as moe_bias_from_lanes,
)
from hf_neuron_moe.formats.moe_mx import (
    moe_bias_to_lanes as moe_bias_to_lanes,
)
from hf_neuron_moe.formats.moe_mx import (
    pack_moe_scales as pack_moe_scales,
)
from hf_neuron_moe.formats.moe_mx import (
    padded_intermediate as padded_intermediate,
)
from hf_neuron_moe.formats.moe_mx import (
    quantize_moe_down as quantize_moe_down,
)
from hf_neuron_moe.formats.moe_mx import (
    quantize_moe_gate_up as quantize_moe_gate_up,
)
from hf_neuron_moe.formats.moe_mx import (
    unpack_moe_scales as unpack_moe_scales,
)
from hf_neuron_moe.formats.mx import (
    MXTensor as MXTensor,
)
from hf_neuron_moe.formats.mx import (
    dequantize_mx as dequantize_mx,
)
from hf_neuron_moe.formats.mx import (
    dequantize_mx_natural as dequantize_mx_natural,
)
from hf_neuron_moe.formats.mx import (
    fake_quantize_mx as fake_quantize_mx,
)
from hf_neuron_moe.formats.mx import (
    quantize_mx as quantize_mx,
)
from hf_neuron_moe.formats.mx import (
    quantize_mx_swizzled as quantize_mx_swizzled,
)
from hf_neuron_moe.formats.scales import (
    ScaleLayout as ScaleLayout,
)
from hf_neuron_moe.formats.scales import (
    detect_scale_layout as detect_scale_layout,
)
from hf_neuron_moe.formats.scales import (
    oversized_to_packed as oversized_to_packed,
)
from hf_neuron_moe.formats.scales import (
    packed_to_oversized as packed_to_oversized,
)
from hf_neuron_moe.formats.scales import (
    scale_row_count as scale_row_count,
)
from hf_neuron_moe.formats.scales import (
    scale_rows as scale_rows,
)
from hf_neuron_moe.formats.scales import (
    to_compact as to_compact,
)
from hf_neuron_moe.formats.scales import (
    to_oversized as to_oversized,
)
from hf_neuron_moe.formats.scales import (
    to_packed as to_packed,
)
from hf_neuron_moe.formats.swizzle import (
    k_map as k_map,
)
from hf_neuron_moe.formats.swizzle import (
    pack_x4 as pack_x4,
)
from hf_neuron_moe.formats.swizzle import (
    swizzle as swizzle,
)
from hf_neuron_moe.formats.swizzle import (
    tile_segments as tile_segments,
)
from hf_neuron_moe.formats.swizzle import (
    unpack_x4 as unpack_x4,
)
from hf_neuron_moe.formats.swizzle import (
    unswizzle as unswizzle,
)

__all__ = ["ELEMENT_FORMATS"]  # the rest knows its module
__all__ += [name for name, value in list(globals().items()) if getattr(value, "__module__", "").startswith(__name__)]
