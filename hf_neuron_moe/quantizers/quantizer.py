"""transformers' view of a converted checkpoint: which modules take its tensors, and what the loaded model can do."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.base import HfQuantizer

from hf_neuron_moe.errors import UnsupportedModelError, public
from hf_neuron_moe.quantizers.quantization_config import ONE_DEVICE, NeuronMoEQuantizationConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_neuron_moe.quantizers.placeholders import Placement


_BACKWARD_OPERANDS = r"(up|down)_proj(\.weight)?_T(_scale)?(\.[te]p\d+)?$"
"""Transposed operands of a conversion for training: the device's own backward reads them, this one does not."""


class NeuronMoEQuantizer(HfQuantizer):
    """Loads bf16 layouts as a patched, trainable model, MX as one with frozen blocks that compute with the codes."""

    requires_calibration = False
    quantization_config: NeuronMoEQuantizationConfig

    def __init__(self, quantization_config: NeuronMoEQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.placement: Placement | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # wanted for the model's parameters, before they are filled

    @public("from_pretrained")
    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise where transformers is to quantize while loading."""
        if not self.pre_quantized:
            convert = "`hf-neuron-moe convert SRC DST`"
            fix = f"Load the model without it and call patch_model, or convert the checkpoint first: {convert}."
            expected, got = "left out for a checkpoint that is not converted", type(self.quantization_config).__name__
            raise UnsupportedModelError.about("quantization_config", expected, got, fix)

    @public("from_pretrained")
    def update_device_map(self, device_map: object) -> Any:
        """Raise for places that the blocks cannot be in."""
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or (self.quantization_config.dequantize and len(places) > 1):
            expected = "one device, or several for an MX base, and no disk offload"
            raise UnsupportedModelError.about("device_map", expected, ", ".join(sorted(places)), ONE_DEVICE)
        return device_map

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the checkpoint's index to transformers, which hands the configuration round before it looks for files.

        Its own name keeps transformers without this package from loading the tensors as if they were in its layouts.
        """
        from hf_neuron_moe.convert.manifest import INDEX_OUT
        from hf_neuron_moe.quantizers.shard_layouts import check_folder

        folder = Path(getattr(config, "name_or_path", "") or "")
        if (folder / INDEX_OUT).is_file():
            check_folder(folder)
        config.transformers_weights = INDEX_OUT
        return config

    def update_tp_plan(self, config: object) -> Any:
        """Do the same where transformers (before 5.23) has no other hook that sees the configuration."""
        return self.update_attn_implementation(config)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Cast bf16 and wider tensors as transformers does; leave codes, words and scales alone."""
        kind = param.get_dtype() if hasattr(param, "get_dtype") else str(param.dtype)
        return dtype if kind in ("BF16", "F16", "F32", "F64") else None

    @public("from_pretrained")
    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from hf_neuron_moe.modules.engine import sizes_asked
        from hf_neuron_moe.patching.ranks import OneAnswer
        from hf_neuron_moe.quantizers.placeholders import place
        from hf_neuron_moe.quantizers.shard_layouts import FORWARD, read_stored

        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        with OneAnswer() if sizes_asked(model) else nullcontext(dict[str, str]()) as facts:
            stored = read_stored(kwargs.get("checkpoint_files") or [])
            self.placement = place(model, stored)
            facts |= {f"stored form of {name}": repr(tensor.facts) for name, tensor in stored.items()}
        if any(tensor.orientation != FORWARD for tensor in stored.values()):
            ignored.add(_BACKWARD_OPERANDS)
        # What is read without transformers, and is no key of the model while it loads.
        readings: list[Any] = [*self.placement.readings, *self.placement.codes]
        own = {part.name for each in readings for whole in each.stored.values() for part in whole.all}
        ignored |= {f"^{re.escape(name)}$" for name in own}
        model._keys_to_ignore_on_load_unexpected = ignored
        if not hasattr(HfQuantizer, "get_new_dtype"):
            self._dtypes = _wanted_dtypes(model)

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Cut dense layers as the blocks take them, where the model's own plan cuts a fused one across its halves."""
        assert self.placement is not None
        for reading in self.placement.readings:
            plan |= {name: style for name, style in reading.rules.items() if name in plan}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Leave out the converters that would take converted tensors for source ones of the same name.

        What the renamings move elsewhere, as source names that lack a prefix, is moved back.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        names = self.placement.names if self.placement is not None else set()
        homes = self.placement.homes if self.placement is not None else {}

        def takes(converter: WeightConverter) -> bool:
            return any(rename_source_key(name, [], [converter])[1] is not None for name in names)

        left = [item for item in weight_conversions if not (isinstance(item, WeightConverter) and takes(item))]
        renamings = [item for item in left if isinstance(item, WeightRenaming)]
        for stored, home in homes.items():
            moved = rename_source_key(stored, renamings, [])[0]
            if moved not in (stored, home):
                left.append(WeightRenaming(f"^{re.escape(moved)}$", home))
        return left

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from hf_neuron_moe.quantizers.post_load import finish, parts_with_codes

        assert self.placement is not None
        self._cast_renamed(model)
        finish(model, self.placement, self.quantization_config)
        for part in parts_with_codes(model):  # transformers asks the quantizer of the whole model only
            part.__dict__["save_pretrained"] = self._refuse_saving
        return model

    def _refuse_saving(self, *args: object, **kwargs: object) -> None:
        self.is_serializable()

    def _cast_renamed(self, model: PreTrainedModel) -> None:
        """Cast what older transformers leaves in its file's dtype where it is renamed, such as Mixtral's routers."""
        own = {"torch.bfloat16", "torch.float16", "torch.float32", "torch.float64"}
        for name, param in model.named_parameters():
            dtype = self._dtypes.get(name, param.dtype)
            if param.dtype != dtype and str(param.dtype) in own:
                param.data = param.data.to(dtype)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Do it in the dtype of the other parameters; config.dtype is that of loading, and model.to leaves it."""
        self._asked_dtype = model.dtype if dtype is None else dtype
        whole: PreTrainedModel = super().dequantize(model)
        return whole

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Give the model float weights, for ``model.dequantize()``; it is an ordinary one afterwards."""
        from hf_neuron_moe.quantizers.post_load import dequantize

        assert self.placement is not None
        dequantize(model, self.placement, self._asked_dtype)
        return model

    @public("save_pretrained")
    def is_serializable(self) -> bool:
        """Raise at ``save_pretrained`` of MX weights: they never change, and their folder exists."""
        fix = (
            "Save its adapters (PeftModel.save_pretrained) and keep the folder it was loaded from; "
            "`hf-neuron-moe export FOLDER NEW --allow-inexact`, or model.dequantize() before saving, makes an ordinary "
            "checkpoint of its values."
        )
        raise UnsupportedModelError.about("model", "one with weights of its own", "a frozen MX base", fix)

    @property
    def is_trainable(self) -> bool:
        """Adapters on top of the frozen weights can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The frozen blocks are ``torch.library`` operators."""
        return True


def _wanted_dtypes(model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the dtype in which transformers loads each parameter: some stay in fp32 whatever is asked for."""
    import torch
    from transformers.core_model_loading import build_glob_alternation

    wanted = {name: param.dtype for name, param in model.named_parameters()}
    dtype = model.config.dtype
    plan = model._get_dtype_plan(dtype) if isinstance(dtype, torch.dtype) else {}
    if plan:
        pattern, globs, _ = build_glob_alternation(list(plan))
        wanted |= {name: plan[globs[str(found.lastgroup)]] for name in wanted if (found := pattern.search(name))}
    return wanted
