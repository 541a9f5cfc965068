"""Models of `transformers`, there and back: equal logits, equal bits, and a sentence for what it cannot say."""

from __future__ import annotations

import builtins
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_recipe import command

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.weights.exchange import Comparison, compare_logits, export_to_hf, import_from_hf
from lit_stable.weights.families import FAMILIES
from lit_stable.weights.family_names import from_family, to_family
from lit_stable.weights.hf_folder import read_folder
from lit_stable.weights.stored_model import build_model, open_model, write_weights

SIZES: dict[str, Any] = {"vocab_size": 53, "n_layer": 2, "n_head": 4, "d_model": 32, "max_length": 24}
LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied": False}
BLOOM: dict[str, Any] = {"position": "alibi", "embed_norm": True, "mlp": "gelu_tanh", "bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"bias": True, "mlp": "gelu_tanh"},
    "gpt2 without biases, untied": {"tied": False, "mlp": "gelu", "d_ff": 80},
    "gpt2 by layer": {"bias": True, "qk_layer_scaling": "hf_inverse_layer", "norm_eps": 1e-3},
    "gpt2 scaled before": {"bias": True, "attention_scale": "pre_sqrt", "qk_layer_scaling": "megatron"},
    "opt": {"bias": True, "mlp": "relu"},
    "opt without biases": {"mlp": "relu", "tied": False},
    "bloom": BLOOM,
    "bloom of six heads": {**BLOOM, "n_head": 6, "d_model": 48, "bias": False},
    "llama": LLAMA,
    "llama of groups": {**LLAMA, "n_kv_head": 2, "tied": True, "bias": True, "rope_theta": 500.0, "d_ff": 48},
    "llama about zero": {**LLAMA, "norm_gain": "zero_centred"},
}


def stored(path: Path, seed: int = 0, **options: Any) -> GPTConfig:
    """A checkpoint with every weight at random, gains and biases too: one at its start would hide a wrong place."""
    config = GPTConfig(**{**SIZES, **options})
    generator = torch.Generator().manual_seed(seed)
    names = [(name, tuple(p.shape)) for name, p in GPT(config).named_parameters()]
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in names}
    about_one = config.norm_gain == "one"
    for name, weight in weights.items():
        if "norm" in name and name.endswith("weight") and about_one:
            weight += 1
    write_weights(path, config, weights)
    return config


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_in_transformers_and_bits_after_the_way_back(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    config = stored(tmp_path / "a.ckpt", **MODELS[name])
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    there, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(there).__name__.lower().startswith(name.split()[0])
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    ids = torch.randint(53, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own, other = build_model(open_model(tmp_path / "a.ckpt"))(ids), there.eval()(ids).logits
    assert own.std() > 0.3
    torch.testing.assert_close(other, own, rtol=1e-5, atol=1e-5)
    import_from_hf(tmp_path / "hf", tmp_path / "back.ckpt")
    before, after = open_model(tmp_path / "a.ckpt"), open_model(tmp_path / "back.ckpt")
    assert before.names() == after.names() or sorted(before.names()) == sorted(after.names())
    zero_centred = config.norm_gain == "zero_centred"
    for weight in before.names():
        offset = 1.0 if zero_centred and "norm" in weight else 0.0
        assert torch.equal(after.read(weight), before.read(weight) + offset)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "llama of groups"])
def test_what_transformers_saves_is_read_without_our_record(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    stored(tmp_path / "a.ckpt", **MODELS[name])
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    del settings["lit_stable"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "again")
    import_from_hf(tmp_path / "again", tmp_path / "back.ckpt")
    ids = torch.arange(24)[None]
    own, back = (build_model(open_model(tmp_path / f"{x}.ckpt"))(ids) for x in ("a", "back"))
    assert torch.equal(own, back)


def test_names_and_layout_by_hand_without_transformers(tmp_path):
    config = stored(tmp_path / "a.ckpt", bias=True)
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    settings, tensors = read_folder(tmp_path / "hf")
    model = open_model(tmp_path / "a.ckpt")
    assert settings["architectures"] == ["GPT2LMHeadModel"]
    assert (settings["n_inner"], settings["activation_function"]) == (128, "gelu")
    fused, bias = model.read("blocks.1.attention.qkv.weight"), model.read("blocks.1.attention.qkv.bias")
    for head in range(4):
        for part in range(3):  # queries, keys, values
            here = slice((3 * head + part) * 8, (3 * head + part + 1) * 8)
            there = slice(part * 32 + head * 8, part * 32 + (head + 1) * 8)
            assert torch.equal(tensors["transformer.h.1.attn.c_attn.weight"][:, there], fused[here].T)
            assert torch.equal(tensors["transformer.h.1.attn.c_attn.bias"][there], bias[here])
    assert torch.equal(tensors["transformer.h.0.mlp.c_fc.weight"], model.read("blocks.0.mlp.up.weight").T)
    assert "lm_head.weight" not in tensors
    stored(tmp_path / "opt.ckpt", mlp="relu")
    export_to_hf(tmp_path / "opt.ckpt", tmp_path / "opt")
    _, tensors = read_folder(tmp_path / "opt")
    table = tensors["model.decoder.embed_positions.weight"]
    assert table.shape == (26, 32)
    assert not table[:2].any()
    assert torch.equal(table[2:], open_model(tmp_path / "opt.ckpt").read("wpe.weight"))
    assert config.hidden == 128


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_setting_that_is_left_out_is_that_of_transformers(kind):
    transformers = pytest.importorskip("transformers")
    options = FAMILIES[kind].options
    there = options(transformers.AutoConfig.for_model(kind).to_dict())
    assert there.items() - options({"model_type": kind}).items() <= {("n_kv_head", 32)}  # of Llama: as many as heads


def test_a_tied_head_that_is_written_all_the_same_is_the_embedding():
    config = GPTConfig(**SIZES)
    weights = {name: torch.randn(p.shape) for name, p in GPT(config).named_parameters()}
    tensors = to_family(weights, FAMILIES["gpt2"], config)
    found = from_family({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}, FAMILIES["gpt2"], config)
    assert found.keys() == weights.keys()


def test_without_safetensors_torch_writes_the_weights(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("safetensors", "transformers")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    stored(tmp_path / "a.ckpt", bias=True)
    monkeypatch.setattr(builtins, "__import__", without)
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    assert (tmp_path / "hf" / "pytorch_model.bin").is_file()
    import_from_hf(tmp_path / "hf", tmp_path / "back.ckpt")
    for name, weight in open_model(tmp_path / "back.ckpt").weights().items():
        assert torch.equal(weight, open_model(tmp_path / "a.ckpt").read(name))
    with pytest.raises(ValueError, match=r"compare=True: is done with transformers; pip install 'lit-stable\[hf\]'"):
        compare_logits(tmp_path / "a.ckpt", tmp_path / "hf")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"qk_norm": "rmsnorm"},
            r"qk_norm=rmsnorm: has no counterpart in GPT2LMHeadModel of transformers, which is none",
        ),
        ({"embed_norm": True}, r"embed_norm=True: has no counterpart in GPT2LMHeadModel"),
        ({"position": "alibi", "mlp": "gelu_tanh"}, r"embed_norm=False: has no counterpart in BloomForCausalLM"),
        ({**BLOOM, "d_ff": 100}, r"d_ff=100: has no counterpart in BloomForCausalLM .* 4 x d_model = 128"),
        (
            {**LLAMA, "mlp": "gelu"},
            r"mlp=gelu: has no counterpart in LlamaForCausalLM of transformers, which is swiglu",
        ),
        ({"mlp": "relu", "norm_eps": 1e-6}, r"norm_eps=1e-06: has no counterpart in OPTForCausalLM"),
        ({"logit_soft_cap": 30.0}, r"logit_soft_cap=30.0: has no counterpart"),
        ({"attention_soft_cap": 30.0}, r"attention_soft_cap=30.0: has no counterpart"),
        ({"embed_scale": "sqrt_d"}, r"embed_scale=sqrt_d: has no counterpart"),
        ({"n_kv_head": 2}, r"n_kv_head=2: has no counterpart"),
        ({"norm_position": "sandwich"}, r"norm_position=sandwich: has no counterpart"),
        ({"mlp": "relu", "qk_layer_scaling": "hf_inverse_layer"}, r"qk_layer_scaling=hf_inverse_layer: has no"),
    ],
)
def test_an_option_without_a_counterpart_is_named(tmp_path, options, text):
    stored(tmp_path / "a.ckpt", **options)
    with pytest.raises(ValueError, match=text):
        export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_type": "mamba"}, "model_type=mamba: is none of gpt2, opt, bloom, llama"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False: has no counterpart here, where it is True"),
        ({"activation_function": "swish"}, "activation_function=swish: has no counterpart here"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ({"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 16}, "word_embed_proj_dim=16"),
        (
            {"model_type": "llama", "num_attention_heads": 4, "rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters.rope_type=llama3",
        ),
        ({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16}, "head_dim=16: must be"),
        ({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 5}, "head_dim=6.4: must be a whole number"),
        ({"model_type": "llama", "head_dim": 64}, "head_dim=64: must be a whole number, hidden_size=4096 / 32 heads"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act=gelu: has no counterpart here, where it is silu"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling={'rope_type'"),
        ({"add_cross_attention": True}, "add_cross_attention=True: has no counterpart here, where it is False"),
        ({"model_type": "opt", "_remove_final_layer_norm": True}, "_remove_final_layer_norm=True: has no"),
        ({"model_type": "opt", "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine=False: has no"),
        ({"model_type": None}, "model_type=None: is none of gpt2, opt, bloom, llama"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
        ({"n_layer": 1}, "transformer.h.1.* is no weight|h.1.* is no weight"),
        ({"n_layer": 3}, "h.2.ln_1.weight: is missing"),
        ({"n_layer": 10_000}, "config.json: describes 10000 layers, and there are"),
        ({"n_layer": None}, "config.json: describes no model that there can be"),
        ({"n_embd": "x"}, "config.json: describes no model that there can be"),
        (
            {"vocab_size": 100},
            r"hf: wte.weight has shape \(\d+, 32\) among its weights and \(100, 32\) by its",
        ),
        (
            {"n_positions": 16},
            r"hf: wpe.weight has shape \(\d+, 32\) among its weights and \(16, 32\) by its",
        ),
        ({"n_inner": 64}, r"hf: blocks.0.mlp.up.weight has shape \(128, 32\) among its weights and \(64, 32\) by its"),
        ({"n_embd": 64}, r"hf: its weights have not the shapes that config.json says|hf: wte.weight has shape"),
        ({"n_embd": 64, "n_head": 64}, r"hf: its weights have not the shapes that config.json says|has shape"),
        ({"lit_stable": "x"}, "config.json: lit_stable='x': must be a mapping, as export writes it; take it out"),
        ({"lit_stable": {"novelty": 1}}, "config.json: lit_stable.novelty: is no option of a model here; upgrade"),
    ],
)
def test_a_setting_without_a_counterpart_is_named(tmp_path, settings, text):
    stored(tmp_path / "a.ckpt", bias=True)
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(ValueError, match=text):
        import_from_hf(tmp_path / "hf", tmp_path / "back.ckpt")
    assert not list(tmp_path.glob("back.*"))


def test_a_bias_that_was_trained_there_is_kept(tmp_path):
    stored(tmp_path / "a.ckpt")
    export_to_hf(tmp_path / "a.ckpt", tmp_path / "hf")
    from lit_stable.weights.hf_folder import _write_tensors

    _, tensors = read_folder(tmp_path / "hf")
    tensors["transformer.h.0.mlp.c_fc.bias"] = torch.full((128,), 0.5)
    _write_tensors(tmp_path / "hf", tensors)
    import_from_hf(tmp_path / "hf", tmp_path / "back.ckpt")
    back = open_model(tmp_path / "back.ckpt")
    assert back.config.bias
    assert back.read("blocks.0.mlp.up.bias").tolist() == [0.5] * 128
    assert not back.read("blocks.1.mlp.up.bias").any()


@pytest.mark.parametrize(
    ("largest", "of", "equal"),
    [(0.9e-5, 0.1, True), (1.1e-5, 0.1, False), (0.9e-4, 10.0, True), (math.nan, 1.0, False)],
)
def test_logits_are_equal_to_1e_5_of_the_largest(largest, of, equal):
    assert Comparison(largest, of).equal == equal


def test_the_commands_with_tokenizer_and_recipe(run, recipe, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    done = command("export", f"{run}@4", "--to", "hf", "--out", tmp_path / "hf", "--compare")
    assert done.code == 0, done.err
    assert "GPT2LMHeadModel" in done.out
    assert "biases: the model has none and this architecture does; they are zeros." in done.out
    assert "logits: differ by" in done.out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("the of").input_ids == list(b"the of")
    assert tokenizer.eos_token_id == 256
    monkeypatch.setattr("lit_stable.weights.exchange.compare_logits", lambda *paths: Comparison(1.1e-4, 10.0))
    other = command("export", run, "--to", "hf", "--out", tmp_path / "other", "--compare")
    assert (other.code, "differ by 0.00011 at most; the largest is 10\n" in other.out) == (1, True)
    assert f"{tmp_path / 'other'}: is not the same model" in other.out
    again = command("export", run, "--to", "hf", "--out", tmp_path / "hf")
    assert (again.code, "exists already" in again.err) == (2, True)
    back = command("import", tmp_path / "hf", "--out", tmp_path / "back.ckpt")
    assert back.code == 0, back.err
    said = yaml.safe_load((tmp_path / "back.yaml").read_text())["model"]["gpt"]
    assert said["d_model"] == 16
    words = ("--config", tmp_path / "back.yaml", "--ckpt_path")
    losses = [
        next(line for line in command("validate", "--config", recipe, *words, path).out.splitlines() if "loss" in line)
        for path in (run / "checkpoints" / "step-00000004.ckpt", tmp_path / "back.ckpt")
    ]
    assert losses[0] == losses[1]
    missing = command("import", tmp_path, "--out", tmp_path / "none.ckpt")
    assert (missing.code, "holds no config.json" in missing.err) == (2, True)
