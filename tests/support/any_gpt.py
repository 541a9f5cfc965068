"""Any legal combination of model options at a tiny size, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

VOCAB, LENGTH = 64, 16
_MATRICES = ("wte.weight", "blocks.*", "blocks.0.mlp.*", "*.attention.out.weight")


@st.composite
def any_options(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a `GPTConfig` with every option drawn, the combinations that are refused left out."""
    choices: dict[str, list[Any]] = {
        "n_layer": [1, 2],
        "d_ff": [None, 20],
        "norm": ["layernorm", "rmsnorm"],
        "norm_position": ["pre", "post_sublayer", "sandwich", "normformer"],
        "norm_gain": ["one", "zero_centred"],
        "mlp": ["gelu", "gelu_tanh", "relu", "swiglu"],
        "position": ["learned", "rope", "alibi"],
        "n_kv_head": [None, 1, 2],
        "qk_norm": ["none", "layernorm", "rmsnorm", "l2"],
        "qk_l2_scale": ["learned", 8.0],
        "attention_scale": ["post", "pre_sqrt"],
        "qk_layer_scaling": ["none", "megatron", "hf_inverse_layer"],
        "attention_soft_cap": [None, 30.0],
        "attention_kernel": ["auto", "explicit"],
        "document_mask": [False, True],
        "reset_positions": [False, True],
        "embed_norm": [False, True],
        "stable_embedding": [False, True],
        "embed_scale": [1.0, "sqrt_d", 3.0],
        "embed_grad_shrink": [None, 0.5, [(1, 0.1), (3, 1.0)]],
        "tied": [True, False],
        "head_fp32": [False, True],
        "logit_soft_cap": [None, 30.0],
        "residual_fp32": [False, True],
        "bias": [False, True],
        "dropout": [0.0, 0.1],
        "embed_dropout": [None, 0.0],
        "attention_dropout": [None, 0.0],
        "residual_dropout": [None, 0.2],
        "init_std": [0.02, "small_init", "mtnlg"],
        "residual_rescale": [True, False],
    }
    options = {name: draw(st.sampled_from(values), label=name) for name, values in choices.items()}
    laws = st.sampled_from([0.05, "small_init", "mtnlg", "xavier"])
    options["init_overrides"] = draw(st.dictionaries(st.sampled_from(_MATRICES), laws, max_size=2))
    _make_legal(options)
    return {"vocab_size": VOCAB, "n_head": 4, "d_model": 32, "max_length": LENGTH, **options}


def _make_legal(options: dict[str, Any]) -> None:
    if options["norm"] == "rmsnorm":
        options["stable_embedding"] = False
    if options["embed_norm"] or options["stable_embedding"]:
        options["embed_scale"] = 1.0
    if options["qk_norm"] == "l2":
        options["attention_scale"] = "post"
    if options["position"] != "learned" or not options["document_mask"]:
        options["reset_positions"] = False
    if options["document_mask"]:
        options["document_separator"] = 0  # data that name none
    if options["position"] == "learned" and not options["bias"]:
        options["init_overrides"] = {**options["init_overrides"], "wpe.weight": "sinusoidal"}
