"""Tiny random hybrid models: attention in some layers and states in others, or both in one; most sizes are prime."""

from __future__ import annotations

from typing import Any

from hf_models import _IDS, VOCAB, Row

_LM: dict[str, Any] = _IDS | dict(vocab_size=VOCAB, max_position_embeddings=64, num_attention_heads=4)
_LINEAR, _FULL = "linear_attention", "full_attention"
_DELTA: dict[str, Any] = dict(
    linear_conv_kernel_dim=3,
    linear_key_head_dim=5,
    linear_value_head_dim=7,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
_MAMBA: dict[str, Any] = dict(
    mamba_d_state=5, mamba_d_conv=3, mamba_n_heads=2, mamba_d_head="auto", mamba_expand=1, mamba_n_groups=1
)
_EXPERTS: dict[str, Any] = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=11)
_MIXED: dict[str, Any] = _LM | dict(
    hidden_size=24,
    intermediate_size=17,
    num_hidden_layers=3,
    num_key_value_heads=2,
    layer_types=[_LINEAR, _FULL, _LINEAR],
)
_HEADS: dict[str, Any] = _MIXED | dict(head_dim=6)


def _row(name: str, model: str, config: str, **sizes: Any) -> Row:
    return Row(name, model, config, 1, sizes=sizes)


HYBRIDS: tuple[Row, ...] = (
    _row("Qwen3.5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **_HEADS | _DELTA),
    _row(
        "Qwen3.5 MoE",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        **{k: v for k, v in (_HEADS | _DELTA | _EXPERTS).items() if k != "intermediate_size"},
        shared_expert_intermediate_size=13,
    ),
    _row(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **_HEADS | _DELTA | _EXPERTS,
        shared_expert_intermediate_size=13,
    ),
    _row("OLMo hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig", **_MIXED | _DELTA),
    _row("LFM2", "Lfm2ForCausalLM", "Lfm2Config", **_MIXED | dict(layer_types=["conv", _FULL, "conv"], conv_L_cache=3)),
    _row(
        "LFM2 MoE",
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        **_MIXED | _EXPERTS | dict(layer_types=["conv", _FULL, "conv"], conv_L_cache=3, num_dense_layers=1),
    ),
    _row(
        "Granite 4",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        **_MIXED | _MAMBA,
        num_local_experts=3,
        num_experts_per_tok=2,
        shared_intermediate_size=13,
        position_embedding_type="rope",
    ),
    _row(
        "Nemotron-H",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        **{k: v for k, v in _HEADS.items() if k not in ("num_hidden_layers", "layer_types")},
        layers_block_type=[_LINEAR, "moe", _FULL, "mlp"],
        mamba_num_heads=2,
        mamba_head_dim=7,
        ssm_state_size=5,
        n_groups=1,
        conv_kernel=3,
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=11,
        moe_shared_expert_intermediate_size=13,
    ),
    _row(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        "FalconH1Config",
        **{k: v for k, v in _HEADS.items() if k != "layer_types"} | _MAMBA | dict(mamba_d_ssm=26, mamba_d_head=13),
    ),
    _row(
        "Bamba",
        "BambaForCausalLM",
        "BambaConfig",
        **{k: v for k, v in _MIXED.items() if k != "layer_types"} | _MAMBA,
        attn_layer_indices=[1],
    ),
    _row(
        "Jamba",
        "JambaForCausalLM",
        "JambaConfig",
        **{k: v for k, v in _MIXED.items() if k != "layer_types"},
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=3,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=5,
        mamba_d_conv=3,
        mamba_expand=1,
        mamba_dt_rank=3,
        use_mamba_kernels=False,
    ),
    _row(
        "Zamba2",
        "Zamba2ForCausalLM",
        "Zamba2Config",
        **_LM | dict(hidden_size=28, intermediate_size=17, num_hidden_layers=3, num_key_value_heads=4),
        layers_block_type=[_LINEAR, "hybrid", _LINEAR],
        mamba_d_state=5,
        mamba_d_conv=3,
        mamba_expand=1,
        mamba_headdim=14,
        mamba_ngroups=1,
        n_mamba_heads=2,
        num_mem_blocks=1,
        use_mamba_kernels=False,
    ),
    _row(
        "Kimi Linear",
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        **_MIXED | dict(num_key_value_heads=4, num_local_experts=3, num_experts_per_tok=2, moe_intermediate_size=11),
        kv_lora_rank=7,
        qk_rope_head_dim=4,
        qk_nope_head_dim=3,
        v_head_dim=5,
        linear_head_dim=5,
        linear_num_heads=3,
        linear_conv_kernel_dim=3,
    ),
)
HYBRID_NAMES = [row.name for row in HYBRIDS]
