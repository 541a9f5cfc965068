"""What the Trainer is given for what a recipe says."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision

from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.strategies import fsdp1
from lit_stable.strategies.fsdp2 import FSDP2Strategy
from lit_stable.strategies.fsdp2_precision import FSDP2Precision
from lit_stable.strategies.loss_scale import LossScale
from lit_stable.strategies.mesh import ONE_COPY, MeshOptions
from lit_stable.strategies.selection import mesh_problems, select

POLICY = LossScale(init=4.0, window=256, floor=2**-5)


def choose(strategy, precision, mesh: MeshOptions = ONE_COPY, accelerator: str = "cpu", **options):
    given = {"strategy": strategy, "precision": precision, "accelerator": accelerator, **options}
    return select(given, mesh, POLICY)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp2", "fsdp2_full", "fsdp"])
@pytest.mark.parametrize("precision", [None, "32-true", "bf16-mixed", "bf16-true"])
def test_what_a_name_says_stays_a_name(strategy, precision):
    chosen = choose(strategy, precision, max_steps=3)
    assert chosen == {
        "strategy": strategy,
        "precision": precision or "32-true",
        "accelerator": "cpu",
        "max_steps": 3,
    }


@pytest.mark.parametrize(
    ("strategy", "precision", "kind", "over_ranks"),
    [
        ("auto", "16-mixed", MixedPrecision, False),
        ("ddp", 16, MixedPrecision, False),
        ("fsdp2", "16-mixed", FSDP2Precision, True),
        ("fsdp2_full", "16-true", FSDP2Precision, True),
        (FSDP2Strategy(), "16-true", FSDP2Precision, True),
        ("fsdp", "16-mixed", FSDPPrecision, True),
    ],
)
def test_fp16_is_a_plugin_whose_scale_follows_the_recipe(strategy, precision, kind, over_ranks):
    chosen = choose(strategy, precision)
    (plugin,) = chosen["plugins"]
    assert (type(plugin), chosen["precision"], chosen["strategy"]) == (kind, None, strategy)
    assert plugin.precision == ("16-mixed" if precision == 16 else precision)
    assert (plugin.scaler.policy, plugin.scaler.over_ranks) == (POLICY, over_ranks)


def test_plugins_of_ones_own_stay():
    own = object()
    assert choose("auto", "16-mixed", plugins=[own])["plugins"][0] is own
    assert choose("auto", "16-mixed", plugins=own)["plugins"][0] is own
    assert choose("auto", "bf16-mixed", plugins=own)["plugins"] is own


@pytest.mark.parametrize(
    ("accelerator", "device"),
    [("cpu", "cpu"), ("gpu", "cuda"), ("cuda", "cuda"), ("auto", "cuda" if torch.cuda.is_available() else "cpu")],
)
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_the_scaler_stands_where_the_gradients_are(accelerator, device):
    (plugin,) = choose("auto", "16-mixed", accelerator=accelerator)["plugins"]
    assert (plugin.device, plugin.scaler._device) == (device, device)


@pytest.mark.parametrize(("name", "sharded"), [("fsdp2", True), ("fsdp2_full", False)])
def test_a_mesh_makes_the_strategy_an_object(name, sharded):
    strategy = choose(name, "bf16-mixed", MeshOptions(4, 2))["strategy"]
    assert type(strategy) is FSDP2Strategy
    assert strategy.layout == MeshOptions(tensor_parallel=4, replicate=2)
    assert strategy._save_distributed_checkpoint is sharded


def test_a_mesh_that_the_strategy_does_not_read_is_refused():
    assert mesh_problems("ddp", MeshOptions(2, 3)) == [
        "mesh.tensor_parallel=2: strategy ddp does not read it; set trainer.strategy to fsdp2 or fsdp2_full.",
        "mesh.replicate=3: strategy ddp does not read it; set trainer.strategy to fsdp2 or fsdp2_full.",
    ]
    (problem,) = mesh_problems("FSDP2Strategy", MeshOptions(2))
    assert problem.endswith("does not read it; give them to the class.")
    with pytest.raises(MisconfigurationException, match=r"replicate=2: strategy fsdp does not read it"):
        choose("fsdp", None, MeshOptions(replicate=2))


def test_a_precision_that_the_strategy_does_not_train_in_is_refused():
    with pytest.raises(MisconfigurationException, match=r"16-true: strategy ddp would store"):
        choose("ddp", "16-true")


def test_fsdp1_by_name_gets_a_scaler_on_which_ranks_agree():
    strategy = fsdp1.FSDP1Strategy()
    strategy.precision_plugin = FSDPPrecision("16-mixed")
    assert strategy.precision_plugin.scaler.over_ranks
    strategy.precision_plugin = FSDPPrecision("bf16-mixed")
    assert strategy.precision_plugin.scaler is None
    with pytest.raises(TypeError, match="can only work with the `FSDPPrecision` plugin"):
        strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
