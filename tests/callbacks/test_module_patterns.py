from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lit_stable.callbacks.module_patterns import import_types, is_norm, norm_parameter_names, select
from lit_stable.callbacks.wrapper_names import unwrapped


class T5LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class ScaleOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(2))


def model(wrap: bool = False) -> nn.Module:
    """No parameter name contains "norm", as in GPT-2."""

    def block() -> nn.Module:
        made: nn.Module = nn.ModuleDict({"ln_1": nn.LayerNorm(2), "fc": nn.Linear(2, 2), "ln_2": nn.RMSNorm(2)})
        return checkpoint_wrapper(made) if wrap else made

    root = nn.Module()
    root.blocks = nn.ModuleList([block(), block()])
    root.ln_f = torch.compile(T5LayerNorm()) if wrap else T5LayerNorm()
    root.scale = ScaleOnly()
    return root


def test_norms_are_known_by_type() -> None:
    assert all(is_norm(m) for m in (nn.LayerNorm(2), nn.RMSNorm(2), T5LayerNorm()))
    assert not any(is_norm(m) for m in (nn.Linear(2, 2), nn.GroupNorm(1, 2), ScaleOnly()))
    assert is_norm(ScaleOnly(), (ScaleOnly,))
    # fully_shard gives an instance a new class that derives from the old one and has another name.
    assert is_norm(type("FSDPWhatever", (nn.LayerNorm,), {})(2))


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "wrapped"])
def test_selects_by_pattern_and_kind_under_any_wrapper(wrap: bool) -> None:
    module = model(wrap)
    norms = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight")}
    linear = {f"blocks.{i}.fc.{name}" for i in (0, 1) for name in ("weight", "bias")}
    assert norm_parameter_names(module) == norms | {"ln_f.weight"}
    assert select(module, ["*"], "only") == norms | {"ln_f.weight"}
    assert select(module, ["blocks"], "only") == select(module, ["blocks.*"], "only") == norms
    assert select(module, ["blocks"], "except") == linear
    assert select(module, ["blocks.1"], "with") == {n for n in norms | linear if n.startswith("blocks.1")}
    assert select(module, ["*.ln_2", "ln_f"], "only") == {"blocks.0.ln_2.weight", "blocks.1.ln_2.weight", "ln_f.weight"}
    assert select(module, ["scale"], "only", (ScaleOnly,)) == {"scale.g"}


def test_a_shared_parameter_is_selected_by_any_of_its_owners() -> None:
    root = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    root["head"].weight = root["embedding"].weight
    assert select(root, ["head"], "with") == {"embedding.weight"}


def test_names_lose_the_parts_that_wrappers_add() -> None:
    assert unwrapped("_fsdp_wrapped_module.a._orig_mod") == "a"
    assert unwrapped("my_orig_mod.weight") == "my_orig_mod.weight"


@pytest.mark.parametrize(
    ("patterns", "norms", "message"),
    [
        (["block.0"], "only", r"pattern 'block.0': matches no module; names near it are blocks"),
        (["*", "lnf"], "only", r"pattern 'lnf': matches no module; names near it are .*ln_f"),
        (["zzz"], "with", r"pattern 'zzz': matches no module; names near it are blocks"),
        (["*.fc"], "only", r"pattern '\*.fc': no norm .*, which are Linear; norms elsewhere are blocks.0.ln_1"),
        (["ln_f"], "except", r"pattern 'ln_f': the modules that it matches own no parameters outside norms"),
    ],
)
def test_a_pattern_that_selects_nothing_is_refused_with_near_names(
    patterns: list[str], norms: str, message: str
) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        select(model(), patterns, norms)  # type: ignore[arg-type]


def test_a_model_without_norms_is_told_how_to_name_its_own() -> None:
    with pytest.raises(
        MisconfigurationException, match="which are ScaleOnly; name the classes that are norms in norm_t"
    ):
        select(nn.ModuleDict({"scale": ScaleOnly()}), ["*"], "only")


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"pattern 'act': the modules that it matches own no parameters\.$"
    ):
        select(nn.ModuleDict({"act": nn.Tanh()}), ["act"], "with")


def test_types_are_imported_by_path() -> None:
    assert import_types(["torch.nn.GroupNorm"]) == (nn.GroupNorm,)


@pytest.mark.parametrize("path", ["torch.nn.GruopNorm", "no_such_package.Norm", "GroupNorm"])
def test_a_type_that_cannot_be_imported_is_refused(path: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"`norm_types='{path}'`: cannot be imported .* give the full"):
        import_types([path])


def test_a_path_to_something_else_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"`norm_types='torch.nn.functional'`: is no class but a module"
    ):
        import_types(["torch.nn.functional"])
