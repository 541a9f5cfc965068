from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer
from tiny_gpt_run import fit

from lit_stable.callbacks import Events, InvariantCheck, InvariantViolation
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.events import read_events
from lit_stable.callbacks.invariant_check import odd_ranks


def check(module: Any, *others: Any, **options: Any) -> Any:
    trainer = quiet_trainer(InvariantCheck(**options), *others, max_steps=3, log_every_n_steps=1)
    trainer.fit(module, TinyData())
    return trainer


def test_the_odd_ranks_are_those_against_the_majority() -> None:
    whole = [0] * 4
    assert odd_ranks(whole, [5, 5, 5, 5]) == []
    assert odd_ranks(whole, [5, 5, 6, 5]) == [2]
    assert odd_ranks([0, 0], [5, 6]) == [1]  # of two nobody can tell: the lower rank counts as right
    assert odd_ranks([1, 1, 2, 2], [5, 5, 6, 6]) == []  # two pieces, two copies of each
    assert odd_ranks([1, 2, 1, 2], [5, 6, 5, 7]) == [3]


def test_a_healthy_run_has_no_violation() -> None:
    trainer = check(TinyModule())
    assert float(trainer.callback_metrics["stability/invariant_violations"]) == 0.0


def test_a_frozen_weight_that_moves_is_found_and_named(tmp_path: Path) -> None:
    module = TinyModule()
    module.net[0].bias.requires_grad_(False)
    module.make_optimizer = lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)

    def touch(trainer: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            with torch.no_grad():
                module.net[0].bias[0] += 1e-6

    channel = Events()
    channel.folder = tmp_path
    with pytest.raises(InvariantViolation, match=r"step 2: .*a frozen parameter has changed, parameter net.0.bias"):
        check(module, channel, Watch("on_before_optimizer_step", touch))
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event.kind, event.step, event.evidence["parameter"]) == ("invariant", 2, "net.0.bias")


def test_a_tie_that_breaks_is_found() -> None:
    def untie(trainer: Any, optimizer: Any) -> None:
        gpt = trainer.lightning_module.gpt
        gpt.head.weight = torch.nn.Parameter(gpt.head.weight.detach().clone())

    with pytest.raises(InvariantViolation, match=r"no longer one, parameters \['gpt.wte.weight', 'gpt.head.weight'\]"):
        fit(steps=2, callbacks=(InvariantCheck(), Watch("on_before_optimizer_step", untie)))


def test_what_must_be_tied_and_is_not_is_refused_at_the_start() -> None:
    names = [["gpt.wte.weight", "gpt.head.weight"]]
    fit(steps=1, callbacks=(InvariantCheck(tied=names),))
    with pytest.raises(MisconfigurationException, match="are not one parameter at the start"):
        fit(steps=1, callbacks=(InvariantCheck(tied=names),), tied=False)


@pytest.mark.parametrize(("times", "words"), [(0, "no"), (2, "2")])
def test_a_weight_in_no_group_or_in_two_is_refused_at_the_start(times: int, words: str) -> None:
    def optimizer(parameters: Any) -> Any:
        first, *rest = parameters
        made = torch.optim.SGD([{"params": rest}, {"params": [torch.nn.Parameter(torch.ones(1))]}], lr=0.1)
        for _ in range(times):
            made.param_groups[1]["params"].append(first)
        return made

    with pytest.raises(MisconfigurationException, match=rf"net.0.weight is in {words} optimizer groups"):
        check(TinyModule(optimizer))
