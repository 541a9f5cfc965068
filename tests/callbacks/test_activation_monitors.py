"""Activations, attention logits and output logits on one process, against a forward pass by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activations_by_hand import LastBatch, expected_of
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import LENGTH, VOCAB, equal_bits, fit
from torch import Tensor, nn

from lit_stable.callbacks import ActivationMonitor, AttentionMonitor, OutputMonitor
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.output_monitor import log_z_sums
from lit_stable.callbacks.private_names import compiled_graphs


def monitors() -> tuple[Any, ...]:
    return ActivationMonitor(), AttentionMonitor(), OutputMonitor()


def logged(run: Any, *families: str) -> dict[str, float]:
    kept = tuple(f"stability/{family}" for family in families)
    return {name: float(v) for name, v in run.trainer.callback_metrics.items() if name.startswith(kept)}


FAMILIES = ("activation_", "attention_logit", "log_z", "output_logit")


OPTIONS = {
    "gpt2": {},
    "llama": {"mlp": "swiglu", "position": "rope", "qk_norm": "rmsnorm"},
    "groups": {"n_head": 4, "n_kv_head": 2, "position": "rope"},
    "alibi": {"n_head": 4, "n_kv_head": 1, "position": "alibi"},
    "alibi, explicit": {"n_head": 4, "position": "alibi", "attention_kernel": "explicit"},
    "cap": {"attention_soft_cap": 0.5, "norm_position": "sandwich"},
    "roots": {"attention_scale": "pre_sqrt", "qk_norm": "layernorm"},
    "roots, explicit": {"attention_scale": "pre_sqrt", "attention_kernel": "explicit"},
    "cosines": {"qk_norm": "l2", "norm_position": "normformer", "position": "rope"},
    "megatron": {"qk_layer_scaling": "megatron"},
    "inverse": {"qk_layer_scaling": "hf_inverse_layer", "residual_fp32": True},
    # The separator stands where the largest logit of all pairs is one across documents.
    "documents": {"document_mask": True, "document_separator": 46},
    "documents, explicit": {"document_mask": True, "document_separator": 46, "attention_kernel": "explicit"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_numbers_are_those_of_a_forward_pass_by_hand(options: dict[str, Any]) -> None:
    last = LastBatch()
    run = fit(steps=3, callbacks=(last, *monitors()), dropout=0.2, **options)
    assert_as_by_hand(run, last)


def assert_as_by_hand(run: Any, last: LastBatch) -> None:
    expected = expected_of(run.module.config, last.weights, last.ids)
    assert len(expected) > 20
    found = logged(run, *FAMILIES)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_the_run_is_bit_identical_nothing_more_is_compiled_and_the_insides_are_seen(compile: str) -> None:
    before = compiled_graphs()
    without = fit(steps=3, dropout=0.2, compile=compile)
    graphs = compiled_graphs() - before
    torch._dynamo.reset()
    last = LastBatch()
    watched = fit(steps=3, dropout=0.2, compile=compile, callbacks=(last, *monitors()))
    assert equal_bits(without.weights, watched.weights)
    assert without.rows == watched.rows
    assert compiled_graphs() - before == 2 * graphs
    assert_as_by_hand(watched, last)


def test_recomputed_blocks_are_seen_once() -> None:
    kept = fit(steps=2, callbacks=monitors())
    again = fit(steps=2, callbacks=monitors(), recompute=True)
    assert logged(kept, *FAMILIES) == logged(again, *FAMILIES)


def test_a_step_that_is_not_measured_makes_no_second_pass() -> None:
    passes: list[int] = []

    def listen(trainer: Any) -> None:
        def note(*ignored: Any) -> None:
            if trainer.training and not torch.is_grad_enabled():
                passes.append(trainer.global_step)

        trainer.lightning_module.gpt.register_forward_hook(note)

    every = [type(m)(every_steps=3) for m in monitors()]
    fit(steps=6, callbacks=(Watch("on_train_start", listen), *every))
    assert passes == [2, 5]  # before the third step and before the sixth; one pass for all three monitors


class TwoCalls(TinyModule):
    """Calls two of its children, one with what the other gave, and a loss that is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(4, 6), nn.Linear(6, 4), nn.MSELoss()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.second(self.first(batch).tanh()), batch.roll(1, 1))
        return loss


def test_any_modules_children_are_called_again_with_what_they_were_given() -> None:
    module = TwoCalls()
    seen: dict[str, float] = {}

    def before(trainer: Any, optimizer: Any) -> None:
        hidden = module.first(seen["batch"]).detach()  # type: ignore[arg-type]
        seen["first"] = float(hidden.square().mean().sqrt())
        seen["second"] = float(module.second(hidden.tanh()).abs().max())

    watches = (
        Watch("on_train_batch_start", lambda t, batch, i: seen.update(batch=batch)),
        Watch("on_before_optimizer_step", before),
    )
    monitor = ActivationMonitor(modules={"one": ["first"], "two": ["second"]})
    trainer = quiet_trainer(monitor, *watches, max_steps=2, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    metrics = trainer.callback_metrics
    assert float(metrics["stability/activation_rms/first.one"]) == pytest.approx(seen["first"], rel=1e-6)
    assert float(metrics["stability/activation_max/second.two"]) == pytest.approx(seen["second"], rel=1e-6)


def test_hugging_faces_gpt2_needs_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")

    class Foreign(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2)
            self.model = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            ids = (batch.abs() * 10).long() % VOCAB
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

    trainer = quiet_trainer(*monitors(), max_steps=1, log_every_n_steps=1)
    trainer.fit(Foreign(), TinyData())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for role in ("q", "k", "v", "o", "fc1", "fc2", "residual"):
        assert metrics[f"stability/activation_rms/model.transformer.h.1.{role}"] > 0
    assert metrics["stability/attention_logit_max/model.transformer.h.0.attn"] > 0
    assert metrics["stability/log_z"] == pytest.approx(math.log(VOCAB), abs=0.1)


def test_a_surge_in_one_block_shows_there_first() -> None:
    """The weights of one block times 1e4: its numbers leap, those of the block before do not."""

    def blow_up(trainer: Any) -> None:
        with torch.no_grad():
            trainer.lightning_module.gpt.blocks[1].mlp.down.weight.mul_(1e4)

    calm = logged(fit(steps=1, callbacks=monitors()), "activation_rms")
    hot = logged(fit(steps=1, callbacks=(Watch("on_train_start", blow_up), *monitors())), "activation_rms")
    ratio = {name.rpartition("/")[2]: hot[name] / calm[name] for name in calm}
    assert ratio["gpt.blocks.1.fc2"] == pytest.approx(1e4, rel=1e-3)
    assert ratio["gpt.blocks.1.residual"] > 100
    assert ratio["gpt.blocks.0.residual"] == ratio["gpt.blocks.1.fc1"] == 1.0


def test_names_that_are_not_known_are_refused_with_what_to_write() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"no module of TinyModule has a name that it knows .*modules=\{"
    ):
        quiet_trainer(ActivationMonitor(), max_steps=1, log_every_n_steps=1).fit(TinyModule(), TinyData())
    with pytest.raises(MisconfigurationException, match=r"head='\*head'\)`: matches 0 modules"):
        quiet_trainer(OutputMonitor(), max_steps=1, log_every_n_steps=1).fit(TinyModule(), TinyData())
    with pytest.raises(MisconfigurationException, match=r"matches 2 modules, .* they are net.0, net.3"):
        quiet_trainer(OutputMonitor(head="net.[03]"), max_steps=1).fit(TinyModule(), TinyData())


class Unseen(TinyModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.linear(batch, self.net[0].weight).square().mean()


@pytest.mark.filterwarnings("always")
def test_a_network_that_is_never_called_and_an_attention_that_is_not_seen_are_warned_of_once() -> None:
    monitor = ActivationMonitor(modules={"one": ["net.0"]})
    with pytest.warns(UserWarning, match="Unseen: no call of its network was seen") as caught:
        quiet_trainer(monitor, max_steps=3, log_every_n_steps=1).fit(Unseen(), TinyData())
    assert sum("no call of its network" in str(w.message) for w in caught) == 1
    with pytest.warns(UserWarning, match="no module with queries_keys") as caught:
        quiet_trainer(AttentionMonitor(), max_steps=3, log_every_n_steps=1).fit(TinyModule(), TinyData())
    assert sum("queries_keys" in str(w.message) for w in caught) == 1


def test_log_z_by_its_definition() -> None:
    logits = torch.randn(3, 5, 7).bfloat16()
    count, total, squares, largest = log_z_sums(logits).tolist()
    log_z = logits.double().exp().sum(-1).log()
    assert count == 15
    assert total == pytest.approx(float(log_z.sum()), rel=1e-6)
    assert squares == pytest.approx(float(log_z.square().sum()), rel=1e-6)
    assert largest == float(logits.abs().max())
