"""A language model that sees: nothing at first, and then through the new blocks alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_stable.model.config import GPTConfig
from lit_stable.model.gpt import GPT
from lit_stable.model.init import initialise
from lit_stable.vlm.cross_attention import CrossAttention, Gate
from lit_stable.vlm.options import GatedOptions, VisionOptions
from lit_stable.vlm.sight import Sight, build_sight
from lit_stable.vlm.vision import patches, scaled

LANGUAGE = GPTConfig(vocab_size=32, n_layer=3, n_head=2, d_model=16, max_length=12)
VISION = VisionOptions(image_size=4, patch=2, n_layer=1, n_head=2, d_model=8)
CPU = torch.device("cpu")


def language() -> GPT:
    gpt = GPT(LANGUAGE)
    initialise(gpt, 0)
    return gpt


def sight(**gated: Any) -> Sight:
    return build_sight(LANGUAGE, GatedOptions(**gated), VISION, seed=1, device=CPU)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (2, 7), generator=generator)
    return ids, torch.randint(256, (2, 1, 4, 4), generator=generator, dtype=torch.uint8)


def open_gates(module: nn.Module, value: float = 0.5) -> None:
    for gate in module.modules():
        if isinstance(gate, Gate):
            nn.init.constant_(gate.weight, value)


@pytest.mark.parametrize("qk_norm", ["none", "layernorm", "rmsnorm", "l2"])
@pytest.mark.parametrize("norm_position", ["pre", "sandwich"])
def test_at_first_it_is_the_language_model_alone_bit_for_bit(qk_norm, norm_position):
    gpt, ids_images = language(), example()
    eyes = sight(qk_norm=qk_norm, norm_position=norm_position)
    alone = gpt(ids_images[0])
    assert torch.equal(eyes(gpt, *ids_images), alone)
    open_gates(eyes)
    assert not torch.allclose(eyes(gpt, *ids_images), alone)
    assert torch.equal(gpt(ids_images[0]), alone)  # nothing is left on the language model


def test_at_first_only_gates_have_a_gradient():
    gpt, eyes = language(), sight()
    eyes(gpt, *example()).square().mean().backward()
    moving = {name for name, p in eyes.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert moving == {f"blocks.{n}.{part}_gate.weight" for n in range(3) for part in ("attention", "mlp")}
    open_gates(eyes)
    eyes(gpt, *example()).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in eyes.parameters() if p.ndim > 1)


def test_what_it_writes_depends_on_the_image_and_on_the_past_alone():
    gpt, eyes, (ids, images) = language(), sight(), example()
    open_gates(eyes)
    seen = eyes(gpt, ids, images)
    assert not torch.allclose(eyes(gpt, ids, 255 - images), seen)
    later = ids.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 32
    assert torch.allclose(eyes(gpt, later, images)[:, :5], seen[:, :5], atol=1e-6)


@pytest.mark.parametrize(("every", "first", "places"), [(1, 0, "012"), (2, 0, "02"), (1, 1, "12"), (3, 2, "2")])
def test_new_blocks_stand_where_they_are_asked_to(every, first, places):
    assert list(sight(every=every, first=first).blocks) == list(places)


def test_with_first_1_a_pretrained_layer_comes_right_behind_the_embedding():
    """V06: the input of the language model's first layer is the embedding, whatever the image is."""
    gpt, (ids, images) = language(), example()
    entered: list[torch.Tensor] = []
    gpt.blocks[0].attention_norm.register_forward_hook(lambda module, args, output: entered.append(args[0]))
    for first in (0, 1):
        eyes = sight(first=first)
        open_gates(eyes)
        eyes(gpt, ids, images)
    assert not torch.equal(entered[0], gpt.embed(ids))
    assert torch.equal(entered[1], gpt.embed(ids))


def test_options_that_no_layer_fits_are_refused():
    with pytest.raises(ValueError, match=r"first=3: the language model has layers 0 to 2"):
        sight(first=3)
    with pytest.raises(ValueError, match=r"every=0.*\n.*first=-1"):
        GatedOptions(every=0, first=-1)
    with pytest.raises(ValueError, match=r"gated.qk_l2_scale=-1.0: .*\n.*gated.mlp='tanh': must be one of gelu"):
        GatedOptions(qk_l2_scale=-1.0, mlp="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"patch=3: must divide image_size=8"):
        VisionOptions(patch=3)
    with pytest.raises(ValueError, match=r"channels=2: must be 1 or 3"):
        VisionOptions(channels=2)
    with pytest.raises(ValueError, match=r"each is a vision backbone"):
        VisionOptions(run="vision", hf="clip")


# -- attention -------------------------------------------------------------------------------------------------------


def attention(qk_norm: str, gain: float = 1.0, **options: Any) -> CrossAttention:
    config = GatedOptions(qk_norm=qk_norm, **options).config(LANGUAGE)  # type: ignore[arg-type]
    built = CrossAttention(config, 8)
    torch.manual_seed(0)
    for parameter in built.parameters():
        nn.init.normal_(parameter) if parameter.ndim > 1 else nn.init.constant_(parameter, gain)
    return built


def logits(built: CrossAttention, size: float) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def note(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(q @ k.transpose(-1, -2) * scale)
        return v.mean(2, keepdim=True).expand(-1, -1, q.shape[2], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.functional.scaled_dot_product_attention", note)
        built(size * torch.randn(2, 5, 16), size * torch.randn(2, 4, 8))
    return seen[0]


@pytest.mark.parametrize("qk_norm", ["layernorm", "rmsnorm"])
def test_normed_queries_and_keys_bound_the_logits(qk_norm):
    """V11: at most sqrt(K) gain^2, however large the activations are; without a norm they grow with them."""
    largest = logits(attention(qk_norm, gain=2.0, bias=False), 1000.0).abs().max()
    assert 0.5 * 8**0.5 * 4 < largest <= 8**0.5 * 4 * 1.0001
    assert logits(attention("none"), 1000.0).abs().max() > 1e5


def test_l2_norm_makes_logits_cosines_times_a_learned_factor():
    """V12: the factor starts at log2(L^2 - L); with a fixed one of 1 logits are cosines."""
    eyes = sight(qk_norm="l2")
    assert eyes.blocks["0"].attention.qk_scale.scale.item() == pytest.approx(torch.tensor(132.0).log2().item())
    cosines = logits(attention("l2", qk_l2_scale=1.0), 1000.0)
    assert 0.5 < cosines.abs().max() <= 1.0001


def test_sandwich_norms_make_what_a_sublayer_puts_out_of_size_one():
    """V07: the root mean square behind out_proj and FC2 is 1, whatever went before."""
    eyes, seen = sight(norm_position="sandwich", norm="rmsnorm"), []
    for name, module in eyes.blocks.named_modules():
        if name.endswith("output_norm"):
            module.register_forward_hook(lambda m, args, output: seen.append(output.square().mean(-1).sqrt()))
    open_gates(eyes)
    for parameter in eyes.blocks.parameters():
        parameter.data.mul_(100 if parameter.ndim > 1 else 1)
    eyes(language(), *example())
    assert len(seen) == 6
    assert torch.cat([each.flatten() for each in seen]).sub(1).abs().max() < 1e-3


def test_without_bias_no_linear_layer_and_no_norm_of_a_new_block_has_one():
    assert any(name.endswith("bias") for name, _ in sight().blocks.named_parameters())
    assert not any(name.endswith("bias") for name, _ in sight(bias=False).blocks.named_parameters())
    kinds = {type(m).__name__ for m in sight(norm="rmsnorm").blocks.modules()}
    assert "RMSNorm" in kinds
    assert "LayerNorm" not in kinds


# -- vision ----------------------------------------------------------------------------------------------------------


def test_patches_run_row_by_row():
    image = torch.arange(16).reshape(1, 1, 4, 4).float()
    assert patches(image, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert scaled(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


def test_initial_weights_follow_from_seed_and_name_alone():
    one, other = sight(), sight(every=2)
    assert torch.equal(one.blocks["2"].attention.q.weight, other.blocks["2"].attention.q.weight)
    assert not torch.equal(one.blocks["0"].attention.q.weight, one.blocks["2"].attention.q.weight)
    assert one.blocks["0"].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert one.vision.blocks[0].attention.q.bias.abs().max() == 0
    assert (one.vision.norm.weight == 1).all()
