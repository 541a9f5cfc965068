"""What the recipes say that are nobody's run but ours, number by number."""

from __future__ import annotations

from typing import Any


def under(group: str, **options: Any) -> dict[str, Any]:
    return {f"{group}.{name}": value for name, value in options.items()}


OURS: dict[str, dict[str, Any]] = {
    "demo/rescue": {
        **under("model.gpt", vocab_size=257, n_layer=2, n_head=4, d_model=64, max_length=64),
        **under("model.schedule", peak=0.01, warmup=20, horizon=300, floor=0.001),
        **under("data.sources.stdlib", path="builtin:python-stdlib"),
        **under(
            "data",
            tokenizer="bytes",
            sequence_length=64,
            micro_batch=8,
            global_batch=8,
            num_workers=0,
            validation_windows=100,
        ),
        **under("trainer", max_steps=300, accelerator="cpu", devices=1),
        "validate_every": 300,
        **under("checkpoints", every_steps=25),
        **under(
            "stability.recovery",
            rungs=[
                {"do": "wait", "steps": 50},
                {"do": "lr", "factor": 0.9, "steps": 50},
                {"do": "rewind", "before": 10, "after": 10, "max_times": 3},
                {"do": "stop"},
            ],
        ),
        **under("stability.recovery.triggers", spike="wait", slow_divergence="lr", not_finite="rewind"),
        **under("stability.extra.drill", class_path="lit_stable.run.poisoned_samples.PoisonedSamples"),
        **under("stability.extra.drill.init_args", first=1600, last=1623),
    },
    "demo/rescue_control": {
        **under(
            "stability.recovery",
            rungs=[{"do": "rewind", "drop": False, "before": 0, "max_times": 3}, {"do": "stop"}],
            keep=8,
        ),
        **under("stability.recovery.triggers", not_finite="rewind"),
    },
    "gpt2_124m": {
        **under("model.gpt", vocab_size=50304, n_layer=12, n_head=12, d_model=768, max_length=1024),
        **under("model.schedule", peak=0.0006, warmup="375M", horizon="10B", floor=6e-05, unit="tokens"),
        **under("model.optimizer", betas=[0.9, 0.95], weight_decay=0.1),
        **under("data.sources.stdlib", path="builtin:python-stdlib"),
        **under("data", tokenizer="bpe:16384", sequence_length=1024, micro_batch=32, global_batch=512, num_workers=4),
        **under("trainer", accelerator="auto", precision="bf16-mixed", max_steps=19100),
        "validate_every": 500,
        **under("checkpoints", every_steps=500),
        **under("stability.grad_clip", max_norm=1.0),
    },
    "gpt_1b3": {
        **under("model.gpt", n_layer=24, n_head=16, d_model=2048, max_length=2048),
        **under("model.schedule", peak=0.0002, horizon="26B", floor=2e-05),
        **under("data", sequence_length=2048, micro_batch=8, global_batch=512),
        **under("trainer", strategy="fsdp2", max_steps=24800),
    },
    "quickstart": {
        **under("model.gpt", vocab_size=2048, n_layer=4, n_head=6, d_model=192, max_length=256),
        **under("model.schedule", peak=0.003, warmup=30, horizon=300, floor=0.0003),
        **under("data.sources.stdlib", path="builtin:python-stdlib"),
        **under(
            "data", tokenizer="bpe:2048", sequence_length=256, micro_batch=8, global_batch=16, validation_windows=100
        ),
        **under("trainer", max_steps=300),
        "validate_every": 100,
        **under("checkpoints", every_steps=100),
        **under("stability.grad_clip", max_norm=1.0),
    },
    "stability/alarm": {
        **under(
            "stability.alarm",
            command="tee -a alarms.jsonl",
            kinds="spike not_finite slow_divergence loss_scale_collapse",
            every_seconds=60.0,
        ),
    },
    "stability/batch_size_warmup": {
        **under("stability.batch_size_warmup", ramp="8 for 50 steps", fit_micro_batch=True, lr_factor="none"),
    },
    "stability/black_box": {
        **under("stability.black_box", steps=64, text_steps=8, kinds="*"),
    },
    "stability/detectors": {
        **under("stability.detectors.spike", z_score=16.0, window=128, warmup=64),
        **under("stability.detectors.slow_divergence", window=100, rise=0.03, patience=200),
        **under("stability.detectors.plateau", patience=10000, min_improvement=0.005),
        **under("stability.detectors.low_loss", z_score=16.0, drop=0.1),
        **under("stability.detectors.loss_scale", halvings=6, window=100, floor=1.0, overflows=20),
        **under("stability.detectors.surge", factor=2.0, window=200, warmup=500),
    },
    "stability/eight_bit_adam": {
        **under(
            "stability.eight_bit_adam", min_8bit_size=4096, embedding_bits=32, state_map="dynamic", on_load="refuse"
        ),
    },
    "stability/grad_clip": {
        **under(
            "stability.grad_clip",
            max_norm=2.5,
            schedule=[{"from": 4000, "max_norm": 1.5}, {"from": 5500, "max_norm": 1.0}],
            unit="steps",
        ),
    },
    "stability/grad_spike_skip": {
        **under(
            "stability.grad_spike_skip",
            z_score=16.0,
            window=128,
            max_skips=5,
            at_cap="accept",
            schedule_on_skip="advance",
        ),
    },
    "stability/layer_norm_freeze": {
        **under(
            "stability.layer_norm_freeze",
            rules=[{"modules": ["*"], "norms": "only", "start": 0, "stop": 1000}],
            unit="steps",
            moments="keep",
        ),
    },
    "stability/lr_backoff": {
        **under("stability.lr_backoff", kinds="spike slow_divergence surge", factor=0.9, cooldown=100, floor=0.1),
    },
    "stability/lr_override": {
        **under("stability.lr_override", start=150, unit="steps", factor=0.6667),
    },
    "stability/monitors": {
        **under("stability.activation_monitor", every_steps=20),
        **under("stability.attention_monitor", every_steps=20),
        **under("stability.output_monitor", every_steps=20),
        **under("stability.garbage_collection", every_steps=200),
        **under("stability.hang_watchdog", seconds=1800),
        **under("stability.disk_space", every_steps=100, min_free_gib=20),
        **under("stability.invariant_check", every_steps=500),
    },
    "stability/optimizer_reset": {
        **under("stability.optimizer_reset", start=150, unit="steps", hold_steps=100),
    },
    "stability/qk_clip": {
        **under("stability.qk_clip", threshold=100.0, every_steps=1),
    },
    "stability/recovery": {
        **under(
            "stability.recovery",
            rungs=[
                {"do": "wait", "steps": 100, "within": 3.0, "max_times": None},
                {"do": "lr", "factor": 0.9, "steps": 100, "cooldown": 100, "floor": 0.1, "max_times": 5},
                {"do": "rewind", "before": 100, "after": 100, "max_times": 3},
                {"do": "stop"},
            ],
            keep=3,
        ),
        **under(
            "stability.recovery.triggers",
            spike="wait",
            slow_divergence="lr",
            not_finite="rewind",
            loss_scale_collapse="rewind",
            too_many_skips="rewind",
        ),
        **under("checkpoints", every_steps=100),
    },
    "stability/repeat_check": {
        **under("stability.repeat_check", every_steps=1000, on_violation="tell"),
    },
    "stability/sample_text": {
        **under(
            "stability.sample_text",
            every_steps=100,
            prompts=["def ", "import ", "    return "],
            new_tokens=64,
            temperature=0.8,
        ),
    },
    "stability/scripted_skip": {
        **under("stability.scripted_skip", steps=["151-160", 200], schedule_on_skip="advance"),
    },
    "stability/sequence_length_warmup": {
        **under(
            "stability.sequence_length_warmup",
            shape="linear",
            min_length=64,
            total_steps=100,
            multiple_of=8,
            mode="truncate",
        ),
    },
    "stability/skip_aware_ema": {
        **under("stability.extra.skip_aware_ema", class_path="lit_stable.callbacks.skip_aware_ema.SkipAwareEMA"),
        **under("stability.extra.skip_aware_ema.init_args", decay=0.999),
    },
    "stability/update_clip": {
        **under("stability.update_clip", threshold=1.0),
    },
}
