"""Calls written from the pages of nki-library 2.30 bind, by position and by keyword, and give what they document."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_neuron_moe import kernels
from hf_neuron_moe.errors import ConfigError, DTypeError, ShapeError
from hf_neuron_moe.kernels import TensorDescriptor, release_2_30
from hf_neuron_moe.reference.specification import signatures
from tests.kernels import moe_cte_calls
from tests.refusals import refused

DOCUMENTED = signatures("2_30")
COUNTS = {
    "blockwise_mm_bwd": 20,
    "compute_fused_gate_up_down_mxfp8": 19,
    "compute_phase1_down_proj_mm_grad_mxfp8": 17,
    "compute_phase2_hidden_states_grad_mxfp8": 14,
    "compute_phase3_gate_up_weight_grad_mxfp8": 11,
    "compute_phase4_down_weight_grad_mxfp8": 12,
    "fp8_mul_backward": 9,
    "get_config_for_shape": 4,
    "get_program_sharding_info": 1,
    "mlp_backward_mxfp8_base_nki": 34,
    "mlp_backward_mxfp8_nki": 57,
    "mlp_forward_mxfp8_nki": 25,
    "moe_cte": 23,
}
"""Arguments on the page, counted there; of get_config_for_shape in the module."""


def test_every_documented_function_is_here() -> None:
    assert release_2_30.__all__ == ["ShardOption", *sorted(DOCUMENTED)] == ["ShardOption", *sorted(COUNTS)]
    assert {name: len(entry["arguments"]) for name, entry in DOCUMENTED.items()} == COUNTS


def rows_of(*shape: int) -> Tensor:
    return (torch.randn(shape) * 0.1).bfloat16()


def mlp_operands(S: int, H: int, I: int) -> dict[str, Tensor]:  # noqa: E741
    """The tensors of a backward of 2.30 by the page's names, all checkpoints given."""
    x, grad, gate_up, down = rows_of(S, H), rows_of(S, H), rows_of(2 * I, H), rows_of(H, I)
    gate, up = rows_of(S, I), rows_of(S, I)
    act = torch.nn.functional.silu(gate.float()).bfloat16()
    hidden = act * up
    gate_T, up_T = (half.t().contiguous() for half in gate_up.chunk(2))
    return {
        "output_hidden_states_grad": grad,
        "hidden_states": x,
        "gate_proj_weight_T": gate_T,
        "up_proj_weight_T": up_T,
        "down_proj_weight_T": down.t().contiguous(),
        "gate_up_weights": gate_up,
        "d_gate_scratch": torch.zeros(S, I, dtype=torch.bfloat16),
        "d_up_scratch": torch.zeros(S, I, dtype=torch.bfloat16),
        "hidden_states_T": x.t().contiguous(),
        "output_grad_T": grad.t().contiguous(),
        "hidden_T": hidden.t().contiguous(),
        "silu_up_mul_gate_grad_T_scratch": torch.zeros(2 * I, S, dtype=torch.bfloat16),
        **{
            f"{name}_scratch": torch.zeros(S, I, dtype=torch.bfloat16)
            for name in ("gate_pre", "gate_act", "up", "hidden")
        },
        "gate_pre": gate,
        "gate_act": act,
        "up": up,
        "hidden": hidden,
    }


def empty(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


@pytest.mark.parametrize(("S", "H", "I"), [(128, 128, 256), (256, 384, 384), (384, 640, 128)])
def test_phases_and_base_are_the_whole(S: int, H: int, I: int) -> None:  # noqa: E741
    torch.manual_seed(S + H + I)
    given = mlp_operands(S, H, I)
    whole = release_2_30.mlp_backward_mxfp8_nki(*given.values())
    td = {name: TensorDescriptor(tensor) for name, tensor in given.items()}
    made = {"d_gate": (S, I), "d_up": (S, I), "scratch": (2 * I, S), "dx": (S, H), "dw": (2 * I, H), "dwd": (H, I)}
    out = {name: TensorDescriptor(empty(*shape)) for name, shape in made.items()}
    with kernels.record_launches() as launches:
        base = release_2_30.mlp_backward_mxfp8_base_nki(
            td["output_hidden_states_grad"], td["hidden_states"], td["gate_pre"], td["gate_act"], td["up"],
            td["hidden"], td["gate_proj_weight_T"], td["up_proj_weight_T"], td["down_proj_weight_T"], out["d_gate"],
            out["d_up"], td["hidden_states_T"], td["output_grad_T"], td["hidden_T"], out["scratch"], out["dx"],
            out["dw"], out["dwd"],
        )  # fmt: skip
    assert launches[-1].kernel == "mlp_backward_mxfp8_base_nki"  # after its phases
    assert all(torch.equal(one, other) for one, other in zip(base, whole, strict=True))
    assert torch.equal(out["d_gate"].data, given["d_gate_scratch"])
    assert torch.equal(out["d_up"].data, given["d_up_scratch"])
    assert torch.equal(out["scratch"].data, given["silu_up_mul_gate_grad_T_scratch"])

    again = {name: TensorDescriptor(empty(*shape)) for name, shape in made.items()}
    for core in (0, 1):  # each core of two its half, the tiles as the page has them
        release_2_30.compute_phase1_down_proj_mm_grad_mxfp8(
            td["output_hidden_states_grad"], td["gate_pre"], td["gate_act"], td["up"], again["d_gate"], again["d_up"],
            again["scratch"], td["down_proj_weight_T"], core * S // 2, torch.bfloat16, "float8_e4m3fn_x4", 8, 1, 8,
        )  # fmt: skip
        release_2_30.compute_phase2_hidden_states_grad_mxfp8(
            hidden_states_grad_td=again["dx"], gate_weight_td=td["gate_proj_weight_T"],
            up_weight_td=td["up_proj_weight_T"], d_gate_td=out["d_gate"], d_up_td=out["d_up"], s_base=core * S // 2,
            dtype=torch.bfloat16, fp8_x4_dtype="float8_e4m3fn_x4", TILES_IN_BLOCK_K=4,
        )  # fmt: skip
        release_2_30.compute_phase4_down_weight_grad_mxfp8(
            again["dwd"], td["output_grad_T"], td["hidden_T"], core * H // 2, torch.bfloat16, torch.float8_e4m3fn
        )
    release_2_30.compute_phase3_gate_up_weight_grad_mxfp8(
        again["dw"], td["hidden_states_T"], again["scratch"], torch.bfloat16, torch.float8_e4m3fn, 4, 1, 8
    )
    for name, descriptor in out.items():
        assert torch.equal(again[name].data, descriptor.data), name


def base(S: int, H: int, I: int, **changes: object) -> None:  # noqa: E741
    """The base with operands of these sizes, some of them changed."""
    td = {name: TensorDescriptor(tensor) for name, tensor in mlp_operands(S, H, I).items()}
    names = [name for name, *_ in DOCUMENTED["mlp_backward_mxfp8_base_nki"]["arguments"][:18]]
    d_gate, d_up, scratch, dx, dw, dwd = (
        TensorDescriptor(empty(*shape)) for shape in ((S, I), (S, I), (2 * I, S), (S, H), (2 * I, H), (H, I))
    )
    values = (
        td["output_hidden_states_grad"], td["hidden_states"], td["gate_pre"], td["gate_act"], td["up"], td["hidden"],
        td["gate_proj_weight_T"], td["up_proj_weight_T"], td["down_proj_weight_T"], d_gate, d_up,
        td["hidden_states_T"], td["output_grad_T"], td["hidden_T"], scratch, dx, dw, dwd,
    )  # fmt: skip
    release_2_30.mlp_backward_mxfp8_base_nki(**dict(zip(names, values, strict=True)) | changes)


def test_errors_are_about_the_operand_or_option_that_is_wrong() -> None:
    with refused(ConfigError, "execute"):
        base(128, 128, 128, execute="nonsense")
    for name in ("output_grad_td", "down_weight_T_td"):
        with refused(DTypeError, name, where="mlp_backward_mxfp8_base_nki"):
            base(128, 128, 128, **{name: rows_of(128, 128)})
    with refused(ShapeError, "F of output_grad_td"):  # and not about tiles, which fit no axis of 1
        base(1, 128, 128)
    output, grad_T, hidden_T = (TensorDescriptor(rows_of(128, 128)) for _ in range(3))
    phase = release_2_30.compute_phase4_down_weight_grad_mxfp8
    options = (0, torch.bfloat16, torch.float8_e4m3fn)
    with refused(DTypeError, "output_grad_T_td"):
        phase(output, grad_T.data, hidden_T, *options)
    with refused(DTypeError, "hidden_T_td"):
        phase(output, grad_T, hidden_T.data, *options)
    with refused(ShapeError, "F of output_grad_T_td"):
        phase(output, TensorDescriptor(rows_of(1, 128)), TensorDescriptor(rows_of(1, 128)), *options)


def test_phase_1_leaves_the_other_core_alone() -> None:
    given = {name: TensorDescriptor(tensor) for name, tensor in mlp_operands(256, 128, 128).items()}
    d_gate, d_up = (TensorDescriptor(torch.full((256, 128), 7.0).bfloat16()) for _ in range(2))
    release_2_30.compute_phase1_down_proj_mm_grad_mxfp8(
        given["output_hidden_states_grad"], given["gate_pre"], given["gate_act"], given["up"], d_gate, d_up,
        TensorDescriptor(torch.zeros(256, 256).bfloat16()), given["down_proj_weight_T"], 128, torch.bfloat16,
        torch.float8_e4m3fn,
    )  # fmt: skip
    for half in (d_gate, d_up):
        assert half.data is not None and (half.data[:128] == 7).all() and (half.data[128:] != 7).any()


def test_the_moe_forward_is_one_tensor_by_position() -> None:
    names = [name for name, *_ in DOCUMENTED["moe_cte"]["arguments"]]
    given = moe_cte_calls.arguments() | {"activation_function": kernels.ActFnType.SiLU}
    for name in ("hidden_states", "gate_up_proj_weight", "down_proj_weight"):
        given[name] = given[name] * rows_of(*given[name].shape)
    values, swish = [given[name] for name in names[:8]], kernels.ActFnType.Swish
    output = release_2_30.moe_cte(*values, None, None, None, None, None, None, swish)
    assert isinstance(output, Tensor)
    assert torch.equal(output, kernels.moe_cte(**given | {"activation_function": swish}).output)
    assert not torch.equal(output, release_2_30.moe_cte(**given))


@pytest.mark.parametrize("mode", ["POST_SCALE", "PRE_SCALE"])
def test_the_moe_forward_returns_what_it_saves(mode: str) -> None:
    given = moe_cte_calls.arguments() | {"expert_affinities_scaling_mode": kernels.ExpertAffinityScaleMode[mode]}
    given["spec"] = moe_cte_calls.spec(checkpoint_activation=True)
    found, expected = release_2_30.moe_cte(**given), kernels.moe_cte(**given)
    assert isinstance(found, tuple) and torch.equal(found.output, expected.output)
    assert torch.equal(found.gate_up_activations_T, expected.gate_up_activations_T)
    assert torch.equal(found.down_activations, expected.down_activations)


def test_the_pages_usage_examples_of_moe_cte() -> None:
    """As printed there, with sizes that its constraints allow; the output is one tensor."""
    torch.manual_seed(7)
    T, H, I, E = 256, 512, 2048, 8  # noqa: E741
    index, weights = torch.rand(T, E).topk(2).indices, torch.rand(T, 2).softmax(-1).bfloat16()
    plan = kernels.build_block_plan(kernels.expert_mask(index, E), 512, top_k=2)
    hidden_states, gate_up_weights, down_weights = rows_of(T + 1, H), rows_of(E, H, 2, I), rows_of(E, I, H)
    hidden_states[T] = 0
    arguments = {
        "hidden_states": hidden_states,
        "expert_affinities_masked": kernels.masked_affinities(index, weights, E),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "block_size": 512,
        "limits": "documented",
    }
    spec = kernels.MoECTESpec(implementation=kernels.MoECTEImplementation.shard_on_block)
    output = release_2_30.moe_cte(
        **arguments, gate_up_proj_weight=gate_up_weights, down_proj_weight=down_weights, spec=spec
    )
    assert isinstance(output, Tensor) and output.shape == (T + 1, H)

    scales = [gate_up_weights.float().abs().amax() / 240, down_weights.float().abs().amax() / 240]
    quant_cfg = kernels.QuantizationConfig(
        gate_up_proj_scale=scales[0].expand(E, 1, 2 * I), down_proj_scale=scales[1].expand(E, 1, H)
    )
    quantized = release_2_30.moe_cte(
        **arguments,
        gate_up_proj_weight=(gate_up_weights / scales[0]).to(torch.float8_e4m3fn),
        down_proj_weight=(down_weights / scales[1]).to(torch.float8_e4m3fn),
        spec=kernels.MoECTESpec(kernels.MoECTEImplementation.shard_on_i),
        quantization_config=quant_cfg,
    )
    assert (quantized - output).norm() < 0.1 * output.norm()  # what e4m3 leaves of three factors


def test_the_moe_backward_takes_the_pages_order() -> None:
    given = moe_cte_calls.arguments(inner=64)
    blocks, B, I = len(given["block_to_expert"]), given["block_size"], given["down_proj_weight"].shape[1]  # noqa: E741
    operands = {name: given[name] for name in list(given)[:4]}
    operands |= {
        "gate_up_proj_act_checkpoint_T": rows_of(blocks, 2, I, B),
        "down_proj_act_checkpoint": rows_of(blocks, B, given["hidden_states"].shape[1]),
        "token_position_to_id": given["token_position_to_id"],
        "block_to_expert": given["block_to_expert"],
        "output_hidden_states_grad": rows_of(*given["hidden_states"].shape),
        "block_size": B,
    }
    limits = kernels.ClampLimits(0.125, -0.125, 0.125, -0.125)
    options = (None, torch.bfloat16, True, release_2_30.ShardOption.AUTO)
    options += (kernels.AffinityOption.AFFINITY_ON_H, kernels.KernelTypeOption.DROPLESS, limits)  # type: ignore[assignment]
    found = release_2_30.blockwise_mm_bwd(*operands.values(), *options)
    expected = kernels.blockwise_mm_bwd(**operands, clamp_limits=limits)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for option in ("SHARD_ON_HIDDEN", "SHARD_ON_INTERMEDIATE"):  # says how the cores divide the work
        divided = {**operands, "clamp_limits": limits, "shard_option": release_2_30.ShardOption[option]}
        assert torch.equal(release_2_30.blockwise_mm_bwd(**divided)[2], found[2])
    plain = kernels.blockwise_mm_bwd(**operands)
    assert not torch.equal(found[2], plain.gate_up_proj_weight_grad)


def test_get_config_for_shape_is_the_backwards_here_and_the_forwards_later() -> None:
    shape = (4096, 4096, 3072)
    assert release_2_30.get_config_for_shape(*shape) == kernels.get_backward_config_for_shape(*shape)
    assert kernels.get_config_for_shape(*shape) == kernels.get_forward_config_for_shape(*shape)
    for function, where in (
        (kernels.get_config_for_shape, "get_forward_config_for_shape"),
        (release_2_30.get_config_for_shape, "get_backward_config_for_shape"),
    ):
        with refused(ConfigError, "lnc", where=where):
            function(*shape, lnc=3)
        assert where in kernels.__all__  # what a message names can be imported


def test_the_rest_is_that_of_later_releases() -> None:
    assert release_2_30.MoECTESpec is kernels.MoECTESpec and release_2_30.router_topk is kernels.router_topk
    assert release_2_30.ShardOption is not kernels.ShardOption
    with pytest.raises(AttributeError, match="has no attribute 'moe_tkg'"):
        release_2_30.moe_tkg  # noqa: B018


def test_this_packages_arguments_are_taken_by_keyword() -> None:
    given = moe_cte_calls.arguments()
    assert torch.equal(release_2_30.moe_cte(**given, execute="tiles"), release_2_30.moe_cte(**given))
    operands = mlp_operands(128, 128, 128)
    fast, tiles = (release_2_30.mlp_backward_mxfp8_nki(**operands, execute=way) for way in ("fast", "tiles"))
    for one, other in zip(fast, tiles):
        assert (one.float() - other.float()).abs().max() <= 2**-7 * one.float().abs().max(), "the order of fp32 sums"
    with refused(ConfigError, "execute", got="'slow'"):
        release_2_30.mlp_backward_mxfp8_nki(**operands, execute="slow")


def test_wrong_calls_name_the_function_and_the_argument() -> None:
    given = {name: TensorDescriptor(tensor) for name, tensor in mlp_operands(128, 128, 128).items()}
    arguments = {
        "output_grad_td": given["output_hidden_states_grad"],
        "gate_pre_td": given["gate_pre"],
        "gate_act_td": given["gate_act"],
        "up_td": given["up"],
        "d_gate_td": TensorDescriptor(empty(128, 128)),
        "d_up_td": TensorDescriptor(empty(128, 128)),
        "scratch_td": TensorDescriptor(empty(256, 128)),
        "down_weight_td": given["down_proj_weight_T"],
        "s_base": 0,
        "dtype": torch.bfloat16,
        "fp8_x4_dtype": "float8_e4m3fn_x4",
        "run_with_lnc2": False,
    }
    phase1 = release_2_30.compute_phase1_down_proj_mm_grad_mxfp8
    where = "compute_phase1_down_proj_mm_grad_mxfp8"
    with refused(ShapeError, "d_up_td", where=where):
        phase1(**arguments | {"d_up_td": TensorDescriptor(empty(128, 256))})
    with refused(DTypeError, "d_gate_td", where=where):
        phase1(**arguments | {"d_gate_td": TensorDescriptor(torch.zeros(128, 128))})
    with refused(ConfigError, "TILES_IN_BLOCK_M", got="0", where=where):
        phase1(**arguments | {"TILES_IN_BLOCK_M": 0})
    with pytest.raises(
        TypeError, match=r"compute_phase1_down_proj_mm_grad_mxfp8\(\) missing required arguments: 'gate_"
    ):
        phase1(given["output_hidden_states_grad"])
    with pytest.raises(TypeError, match=r"moe_cte\(\) got an unexpected keyword argument 'gate_up_in_scale'"):
        release_2_30.moe_cte(**moe_cte_calls.arguments(), gate_up_in_scale=None)  # came with a later release
