"""New runs that begin with weights of a checkpoint."""

from __future__ import annotations

import pytest
import torch
from tiny_gpt_run import SaveEveryMicroBatch, fit, tiny_module
from tiny_recipe import command

from lit_stable.callbacks.checkpoint_contents import CheckpointError
from lit_stable.run.branch import read_parent


@pytest.mark.parametrize("kind", ["auto", "fsdp2"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_any_layout_begins_with_the_weights_of_any_layout(tmp_path, kind, strategy):
    trained = fit(kind, steps=2, callbacks=(SaveEveryMicroBatch(tmp_path, only=(8,)),))
    module = tiny_module()
    module.initial_weights = tmp_path / "m8.ckpt"
    begun = fit(strategy, steps=1, module=module)  # at rate 0
    assert begun.rows[0][0] == 1
    assert begun.weights.keys() == trained.weights.keys()
    for name, weight in begun.weights.items():
        assert torch.equal(weight, trained.weights[name])
    again = begun.trainer.optimizers[0]
    assert {float(state["step"]) for state in again.state.values()} == {1.0}


def test_weights_of_another_model_and_damaged_ones_are_refused(tmp_path):
    fit(steps=1, callbacks=(SaveEveryMicroBatch(tmp_path, only=(4,)),))
    path = tmp_path / "m4.ckpt"
    for options, text in (
        ({"d_model": 16}, "is of another model: gpt.wte.weight has shape"),
        ({"position": "rope"}, "position=rope"),
    ):
        module = tiny_module(**options)
        module.initial_weights = path
        with pytest.raises(CheckpointError, match=text):
            fit(steps=1, module=module)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    module = tiny_module()
    module.initial_weights = path
    with pytest.raises(CheckpointError, match="begin with another checkpoint"):
        fit(steps=1, module=module)


def test_it_needs_a_checkpoint_and_is_a_branch_at_its_step(run, recipe):
    refused = command("fit", "--config", recipe, "--ckpt_part", "weights")
    assert refused.code == 2
    assert "ckpt_part=weights: says how a run begins" in refused.err
    both = command("fit", "--config", recipe, "--ckpt_part", "weights", "--resume", "auto")
    assert both.code == 2
    words = ("--ckpt_path", f"{run}@4", "--ckpt_part", "weights", "--run.name", "anew", "--trainer.max_steps", "2")
    done = command("fit", "--config", recipe, *words)
    assert done.code == 0, done.err
    parent = read_parent(run.parent.parent / "anew" / "0001")
    assert (parent.run, parent.step) == ("../../tiny/0001", 4)
    assert parent.differences == ["ckpt_part: all -> weights"]
    assert "step 1/2 " in done.out
    to_go_on = next(line for line in done.out.splitlines() if line.startswith("to go on"))
    assert "ckpt_part" not in to_go_on
