"""What the documents say of each run: recipe -> row -> key of the resolved recipe -> value.

Written from the documents' rows (B: BloombergGPT, O: OPT, C, N, E: tr8b-104B and tr8-104B, L: lessons learned, V: the
Hugging Face VLM), never from the recipes. Rows in small letters are no row: `base` is the run's list of
settings, `original` what scripts and papers say where rows do not, `ours` what is not published at all.
"""

from __future__ import annotations

from typing import Any

RowValues = dict[str, dict[str, Any]]

GPT, SCHEDULE, OPTIMIZER = "model.gpt.", "model.schedule.", "model.optimizer."
CLIP, RAMP, OVERRIDE = "stability.grad_clip.", "stability.batch_size_warmup.ramp", "stability.lr_override."
RESET, SKIP = "stability.optimizer_reset.", "stability.grad_spike_skip."
HOLD = {SKIP + "z_score": None, SKIP + "schedule_on_skip": "hold"}
KEEP = {"checkpoints.keep_last": 1000}


def shape(layers: int, heads: int, width: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_head": heads, "d_model": width, "vocab_size": vocabulary, **more}
    return {GPT + name: value for name, value in sizes.items()}


def rates(peak: float, floor: float, warmup: int, horizon: int | str, unit: str) -> dict[str, Any]:
    values = {"peak": peak, "floor": floor, "warmup": warmup, "horizon": horizon, "unit": unit}
    return {SCHEDULE + name: value for name, value in values.items()}


def adam(beta2: float, decay: float, eps: float | None = None) -> dict[str, Any]:
    values = {"betas": [0.9, beta2], "weight_decay": decay, **({} if eps is None else {"eps": eps})}
    return {OPTIMIZER + name: value for name, value in values.items()}


def source(name: str, path: str, weight: float = 1.0) -> dict[str, Any]:
    return {f"data.sources.{name}.path": path, f"data.sources.{name}.weight": weight}


# -- tr8-104B ---------------------------------------------------------------------------------------------------------

SCALE_OF_104B = {"loss_scale.init": 4096, "loss_scale.window": 500, "loss_scale.hysteresis": 2, "loss_scale.floor": 1.0}
TR8: dict[str, RowValues] = {
    "tr8/exp01": {
        "base": {
            **shape(32, 32, 16384, 50257, d_ff=20480, max_length=2048, init_std=0.02),
            **rates(6e-5, 6e-6, 216_320, 126_953_125, "samples"),
            **adam(0.999, 0.1, 1e-8),
            **SCALE_OF_104B,
            CLIP + "max_norm": 1.0,
            RAMP: "16 16 6_000_000",
            "data.sequence_length": 2048,
            "data.global_batch": 2048,
            "data.sources.oscar_en.path": "oscar_en",
            "trainer.precision": "16-mixed",
            "checkpoints.every_steps": 300,
            "published.parameters": "56.7B",
        },
        "E10": {"model.seed_init": 42, "data.seed_data": 42},
        "E11": {"checkpoints.first_step": 6210},
        "N14": HOLD,
        "B28": {GPT + "qk_layer_scaling": "megatron"},
        "original": {
            GPT + "mlp": "gelu_tanh",
            GPT + "bias": True,
            GPT + "dropout": 0.1,
            "model.recompute": True,
            "data.micro_batch": 1,
            "trainer.max_steps": 159_576,
            "validate_every": 1000,
        },
        "ours": {"trainer.strategy": "fsdp2", **KEEP},
    },
    "tr8/exp02": {"E11": {"data.order.reshuffle": {"6210 steps": 43}}},
    "tr8/exp03": {"E12": {GPT + "attention_scale": "pre_sqrt"}},
    "tr8/exp04": {"E13": {OPTIMIZER + "betas": [0.9, 0.95], "data.order.reshuffle": {"3000 steps": 43}}},
    "tr8/exp05": {
        "E13": {OPTIMIZER + "betas": [0.9, 0.95]},
        "E11": {"model.seed_init": 43, "data.seed_data": 43, "data.order.reshuffle": {}},
    },
    "tr8/exp06": {
        "E14": {GPT + "d_ff": 65536, RAMP: "32 32 6_000_000", "published.d_ff_ratio": 4, "published.parameters": None}
    },
    "tr8/exp07": {
        "E15": {
            **shape(64, 80, 11600, 50257, d_ff=None),
            RAMP: "16 16 6_000_000",
            "published.parameters": "103.96B",
            "published.d_ff_ratio": 4,
        }
    },
    "tr8/exp08": {"E16": {SCHEDULE + "peak": 3e-5, SCHEDULE + "warmup": 300_000}},
    "tr8/exp09": {
        "E16": {SCHEDULE + "peak": 3e-5, SCHEDULE + "warmup": 1_000_000},
        "L13": {SCHEDULE + "warmup": 10**6},
    },
    "tr8/exp10": {"E16": {SCHEDULE + "peak": 1e-5, SCHEDULE + "warmup": 1_000_000}},
    "tr8/exp11": {
        "E17": {GPT + "init_std": 0.006, SCHEDULE + "peak": 3e-5, SCHEDULE + "warmup": 300_000},
        "L01": {GPT + "init_std": 0.006},
        "L02": {GPT + "residual_rescale": True},
        "L05": {SCHEDULE + "peak": 3e-5},
    },
    "tr8/exp12": {
        "base": {
            **shape(64, 80, 11600, 50257, d_ff=None, init_std=0.006),
            **rates(6e-5, 6e-6, 216_320, 126_953_125, "samples"),
            **adam(0.95, 0.1, 1e-8),
            **SCALE_OF_104B,
            CLIP + "max_norm": 1.0,
            RAMP: "16 16 6_000_000",
            "model.seed_init": 43,
            "data.seed_data": 43,
            "trainer.max_steps": 159_576,
            "checkpoints.every_steps": 300,
        },
        "E18": {SCHEDULE + "peak": 6e-5, SCHEDULE + "warmup": 216_320},
        "L11": {OPTIMIZER + "betas": [0.9, 0.95]},
    },
}

# -- tr8b-104B --------------------------------------------------------------------------------------------------------

LENGTHS = "stability.sequence_length_warmup."
TR8B: dict[str, RowValues] = {
    "tr8b_curriculum/exp1": {
        "base": {
            **rates(6e-5, 6e-6, 216_320, "260B", "tokens"),
            LENGTHS + "min_length": 64,
            LENGTHS + "total_steps": 36_000,
            LENGTHS + "multiple_of": 8,
            LENGTHS + "shape": "linear",
            "stability.batch_size_warmup": None,
            "data.global_batch": 2048,
            "trainer.max_steps": 89_033,
        },
        "C02": {SCHEDULE + "peak": 6e-5, SCHEDULE + "warmup": 216_320, "validate_every": 1000},
        "C07": {SCHEDULE + "unit": "tokens", SCHEDULE + "warmup_unit": "samples"},
    },
    "tr8b_curriculum/exp2": {
        "C03": {
            SCHEDULE + "peak": 1e-4,
            SCHEDULE + "warmup": 3_750_000,
            SCHEDULE + "warmup_unit": "samples",
            "validate_every": 150,
        }
    },
    "tr8b_curriculum/exp3": {
        "C06": {SCHEDULE + "peak": 6e-5, GPT + "embed_norm": True, SCHEDULE + "warmup": 3_750_000},
    },
    "tr8b_bitsandbytes/exp1": {
        "N01": {
            **adam(0.95, 0.1, 1e-8),
            SCHEDULE + "peak": 6e-5,
            GPT + "init_std": 0.006,
            GPT + "stable_embedding": True,
            "stability.eight_bit_adam.min_8bit_size": 4096,
            "stability.eight_bit_adam.embedding_bits": 32,
            "stability.eight_bit_adam.state_map": "dynamic",
        }
    },
    "tr8b_bitsandbytes/exp1_overflows": {
        "N14": {
            "stability.scripted_skip.steps": ["1-44"],  # 44 x 16 = 704 samples: about 0.7k
            "stability.scripted_skip.schedule_on_skip": "hold",
            "stability.grad_spike_skip": None,
        }
    },
    "tr8b_bitsandbytes/exp2": {"N08": {OPTIMIZER + "eps": 1e-6}},
    "tr8b_bitsandbytes/exp3": {"N09": {OPTIMIZER + "eps": 1e-8, "trainer.strategy": "ddp"}},
    "tr8b_bitsandbytes/exp4": {"N10": {GPT + "init_std": 0.02}},
    "tr8b_bitsandbytes/exp5": {
        "N11": {OPTIMIZER + "eps": 1e-8, GPT + "init_std": 0.006, GPT + "stable_embedding": True}
    },
    "tr8b_bitsandbytes/exp6": {
        "N12": {
            OVERRIDE + "start": 1_519_744,
            OVERRIDE + "unit": "samples",
            OVERRIDE + "warmup": 216_320,
            OVERRIDE + "horizon": 12_695_312,
            OVERRIDE + "floor": 6e-7,
        }
    },
    "tr8b_embed_norm/exp1": {
        "E01": {GPT + "embed_norm": True, GPT + "stable_embedding": False, GPT + "init_std": 0.006},
        "E02": {"checkpoints.first_step": 13_250},
    },
    "tr8b_embed_norm/exp2": {
        "E02": {"data.skip_steps": ["13251-14000"]},
        "E03": {"checkpoints.first_step": 16_651},
    },
    "tr8b_embed_norm/exp3": {"E03": {"data.skip_steps": ["13251-14000", "16652-18500"]}},
    "tr8b_embed_norm/exp4": {"E04": {"data.skip_steps": ["13251-14000", "16651-19500"]}},
    "tr8b_embed_norm/exp5": {
        "E05": {
            RESET + "start": 16_800,
            RESET + "hold_steps": 0,
            RESET + "action": "log",
            "stability.scripted_skip.steps": ["16801-16900"],
        }
    },
    "tr8b_embed_norm/exp6": {"E06": {RESET + "start": 16_800, RESET + "hold_steps": 100}},
    "tr8b_embed_norm/exp7": {"E07": {RESET + "start": 16_800, RESET + "hold_steps": 17_059 - 16_800}},
    "tr8b_embed_norm/control_1b3": {
        "E09": {
            **shape(24, 16, 2048, 50257, embed_norm=True),
            SCHEDULE + "peak": 2e-4,
            SCHEDULE + "floor": 1e-5,
            SCHEDULE + "warmup": 183_105,
            "data.global_batch": 512,
            RAMP: "32 32 2_000_000",
            "data.sources.the_pile.path": "the_pile",
            RESET + "start": 19_686,
            RESET + "hold_steps": 100,
            "checkpoints.first_step": 48_984,
        },
        "original": {
            OPTIMIZER + "betas": [0.9, 0.999],
            SCHEDULE + "horizon": 73_242_187,
            GPT + "init_std": 0.02,
            GPT + "attention_scale": "post",
            "model.seed_init": 1234,
            "data.seed_data": 1234,
            "trainer.max_steps": 324_633,
            "checkpoints.every_steps": 1500,
            "published.parameters": None,
        },
    },
    "tr8b_embed_norm/control_1b3_again": {"E09": {RESET + "start": 48_984, RESET + "hold_steps": 100}},
    "bloom/176b": {
        "base": {
            **shape(70, 112, 14336, 250_880, position="alibi", embed_norm=True, init_std=0.0048),
            **adam(0.95, 0.1, 1e-8),
            SCHEDULE + "peak": 6e-5,
            SCHEDULE + "floor": 6e-6,
            CLIP + "max_norm": 1.0,
            RAMP: "192 16 9_765_625",
            "trainer.precision": "bf16-mixed",
            "published.parameters": "176.25B",
        },
        "L03": {GPT + "init_std": 0.0048},
        "original": {
            SCHEDULE + "warmup": 183_105,
            SCHEDULE + "horizon": 200_000_000,
            GPT + "attention_scale": "post",
            "model.seed_init": 42,
            "data.seed_data": 42,
            "data.micro_batch": 2,
            "data.sources.roots.path": "roots",
            "trainer.max_steps": 115_311,
            "checkpoints.every_steps": 100,
            "checkpoints.first_step": None,
            "stability.grad_spike_skip": None,
        },
    },
}

# -- BloombergGPT -----------------------------------------------------------------------------------------------------

#: Shares of tokens in percent, table 1 of the paper.
FINPILE = {
    **source("web", "finpile_web", 42.01),
    **source("news", "finpile_news", 5.31),
    **source("filings", "finpile_filings", 2.04),
    **source("press", "finpile_press", 1.21),
    **source("bloomberg", "finpile_bloomberg", 0.70),
}
PUBLIC = {
    **source("the_pile", "the_pile", 25.9),
    **source("c4", "c4", 19.48),
    **source("wikipedia", "wikipedia_2022_07", 3.35),
}
FROM_115500 = {"data.order.reshuffle": {"115500 steps": 3}}


def override(start: int, **values: float) -> dict[str, Any]:
    return {OVERRIDE + "start": start, **{OVERRIDE + name: value for name, value in values.items()}}


BLOOMBERG: dict[str, RowValues] = {
    "bloomberggpt/v2.0": {
        "base": {
            **shape(70, 40, 7680, 131_072, max_length=2048, position="alibi", dropout=0.0, init_std="mtnlg"),
            **adam(0.95, 0.1),
            "data.sequence_length": 2048,
            "data.global_batch": 2048,
            "trainer.devices": 8,
            "trainer.num_nodes": 64,
            "mesh.replicate": 4,
            "trainer.precision": "bf16-mixed",
            "trainer.log_every_n_steps": 5,
            "trainer.max_steps": 139_200,
            "validate_every": 300,
            "published.parameters": "50.56B",
            "published.d_ff_ratio": 4,
        },
        "B01": PUBLIC,
        "B02": FINPILE,
        "B05": {"data.validation_from": "2022-07-01"},
        "B19": {"checkpoints.every_steps": 300, **KEEP},
        "B20": {GPT + "head_fp32": True},
        "B21": {CLIP + "max_norm": 0.3},
        "B22": {"data.order.by": "shuffle"},
        "B23": {GPT + "embed_norm": True},
        "B24": {SCHEDULE + "warmup": 1800},
        "B25": {OPTIMIZER + "decay_norms": False},
        "B26": {"model.seed_init": 2, "data.seed_data": 2},
        "B27": {GPT + "residual_rescale": True},
        "B28": {GPT + "qk_layer_scaling": "megatron"},
        "B29": {RAMP: "1024 for 7200 steps"},
        "B30": {SCHEDULE + "peak": 6e-5},
        "original": {SCHEDULE + "floor": 6e-6, GPT + "bias": True, "model.recompute": True},
        "ours": {SCHEDULE + "horizon": 139_200, "data.micro_batch": 2, "trainer.strategy": "fsdp2"},
    },
    "bloomberggpt/v1.0": {
        "B07": {SCHEDULE + "peak": 1e-4, CLIP + "max_norm": 1.0},
        "B03": {GPT + "embed_norm": False},
        "B10": {"data.order.by": "shards"},
        "B20": {GPT + "head_fp32": False},
        "B26": {"model.seed_init": 1, "data.seed_data": 1},
        "B27": {GPT + "residual_rescale": False},
        "B28": {GPT + "qk_layer_scaling": "none"},
        "B29": {"stability.batch_size_warmup": None},
        "B34": {OPTIMIZER + "decay_norms": True, OPTIMIZER + "weight_decay": 0.1},
        "ours": {SCHEDULE + "warmup": 1200},
    },
    "bloomberggpt/v0": {"B05": {"data.order.by": "date", SCHEDULE + "peak": 1e-4, CLIP + "max_norm": 1.0}},
    "bloomberggpt/v1.1": {"B11": {**override(10_800, peak=8e-5), "data.order.reshuffle": {"10800 steps": 3}}},
    "bloomberggpt/v1.2": {
        "B12": {**override(20_100, peak=6e-5), CLIP + "schedule": [{"from": 20_100, "max_norm": 0.3}]},
    },
    "bloomberggpt/v1.3": {"B13": {GPT + "head_fp32": True, SCHEDULE + "peak": 1e-4, CLIP + "max_norm": 1.0}},
    "bloomberggpt/v1.4": {
        "B14": {
            **override(12_000, peak=6e-5),
            CLIP + "schedule": [{"from": 12_000, "max_norm": 0.3}],
            GPT + "head_fp32": True,
        }
    },
    "bloomberggpt/v2.1": {"B15": override(115_500, peak=4e-5), "B16": FROM_115500},
    "bloomberggpt/v2.2": {"B17": {**override(115_500, dropout=0.1), OVERRIDE + "peak": None}, "B16": FROM_115500},
    "bloomberggpt/v2.3": {"B17": override(129_900, peak=2e-5, dropout=0.1), "B16": FROM_115500},
    "bloomberggpt/v2.4": {"B15": override(129_900, peak=2e-5), "B16": FROM_115500},
    "bloomberggpt/v2.5": {
        "B15": override(137_100, peak=1e-5, dropout=0.1),
        "base": {"trainer.max_steps": 146_000},
        "B16": FROM_115500,
    },
    "bloomberggpt/v2.6": {"B18": override(129_900, peak=2e-5, weight_decay=0.01), "B16": FROM_115500},
}

# -- OPT --------------------------------------------------------------------------------------------------------------

OPT: dict[str, RowValues] = {
    "opt/12": {
        "base": {
            **shape(96, 96, 12288, 50272, max_length=2048, init_std=0.006, residual_rescale=True),
            GPT + "mlp": "relu",
            GPT + "dropout": 0.1,
            GPT + "attention_dropout": 0.1,
            OPTIMIZER + "eps": 1e-8,
            OPTIMIZER + "weight_decay": 0.1,
            SCHEDULE + "shape": "linear",
            SCHEDULE + "floor": 1.2e-5,
            SCHEDULE + "warmup": 2000,
            SCHEDULE + "horizon": 143_051,  # 300B tokens / (1024 x 2048)
            "trainer.max_steps": 143_051,
            "data.sequence_length": 2048,
            "trainer.devices": 8,
            "trainer.num_nodes": 128,
            "mesh.tensor_parallel": 8,
            "published.d_ff_ratio": 4,
        },
        "O06": {"data.global_batch": 1024},
        "O09": {GPT + "embed_dropout": 0.0},
        "O19": {
            "trainer.precision": "16-true",
            "loss_scale.init": 4,
            "loss_scale.window": 256,
            "loss_scale.hysteresis": 1,
            "loss_scale.floor": 2**-5,
            **HOLD,
        },
        "O20": {GPT + "norm_position": "pre"},
        "O22": {CLIP + "max_norm": 1.0, CLIP + "norm_type": "l2"},
        "O23": {SCHEDULE + "peak": 1.2e-4},
        "O24": {OPTIMIZER + "betas": [0.9, 0.95]},
        "O25": {GPT + "embed_scale": 1.0},
        "O26": {GPT + "init_overrides": {}},
        "original": {
            GPT + "bias": True,
            "model.recompute": True,
            "model.seed_init": 1,
            "data.seed_data": 1,
            "data.micro_batch": 8,
            "validate_every": 2000,
            "data.sources.opt_corpus.path": "opt_corpus",
        },
        "ours": {"trainer.strategy": "fsdp2", "checkpoints.every_steps": 250, **KEEP},
    },
    "opt/11": {
        "O04": {OPTIMIZER + "betas": [0.9, 0.98]},
        "O07": {OPTIMIZER + "weight_decay": 0.05},
        "O08": {SCHEDULE + "peak": 3e-4, SCHEDULE + "floor": 1e-5},
        "O09": {GPT + "embed_dropout": 0.0},
        "O10": {GPT + "norm_position": "normformer"},
        "O11": {"model.gradient_predivide": 32},
        "O12": {CLIP + "max_norm": 2.5, CLIP + "norm_type": "l2"},
        "O13": {GPT + "init_overrides": {"wpe.weight": "sinusoidal"}},
        "O18": {GPT + "mlp": "gelu"},
        "O25": {GPT + "embed_scale": "sqrt_d"},
    },
    "opt/11_gpt3": {
        "O02": {OPTIMIZER + "weight_decay": 0.1},
        "O03": {CLIP + "max_norm": 1.0},
        "O04": {OPTIMIZER + "betas": [0.9, 0.95]},
        "O05": {OPTIMIZER + "eps": 1e-6},
    },
    "opt/11_batch": {"O06": {"data.global_batch": 2048}},
    "opt/11_lr": {"O14": {OVERRIDE + "peak": 7.5e-5, OVERRIDE + "start": None}},
    "opt/11_clip": {
        "O15": {
            CLIP + "schedule": [{"from": 4000, "max_norm": 1.5}, {"from": 5500, "max_norm": 1.0}],
            CLIP + "max_norm": 2.5,
        },
    },
    "opt/11_skip": {"O16": {SKIP + "threshold": 1.0, **HOLD}},
    "opt/11.10": {
        "O17": {GPT + "attention_scale": "pre_sqrt"},
        "O18": {GPT + "mlp": "relu", "surgery.swap": ["activation"], "surgery.rewarmup": 0},
    },
    "opt/12.43": {"O27": {OVERRIDE + "factor": 0.9}},
    "opt/12.45.2": {"O27": {OVERRIDE + "peak": 4e-5}},
    "opt/12_clip": {"O28": {CLIP + "max_norm": 0.3}},
    "opt/12_bf16": {"O30": {"trainer.precision": "bf16-mixed", "stability.grad_spike_skip": None}},
    "opt/12_sgd_like_adam": {"O37": {OPTIMIZER + "betas": [0.0, 0.95], OPTIMIZER + "eps": 1.0}},
    "opt/12_sgd": {"O37": {OPTIMIZER + "name": "sgd"}},
}

# -- the Hugging Face VLM ---------------------------------------------------------------------------------------------

GATED, VISION = "model.gated.", "model.vision."
FREEZE = "stability.layer_norm_freeze.rules"


def digits(samples: int, length: int) -> dict[str, Any]:
    values = {"path": "builtin:digits", "tokenizer": "bytes", "sequence_length": length}
    sizes = {"micro_batch": samples, "global_batch": samples}
    return {f"data.{name}": value for name, value in {**values, **sizes}.items()}


def eyes(layers: int, heads: int, width: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_head": heads, "d_model": width, **more}
    return {VISION + name: value for name, value in sizes.items()}


def steps(peak: float, floor: float, total: int, validate: int, save: int) -> dict[str, Any]:
    ends = {"trainer.max_steps": total, "validate_every": validate, "checkpoints.every_steps": save}
    return {**rates(peak, floor, 40, total, "steps"), **ends}


ON_CPU = {"trainer.accelerator": "cpu", "trainer.devices": 1, CLIP + "max_norm": 1.0}
LANGUAGE = shape(4, 4, 96, 257, max_length=64)
IMAGES = {**eyes(2, 4, 64, image_size=8, channels=1, patch=2), **digits(32, 32), "system": "vlm"}

#: The document gives no sizes and no values but the switches themselves; the rest is ours.
HF_VLM: dict[str, RowValues] = {
    "hf_vlm/language_shape": {"V01": LANGUAGE},
    "hf_vlm/language": {
        "V01": LANGUAGE,
        "ours": {
            **steps(3e-3, 3e-4, 400, 200, 400),
            **ON_CPU,
            **KEEP,
            "data.sources.stdlib.path": "builtin:python-stdlib",
            "data.tokenizer": "bytes",
            "data.sequence_length": 64,
            "data.micro_batch": 32,
            "data.global_batch": 32,
            "data.num_workers": 0,
            "data.validation_windows": 100,
        },
    },
    "hf_vlm/pairs": {"V01": IMAGES, "ours": ON_CPU},
    "hf_vlm/vision": {
        "V01": eyes(2, 4, 64, run=None),
        "ours": {
            **shape(1, 4, 64, 257, max_length=8, init_std="small_init"),
            GATED + "init_std": 0.08,
            **steps(3e-3, 3e-4, 800, 200, 400),
            **digits(64, 8),
            "data.words": "names",
        },
    },
    "hf_vlm/captions": {
        "V01": {
            **LANGUAGE,
            **IMAGES,
            FREEZE: [{"modules": ["gpt", "sight.vision"], "norms": "with"}],
            "model.language": "language",
            VISION + "run": "vision",
            GATED + "every": 1,
        },
        "V06": {GATED + "first": 0},
        "V11": {GATED + "qk_norm": "none"},
        "V14": {GATED + "norm": "layernorm"},
        "V07": {GATED + "norm_position": "pre"},
        "V15": {GATED + "bias": True},
        "V08": {"model.z_loss": 0.0},
        "ours": {**steps(2e-3, 2e-4, 600, 200, 200), **ON_CPU, GATED + "init_std": 0.06},
    },
    "hf_vlm/captions_bf16": {"V01": {"trainer.precision": "bf16-mixed", "trainer.accelerator": "auto"}},
    "hf_vlm/language_bf16": {
        "V04": {**LANGUAGE, "trainer.precision": "bf16-mixed", "trainer.max_steps": 500},
    },
    "hf_vlm/heavier_decay": {"V05": {OPTIMIZER + "weight_decay": 1.0}},
    "hf_vlm/pretrained_first": {"V06": {GATED + "first": 1}},
    "hf_vlm/output_norms": {"V07": {GATED + "norm_position": "sandwich"}},
    "hf_vlm/z_loss": {"V08": {"model.z_loss": 1e-4}},
    "hf_vlm/adam": {"V09": {OPTIMIZER + "betas": [0.9, 0.999], OPTIMIZER + "eps": 1e-6}},
    "hf_vlm/qk_layernorm": {"V11": {GATED + "qk_norm": "layernorm"}},
    "hf_vlm/qk_rmsnorm": {"V11": {GATED + "qk_norm": "rmsnorm"}},
    "hf_vlm/qk_l2": {"V12": {GATED + "qk_norm": "l2", GATED + "qk_l2_scale": "learned"}},
    "hf_vlm/unfreeze_norms": {
        "V13": {
            FREEZE: [
                {"modules": ["gpt", "sight.vision"], "norms": "except"},
                {"modules": ["sight.vision"], "norms": "only"},
                {"modules": ["gpt"], "norms": "only", "stop": 200},
            ]
        }
    },
    "hf_vlm/rmsnorm": {"V14": {GATED + "norm": "rmsnorm", GATED + "qk_norm": "none"}},
    "hf_vlm/no_bias": {"V15": {GATED + "bias": False}},
    "hf_vlm/what_worked": {
        "V11": {GATED + "qk_norm": "rmsnorm"},
        "V14": {GATED + "norm": "rmsnorm"},
        "V15": {GATED + "bias": False},
    },
    "hf_vlm/language_wide": {"V17": {GPT + "n_layer": 2, GPT + "d_model": 128}},
    "hf_vlm/other_language": {
        "V17": {GPT + "n_layer": 2, GPT + "d_model": 128, "model.language": "language_wide", VISION + "run": "vision"}
    },
    "hf_vlm/vision_large": {"V18": eyes(4, 4, 96, run=None)},
    "hf_vlm/larger_vision": {"V18": {**eyes(4, 4, 96, run="vision_large"), "model.language": "language"}},
}

# -- sizes ------------------------------------------------------------------------------------------------------------


def fragment(
    sizes: tuple[int, int, int, int], targets: tuple[int, int, int], micro_batch: int, strategy: str = "auto"
) -> RowValues:
    """Layers, heads, width, vocabulary; steps, batch, length; samples at once."""
    named = dict(zip(("max_steps", "global_batch", "sequence_length"), targets, strict=True))
    return {
        "B33": {
            **shape(*sizes, d_ff=None),
            **{f"scale.{name}": value for name, value in named.items()},
            "data.micro_batch": micro_batch,
            "published.parameters": None,
            "mesh.tensor_parallel": 1,
            "mesh.replicate": 1,
            "trainer.devices": "auto",
            "trainer.num_nodes": 1,
            "trainer.strategy": strategy,
            "trainer.precision": "bf16-mixed",
            "data.tokenizer": f"bpe:{min(sizes[3], 16384)}",
        }
    }


def pair(layers: int, heads: int, width: int) -> RowValues:
    values = {"n_layer": layers, "n_head": heads, "d_model": width, "d_ff": None}
    return {"V19": {**{GPT + name: value for name, value in values.items()}, "published.parameters": None}}


TINY = fragment((2, 2, 64, 1024), (120, 16, 64), 2)
TINY["B33"] |= {
    "data.num_workers": 0,
    "data.validation_windows": 20,
    "trainer.accelerator": "cpu",
    "trainer.devices": 1,
    "trainer.precision": "32-true",
    "trainer.log_every_n_steps": 1,
}
SIZES: dict[str, RowValues] = {
    "sizes/tiny": TINY,
    "sizes/10m": fragment((10, 4, 256, 8192), (2000, 64, 512), 16),
    "sizes/60m": fragment((10, 10, 640, 16384), (5000, 128, 512), 16),
    "sizes/124m": fragment((12, 12, 768, 50304), (19100, 512, 1024), 16),
    "sizes/350m": fragment((24, 16, 1024, 50304), (24000, 512, 2048), 8, "fsdp2"),
    "sizes/1.3b": fragment((24, 16, 2048, 50304), (24800, 512, 2048), 8, "fsdp2"),
    "sizes/19m_shallow": pair(6, 8, 512),
    "sizes/19m_deep": pair(24, 4, 256),
    "sizes/42m_shallow": pair(6, 12, 768),
    "sizes/42m_deep": pair(24, 6, 384),
    "sizes/llama_8b": {
        "B31": {
            **shape(32, 32, 4096, 128_256, n_kv_head=8, d_ff=14336, max_length=8192, rope_theta=500_000.0),
            GPT + "norm": "rmsnorm",
            GPT + "mlp": "swiglu",
            GPT + "position": "rope",
            GPT + "tied": False,
            "model.recompute": "selective",
            "data.sequence_length": 8192,
            "published.parameters": "8.03B",
        },
        "ours": {"data.micro_batch": 1, "data.global_batch": 128},
    },
}

ROW_VALUES: dict[str, RowValues] = {**TR8, **TR8B, **BLOOMBERG, **OPT, **HF_VLM, **SIZES}

#: Where a run goes on from another one, as the header of its recipe says it: row and checkpoint.
CONTINUES: dict[str, tuple[str, str]] = {
    "bloomberggpt/v1.1": ("B11", "v1.0@10800"),
    "bloomberggpt/v1.2": ("B12", "v1.1@20100"),
    "bloomberggpt/v1.3": ("B13", "v1.0@10800"),
    "bloomberggpt/v1.4": ("B14", "v1.3@12000"),
    "bloomberggpt/v2.1": ("B15", "v2.0@115500"),
    "bloomberggpt/v2.2": ("B17", "v2.0@115500"),
    "bloomberggpt/v2.3": ("B17", "v2.1@129900"),
    "bloomberggpt/v2.4": ("B15", "v2.1@129900"),
    "bloomberggpt/v2.5": ("B15", "v2.3@137100"),
    "bloomberggpt/v2.6": ("B18", "v2.1@129900"),
    "tr8/exp02": ("E11", "exp01@6210"),
    "tr8/exp03": ("E12", "exp01@6210"),
    "tr8/exp04": ("E13", "exp01@3000"),
    "tr8b_embed_norm/exp2": ("E02", "tr8b_embed_norm-exp1@13250"),
    "tr8b_embed_norm/exp3": ("E03", "tr8b_embed_norm-exp2@16651"),
    "tr8b_embed_norm/exp4": ("E04", "tr8b_embed_norm-exp2@16500"),  # ours: 16651 lies in the range
    "tr8b_embed_norm/exp5": ("E05", "tr8b_embed_norm-exp2@16800"),
    "tr8b_embed_norm/exp6": ("E06", "tr8b_embed_norm-exp2@16800"),
    "tr8b_embed_norm/exp7": ("E07", "tr8b_embed_norm-exp2@16800"),
    "tr8b_embed_norm/control_1b3_again": ("E09", "control_1b3@48984"),
    "tr8b_bitsandbytes/exp6": ("N12", "tr8b_bitsandbytes-exp5@12000"),
    "hf_vlm/language_bf16": ("V04", "language@400"),
}
