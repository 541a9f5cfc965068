"""What one process can show of the sharding strategy; tests/distributed has two."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from tiny_fit import Watch
from tiny_gpt_run import NumberedData, equal_bits, fit
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies import fsdp2
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.fsdp2_precision import FSDP2Precision


def trainer(strategy: str, precision: str) -> Trainer:
    return Trainer(strategy=strategy, precision=precision, accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize(("name", "sharded"), [("fsdp2", True), ("fsdp2_full", False)])
def test_the_names_choose_the_form_of_checkpoints(name, sharded):
    strategy = trainer(name, "32-true").strategy
    assert type(strategy) is FSDP2Strategy
    assert strategy._save_distributed_checkpoint is sharded


def test_registering_twice_changes_nothing():
    before = dict(StrategyRegistry)
    fsdp2.register_strategies()
    assert dict(StrategyRegistry) == before


def test_bf16_becomes_a_policy_of_the_shards_and_fp32_stays_plain():
    plugin = trainer("fsdp2", "bf16-mixed").strategy.precision_plugin
    assert type(plugin) is FSDP2Precision
    assert plugin.precision == "bf16-mixed"
    assert (plugin.policy.param_dtype, plugin.policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not torch.is_autocast_enabled("cpu")
    with plugin.forward_context():
        assert not torch.is_autocast_enabled("cpu")
    assert type(trainer("fsdp2", "32-true").strategy.precision_plugin) is Precision


def test_another_precision_is_refused():
    with pytest.raises(
        MisconfigurationException, match=r"precision=64-true: strategy fsdp2 takes 32-true, bf16-true or bf16-mixed"
    ):
        trainer("fsdp2", "64-true")


def test_ranks_that_cannot_be_laid_out_are_refused():
    strategy = FSDP2Strategy(tensor_parallel=2)
    with pytest.raises(MisconfigurationException, match=r"1 ranks: must be a multiple of mesh.tensor_parallel=2"):
        fit(strategy, steps=1)


def test_the_sampler_of_a_foreign_data_module_gives_neighbours_the_same_samples(monkeypatch):
    strategy = FSDP2Strategy(tensor_parallel=2)
    for rank, expected in enumerate([0, 0, 1, 1]):
        monkeypatch.setattr(FSDP2Strategy, "world_size", 4)
        monkeypatch.setattr(FSDP2Strategy, "global_rank", rank)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": expected}


def test_an_older_torch_is_refused(monkeypatch):
    def fully_shard(module, *, mesh=None, reshard_after_forward=True):
        """As in torch 2.6."""

    monkeypatch.setattr(fsdp2, "fully_shard", fully_shard)
    with pytest.raises(MisconfigurationException, match=r"strategy fsdp2 needs torch 2\.7 or newer; or use ddp"):
        FSDP2Strategy()


def test_a_torch_that_sums_gradients_on_cpus_is_refused_there(monkeypatch):
    def summing(layer, mesh, ignored_params=None):
        """As torch 2.7 does on CPUs: gradients come out too large."""
        fully_shard(layer, mesh=mesh).set_gradient_divide_factor(0.5)

    monkeypatch.setattr(fsdp2, "fully_shard", summing)
    with pytest.raises(
        MisconfigurationException, match=r"on CPUs its fully_shard sums gradients over the ranks .* strategy ddp"
    ):
        fit("fsdp2", steps=1)


def test_options_reach_lightning():
    strategy = FSDP2Strategy(process_group_backend="gloo", timeout_minutes=2.0)
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout.total_seconds() == 120


def test_one_process_trains_as_without_sharding():
    plain, sharded = fit(steps=4, bias=True), fit("fsdp2", steps=4, bias=True)
    assert sharded.rows == plain.rows
    assert equal_bits(sharded.weights, plain.weights)


def test_a_further_fit_makes_no_groups_of_ranks(monkeypatch):
    """Nobody takes down those of a mesh: each rewind would have left some, with NCCL's memory."""
    run = fit("fsdp2", steps=2, validates=False)
    first = run.trainer.strategy.device_mesh

    def refuse(*args, **options):
        raise AssertionError("another mesh")

    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", refuse)
    run.trainer.fit_loop.epoch_loop.max_steps = 4
    run.trainer.fit(run.module, datamodule=NumberedData())
    assert run.trainer.global_step == 4
    assert run.trainer.strategy.device_mesh is first
    assert run.module.device_mesh is first


def test_after_a_validation_the_parameters_are_the_shards_that_the_optimizer_holds():
    kinds: list[set[bool]] = []

    def note(trainer: Trainer, *args) -> None:
        module = trainer.lightning_module
        held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
        kinds.append({id(p) in held for p in module.parameters()})

    fit("fsdp2", steps=4, callbacks=(Watch("on_train_batch_start", note),))  # validates after step 2
    assert kinds == [{True}] * 16


def test_resharding_acts_on_every_unit(monkeypatch):
    run = fit("fsdp2", steps=1)
    units = [m for m in run.module.modules() if isinstance(m, FSDPModule)]
    assert len(units) >= 3  # the root and two blocks
    run.module.gpt.unshard()
    assert not isinstance(run.module.gpt.wte.weight, DTensor)
    for hook in (run.trainer.strategy.on_validation_end, run.trainer.strategy.on_test_end):
        run.module.gpt.unshard()
        hook()
        assert isinstance(run.module.gpt.wte.weight, DTensor)
