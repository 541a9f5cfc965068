"""8-bit Adam on CUDA: no step waits, the CPU's and bitsandbytes' numbers, memory as predicted, two GPUs."""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes
import pytest
import torch
from eight_bit_models import Kinds, OneRow, converted, eight_bit, give_gradients, planned, train, whole, whole_states
from launch import of, run_scenarios
from lightning.pytorch.strategies import ModelParallelStrategy
from no_sync import NoSync
from tiny_fit import TinyData, TinyModule, Watch, adamw, assert_same_bits, quiet_trainer, snapshot
from tiny_gpt_run import fit
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from lit_stable.callbacks import AccumulationWindows, EightBitAdam, GradClip, GradSpikeSkip, OptimizerReset, Progress
from lit_stable.callbacks.base import MisconfigurationException
from lit_stable.callbacks.eight_bit_blocks import Moment, dequantize, quantize, rows_of, state_maps
from lit_stable.callbacks.eight_bit_states import fresh_state, state_bytes
from lit_stable.callbacks.eight_bit_step import AdamArguments, step_8_bit

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:GradSpikeSkip")]


def on_gpu(*callbacks: Any, **options: Any) -> Any:
    return quiet_trainer(*callbacks, **{"accelerator": "gpu", "max_steps": 12, "log_every_n_steps": 100, **options})


def strict() -> GradSpikeSkip:
    return GradSpikeSkip(z_score=6.0, warmup_steps=2, window=16)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "looped"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_no_step_waits_for_the_device_though_some_are_skipped(precision: str, fused: bool) -> None:
    kinds: set[str] = set()

    def note(trainer: Any, *rest: Any) -> None:
        state = trainer.optimizers[0].state[trainer.lightning_module.net[0].weight]
        kinds.update(f"{value.device.type} {value.dtype}" for key, value in state.items() if "codes" in key)

    watch = Watch("on_train_batch_end", note)  # after the fit Lightning moves states to the host
    own = [eight_bit(), strict(), GradClip(0.5), AccumulationWindows(4, 2), watch, NoSync()]
    trainer = on_gpu(*own, precision=precision)
    module = TinyModule(adamw(lr=1e-3, fused=fused), poison={4: 1e5, 6: math.nan})
    trainer.fit(module, TinyData())
    assert trainer.global_step == 12
    assert Progress.of(trainer).skipped >= 1
    assert kinds == {"cuda torch.uint8"}


def test_a_skip_on_the_device_is_exact_and_the_count_of_steps_with_it() -> None:
    after: dict[int, Any] = {}
    watch = Watch("on_train_batch_end", lambda trainer, *rest: after.update({trainer.global_step: snapshot(trainer)}))
    trainer = on_gpu(eight_bit(), strict(), watch)
    trainer.fit(TinyModule(adamw(lr=1e-3), poison={6: math.nan}), TinyData())
    assert_same_bits(after[7], after[6])
    assert {float(state["step"]) for state in trainer.optimizers[0].state.values()} == {11.0}


def test_the_gpu_agrees_with_the_cpu() -> None:
    models = [Kinds(), Kinds().cuda()]
    optimizers = [converted(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 0)
        optimizer.step()
    cpu, gpu = (whole_states(m, o) for m, o in zip(models, optimizers, strict=True))
    maps = dict(zip(("exp_avg_codes", "exp_avg_sq_codes"), state_maps("dynamic", torch.device("cpu")), strict=True))
    for name, state in cpu.items():
        for key, value in state.items():
            if value.dtype == torch.uint8:
                # On a CPU bitsandbytes looks a code up in steps of 1/32768 of the block's maximum, so it takes a
                # neighbour of the nearest for some, and below those steps one further off.
                ours, theirs = gpu[name][key].int(), value.int()
                assert (ours != theirs).float().mean() < 0.1, (name, key)
                far = (maps[key][ours] - maps[key][theirs]).abs()[(ours - theirs).abs() > 2]
                assert (far < 2**-15).all(), (name, key)
            else:
                torch.testing.assert_close(gpu[name][key], value, rtol=1e-5, atol=1e-7)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(whole(theirs), whole(ours), rtol=1e-5, atol=1e-6, msg=name)


def learned(shape: tuple[int, int]) -> tuple[list[torch.Tensor], list[Moment]]:
    """([weight, gradient], both moments) on the GPU, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).cuda() for _ in range(3)]
    values.append(0.01 * torch.rand(shape, generator=generator).cuda())
    maps = state_maps("dynamic", values[0].device)
    moments = [Moment(*quantize(v, qmap, rows_of(v)), qmap) for v, qmap in zip(values[2:], maps, strict=True)]
    return values[:2], moments


def test_bitsandbytes_own_kernel_from_the_same_state_has_the_same_codes() -> None:
    (p, g), moments = learned((4096, 1024))
    (q, h), (first, second) = learned((4096, 1024))
    step = torch.tensor(7.0, device="cuda")
    arguments = AdamArguments(1e-2, 0.9, 0.95, 1e-8, 0.0, False, True, None, None)  # it decays after the update
    step_8_bit(p, g, *moments, step, rows_of(p), arguments)
    bitsandbytes.functional.optimizer_update_8bit_blockwise(
        *("adam", h, q, first.codes, second.codes, 0.9, 0.95, 0.0, 0.0, 1e-8, 7, 1e-2),
        *(first.qmap, second.qmap, first.maxima.view(-1), second.maxima.view(-1), 0.0),
    )
    start = learned((4096, 1024))[0][0]
    torch.testing.assert_close(p - start, q - start, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(moments, (first, second), strict=True):
        assert (ours.codes == theirs.codes).float().mean() >= 0.9999
        wide = [dequantize(*m, rows_of(p)) for m in (ours, theirs)]
        torch.testing.assert_close(wide[0], wide[1], rtol=0.1, atol=1e-3 * float(wide[1].abs().max()))


def test_weights_whose_second_moment_is_lost_move_no_further_than_in_32_bit() -> None:
    lost, moved = [], []

    def count(trainer: Any, *rest: Any) -> None:
        state = trainer.optimizers[0].state[trainer.lightning_module.net.weight]
        if trainer.global_step == 1 and "exp_avg_codes" in state:
            lost.append(int(((state["exp_avg_sq_codes"] == 0) & (state["exp_avg_codes"] > 127)).sum()))

    for callback in (eight_bit(), EightBitAdam(bits=32)):
        trainer = on_gpu(callback, Watch("on_train_batch_end", count), max_steps=3)
        trainer.fit(module := OneRow(1e-4), TinyData())
        moved.append((module.after[2] - module.after[1]).abs()[0, 1:] / 1e-3)
    assert lost == [255]
    assert (moved[0] < 1.2 * moved[1]).all()
    assert moved[0].min() > 0.1


def test_a_reset_leaves_the_state_of_a_fresh_optimizer() -> None:
    found: list[Any] = []

    def note(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            found.extend({k: v.cpu() for k, v in s.items()} for s in trainer.optimizers[0].state.values())

    trainer = on_gpu(eight_bit(), OptimizerReset(start=2, hold_steps=2), Watch("on_before_backward", note), max_steps=4)
    trainer.fit(TinyModule(adamw(lr=1e-3)), TinyData())
    parameters = trainer.lightning_module.parameters()
    fresh = [fresh_state(p.cpu(), 8 if p.ndim == 2 else 32) for p in parameters]
    assert_same_bits(found, fresh)


def test_memory_is_within_a_hundredth_of_what_the_table_predicts() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 1024), *(torch.nn.Linear(1024, 4096) for _ in range(8))).cuda()
    plan = planned(model, min_8bit_size=4096)
    predicted = sum(tensor.num_bytes for tensor in plan.tensors.values())
    before = torch.cuda.memory_allocated()
    optimizer = converted(model, plan=plan)
    assert state_bytes(optimizer.state.values()) == predicted
    assert torch.cuda.memory_allocated() - before == pytest.approx(predicted, rel=0.01)
    train(model, optimizer, steps=4)
    optimizer.zero_grad(set_to_none=True)
    assert state_bytes(optimizer.state.values()) == predicted
    assert torch.cuda.memory_allocated() - before == pytest.approx(predicted, rel=0.01)


def test_an_optimizer_that_the_module_keeps_goes_on_in_a_second_fit() -> None:
    """Between fits Lightning moves module and states to the host."""

    class Keeping(TinyModule):
        def configure_optimizers(self) -> Any:
            self.made = getattr(self, "made", None) or super().configure_optimizers()
            return self.made

    module = Keeping(adamw(lr=1e-3))
    for _ in range(2):
        on_gpu(eight_bit(), max_steps=2).fit(module, TinyData(resumes=False))
    assert {float(state["step"]) for state in module.made.state.values()} == {4.0}
    assert module.made.state[module.net[0].weight]["exp_avg_codes"].dtype == torch.uint8


def test_cpu_offload_is_refused_as_the_fit_begins() -> None:
    class Offloading(TinyModule):
        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"], offload_policy=CPUOffloadPolicy())

    trainer = on_gpu(eight_bit(), strategy=ModelParallelStrategy(1, 1))
    with pytest.raises(MisconfigurationException, match=r"net.0.weight lies on cpu while the run is on cuda; .* off"):
        trainer.fit(Offloading(), TinyData())


def test_a_gpt_learns_as_in_32_bit() -> None:
    wide, narrow = (fit(accelerator="gpu", steps=10, callbacks=own) for own in ((), (eight_bit(),)))
    losses = [torch.tensor([row[1] for row in run.rows]) for run in (wide, narrow)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0.01)


NAMES = ["resume_ddp", "resume_fsdp2", "resume_fsdp2_full", "convert_fsdp2", "file_of_ddp_for_fsdp2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    folder = tmp_path_factory.mktemp("ranks")
    return run_scenarios(NAMES, folder, accelerator="gpu", script="rank_scenarios_eight_bit.py")


@of("resume_ddp", "resume_fsdp2", "resume_fsdp2_full")
def test_two_gpus_resume_within_the_kernels_noise(result: dict[str, Any]) -> None:
    assert result["uint8"] == 2 * 8
    for point, apart in result["apart"].items():
        assert apart < 2e-3, f"resumed from micro-batch {point}"  # attention's backward pass sums in no fixed order


@of("convert_fsdp2")
def test_two_gpus_convert_both_ways(result: dict[str, Any]) -> None:
    assert result["steps"] == [[1], [2], [2]]
    plain, narrow, last = result["losses"]
    assert narrow + last == pytest.approx(plain[1:], abs=5e-3)


@of("file_of_ddp_for_fsdp2")
def test_a_file_of_ddp_goes_on_sharded_with_the_same_states(result: dict[str, Any]) -> None:
    assert result == {"differing": [], "converted_differing": []}
