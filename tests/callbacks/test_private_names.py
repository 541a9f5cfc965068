"""One test per private name of Lightning's loops: when an upgrade moves one, it fails here and says which."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tiny_fit import TinyData, TinyModule, Watch, quiet_trainer, sample
from torch.utils.data import DataLoader

from lit_stable.callbacks import private_names


def fit_watching(hook: str, look: Any, **options: Any) -> Any:
    trainer = quiet_trainer(Watch(hook, look), **{"max_steps": 4, **options})
    trainer.fit(TinyModule(), TinyData(resumes=False))
    return trainer


def test_ready_batches_counts_the_batches_begun_in_the_epoch() -> None:
    seen: list[int] = []
    fit_watching("on_train_batch_start", lambda t, *rest: seen.append(private_names.ready_batches(t)))
    assert seen == [1, 2, 3, 4]


def test_a_validation_by_the_clock_is_made_when_its_time_is_up() -> None:
    """Pins ``_val_check_time_interval`` and ``_last_val_time``."""
    options = {"check_val_every_n_epoch": None, "val_check_interval": "01:00:00:00"}
    if not hasattr(quiet_trainer(), "_val_check_time_interval"):
        pytest.skip("this Lightning does not validate by the clock")
    for ask, expected in ((lambda trainer: None, []), (private_names.validate_by_clock, [2])):
        watch = Watch("on_train_batch_end", lambda t, *rest, ask=ask: ask(t) if t.global_step == 2 else None)
        trainer = quiet_trainer(watch, max_steps=4, **options)
        trainer.fit(TinyModule(), TinyData(resumes=False, validation_batches=1))
        assert trainer.lightning_module.validated_after == expected


def test_the_step_is_due_when_ready_batches_is_a_multiple_of_the_window() -> None:
    """Pins ``_accumulated_batches_reached``: the modulo and the division that ``Window`` stands in for."""
    steps: list[int] = []

    class Spy(int):
        def __rmod__(self, ready: int) -> int:
            steps.append(ready)
            return ready % int(self)

    def replace(trainer: Any) -> None:
        trainer.accumulate_grad_batches = Spy(2)

    trainer = fit_watching("on_train_start", replace, max_steps=2)
    assert set(steps) == {0, 1, 2, 3, 4}
    assert trainer.global_step == 2


def test_should_accumulate_is_true_inside_a_window() -> None:
    seen: list[bool] = []
    fit_watching(
        "on_train_batch_end",
        lambda t, *rest: seen.append(private_names.window_is_open(t)),
        accumulate_grad_batches=3,
        max_steps=2,
    )
    assert seen == [True, True, False, True, True, False]


def test_batches_that_stepped_is_what_the_loggers_count_by() -> None:
    loop = quiet_trainer().fit_loop.epoch_loop
    assert loop._batches_that_stepped == 0
    before_step: list[int] = []
    fit_watching("on_before_optimizer_step", lambda t, *r: before_step.append(private_names.batches_that_stepped(t)))
    assert before_step == [0, 1, 2, 3]
    seen: list[int] = []

    def shift(trainer: Any, *rest: Any) -> None:
        trainer.fit_loop.epoch_loop._batches_that_stepped += 10
        private_names.align_logged_step(trainer)
        seen.append(trainer.fit_loop.epoch_loop._batches_that_stepped)

    fit_watching("on_train_batch_start", shift)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(("cure", "batches"), [(False, [3, 0, 1]), (True, [0, 1, 2])])
def test_a_fit_that_goes_on_where_one_ended_with_an_epoch_begins_the_next(
    cure: bool, batches: list[int], tmp_path: Path
) -> None:
    def loader() -> Any:
        return DataLoader([sample(i)[None] for i in range(3)], batch_size=None)  # type: ignore[arg-type]

    first = quiet_trainer(max_steps=3)
    first.fit(TinyModule(), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    seen: list[int] = []
    watch = Watch("on_train_batch_start", lambda trainer, batch, batch_idx: seen.append(batch_idx))
    begin = Watch("on_train_start", lambda t: private_names.begin_epoch_anew_if_full(t) if cure else None)
    quiet_trainer(begin, watch, max_steps=6).fit(TinyModule(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert seen == batches


@pytest.mark.parametrize(("cure", "batches"), [(False, [4, 5, 0]), (True, [3, 4, 5])])
def test_a_fit_that_goes_on_within_a_window_replays_it(cure: bool, batches: list[int], tmp_path: Path) -> None:
    loader = DataLoader([sample(i)[None] for i in range(6)], batch_size=None)  # type: ignore[arg-type]
    save = Watch("on_train_batch_end", lambda t, *rest: t.save_checkpoint(tmp_path / f"{rest[-1]}.ckpt"))
    quiet_trainer(save, max_steps=2, accumulate_grad_batches=3).fit(TinyModule(), loader)
    seen: list[int] = []
    watch = Watch("on_train_batch_start", lambda trainer, batch, batch_idx: seen.append(batch_idx))
    begin = Watch("on_train_start", lambda t: private_names.replay_window(t, 1) if cure else None)
    trainer = quiet_trainer(begin, watch, max_steps=3, accumulate_grad_batches=3)
    trainer.fit(TinyModule(), loader, ckpt_path=tmp_path / "3.ckpt")
    assert seen[:3] == batches
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == 3


def test_a_batch_that_is_made_the_last_one_ends_its_epoch() -> None:
    places: list[int] = []

    def second_is_last(trainer: Any, batch: Any, batch_idx: int) -> None:
        places.append(batch_idx)
        if batch_idx == 1:
            private_names.make_last_batch(trainer)

    fit_watching("on_train_batch_start", second_is_last)
    assert places == [0, 1, 0, 1]


def test_an_epoch_that_is_cut_ends_on_its_last_batch_and_so_do_later_ones() -> None:
    last: list[bool] = []
    watch = Watch("on_train_batch_start", lambda trainer, *rest: last.append(trainer.is_last_batch))
    cut = Watch("on_train_start", lambda trainer: private_names.cut_epoch(trainer, 3))
    trainer = quiet_trainer(cut, watch, max_steps=-1, max_epochs=2)
    trainer.fit(TinyModule(), DataLoader([sample(i)[None] for i in range(5)], batch_size=None))  # type: ignore[arg-type]
    assert last == [False, False, True] * 2


def test_the_sigterm_broadcast_is_a_method_that_takes_nothing_and_is_called_on_more_than_one_device() -> None:
    trainer = quiet_trainer()
    loop = trainer.fit_loop.epoch_loop
    method = getattr(type(loop), "_broadcast_sigterm_tensor", None)
    if method is None:  # an older Lightning has none to silence
        private_names.silence_sigterm_broadcast(trainer)
        private_names.restore_sigterm_broadcast(trainer)
        assert not hasattr(loop, "_broadcast_sigterm_tensor")
        return
    private_names.silence_sigterm_broadcast(trainer)
    assert loop._broadcast_sigterm_tensor() is None
    assert loop._broadcast_sigterm_tensor is not method
    private_names.restore_sigterm_broadcast(trainer)
    assert loop._broadcast_sigterm_tensor.__func__ is method
    private_names.restore_sigterm_broadcast(trainer)  # nothing is there: nothing happens


def test_the_signal_of_a_requeue_is_known_where_lightning_heeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_names.requeue_signal(quiet_trainer()) is None
    for name, value in {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_ID": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = [
        private_names.requeue_signal(quiet_trainer(plugins=[SLURMEnvironment(**options)]))
        for options in ({}, {"requeue_signal": signal.SIGUSR2}, {"auto_requeue": False})
    ]
    assert found == [signal.SIGUSR1, signal.SIGUSR2, None]


def test_the_sigterm_broadcast_can_be_watched_unless_it_is_silenced() -> None:
    trainer = quiet_trainer()
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        assert not private_names.watch_sigterm_broadcast(trainer, lambda: None, lambda: None)
        return
    calls: list[str] = []
    private_names.silence_sigterm_broadcast(trainer)
    assert not private_names.watch_sigterm_broadcast(trainer, lambda: None, lambda: None)
    private_names.restore_sigterm_broadcast(trainer)
    assert private_names.watch_sigterm_broadcast(trainer, lambda: calls.append("a"), lambda: calls.append("b"))
    loop._broadcast_sigterm_tensor()  # without a process group it does nothing, and says nothing
    assert calls == ["a", "b"]
    private_names.restore_sigterm_broadcast(trainer)
    assert "_broadcast_sigterm_tensor" not in loop.__dict__


def test_the_row_of_a_step_has_the_number_of_steps_before_it() -> None:
    seen: list[int] = []
    fit_watching("on_train_batch_end", lambda t, *rest: seen.append(private_names.batches_that_stepped(t)))
    assert seen == [0, 1, 2, 3]


def test_a_function_can_be_called_behind_all_that_ends_a_batch_and_before_it_is_counted() -> None:
    """Pins ``_logger_connector`` and ``on_batch_end``."""
    seen: list[Any] = []

    def ask(trainer: Any, *rest: Any) -> None:
        for name in ("first", "second"):
            private_names.after_batch_end(trainer, lambda name=name: note(trainer, name))

    def note(trainer: Any, name: str) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress.total
        seen.append((name, trainer.global_step, progress.processed, progress.completed))

    class Ends(TinyModule):
        def on_train_batch_end(self, *rest: Any) -> None:
            note(self.trainer, "module")

    late = Watch("on_train_batch_end", lambda trainer, *rest: note(trainer, "late"))
    trainer = quiet_trainer(Watch("on_train_batch_end", ask), late, max_steps=2)
    trainer.fit(Ends(), TinyData(resumes=False))
    assert seen == [(name, n, n, n - 1) for n in (1, 2) for name in ("late", "module", "first", "second")]
    assert "on_batch_end" not in vars(trainer._logger_connector)


def test_each_call_of_log_makes_a_tensor_of_its_own_which_stays() -> None:
    """Pins ``_results``, ``has_reset``, ``_forward_cache`` and ``meta.forked_name``."""

    def log(trainer: Any, *rest: Any) -> None:
        if trainer.global_step != 1:
            trainer.lightning_module.log("a", float(trainer.global_step))
        trainer.lightning_module.log("b", 1.0, on_epoch=True)

    seen: list[Any] = []
    watch = Watch("on_train_batch_end", lambda t, *rest: seen.append(private_names.last_logged(t)))
    quiet_trainer(Watch("on_before_backward", log), watch, max_steps=3).fit(TinyModule(), TinyData(resumes=False))
    (first, second, third), key = seen, "on_before_backward.a"
    assert first.keys() == {key, "on_before_backward.b"}
    assert first[key][0] == ("a",)
    assert first["on_before_backward.b"][0] == ("b", "b_step")
    assert first[key][1] is second[key][1] is not third[key][1]
    assert [float(row[key][1]) for row in seen] == [0, 0, 2]


def test_a_fit_can_begin_with_the_validation_of_the_step_before(tmp_path: Path) -> None:
    """Pins ``advance``, ``_should_accumulate``, ``_batches_that_stepped`` and ``val_loop.restarting``."""

    def save(trainer: Any, *rest: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    def begin(trainer: Any) -> None:
        private_names.validate_first(trainer, 1, lambda: setattr(trainer, "val_check_batch", 1))

    def note(trainer: Any, *rest: Any) -> None:
        steps.append((trainer.global_step, private_names.batches_that_stepped(trainer)))

    steps: list[tuple[int, int]] = []
    options: dict[str, Any] = {"check_val_every_n_epoch": None, "val_check_interval": 2}
    data = TinyData(validation_batches=2, resumes=False)
    quiet_trainer(Watch("on_validation_start", save), max_steps=2, **options).fit(TinyModule(), data)
    options["val_check_interval"] = 100
    callbacks = [Watch("on_train_start", begin), Watch("on_validation_batch_start", note)]
    trainer = quiet_trainer(*callbacks, Watch("on_train_batch_start", note), max_steps=3, **options)
    trainer.fit(TinyModule(), data, ckpt_path=tmp_path / "a.ckpt")
    assert steps == [(2, 1), (2, 1), (2, 2), (3, 2), (3, 2)]
    assert not {"advance", "_should_accumulate"} & vars(trainer.fit_loop.epoch_loop).keys()


def test_validation_is_due_when_the_batch_count_is_a_multiple_of_val_check_batch() -> None:
    """Pins the modulo that ``StepCheck`` stands in for."""

    class Never(int):
        def __rmod__(self, batches: int) -> int:
            return 1

    def replace(trainer: Any) -> None:
        trainer.val_check_batch = Never(1)

    trainer = quiet_trainer(Watch("on_train_start", replace), max_steps=2, check_val_every_n_epoch=None)
    trainer.fit(module := TinyModule(), TinyData(resumes=False, validation_batches=1))
    assert module.validated_after == []


def test_the_strategys_mesh_is_a_private_attribute_that_is_none_before_the_processes_are_up() -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy()
    assert strategy._device_mesh is None
    assert private_names.device_mesh(quiet_trainer(strategy=strategy)) is None
    assert private_names.device_mesh(quiet_trainer()) is None
    with pytest.raises(RuntimeError, match="device mesh before processes have initialized"):
        _ = strategy.device_mesh


def test_compiled_graphs_counts_every_graph_that_dynamo_builds() -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    before = private_names.compiled_graphs()
    for length in (2, 3, 3, 4):
        double(torch.ones(length))
    assert private_names.compiled_graphs() == before + 3


def test_the_training_loop_hands_each_batch_to_the_strategys_batch_to_device() -> None:
    """Public, but that the loop looks it up on the object is not promised: ``SequenceLengthWarmup`` shadows it."""
    seen: list[bool] = []

    def shadow(trainer: Any) -> None:
        original = trainer.strategy.batch_to_device
        trainer.strategy.batch_to_device = lambda batch, **k: seen.append(trainer.training) or original(batch, **k)

    fit_watching("on_train_start", shadow, max_steps=2)
    assert seen == [True, True]


def test_no_other_file_of_the_package_touches_a_private_name_of_the_trainer_or_its_loops() -> None:
    for path in Path(private_names.__file__).parent.glob("*.py"):
        if path.name.startswith("private_"):
            continue
        text = path.read_text()
        found = set(re.findall(r"(?:trainer|strategy|loop|module|handle|optimizer)\.(_[a-z]\w*)", text))
        found |= set(re.findall(r"getattr\([\w.]+, \"(_[a-z]\w*)\"", text))
        found |= set(re.findall(r"torch\.(_(?!foreach_|dynamo)[a-z]\w*)", text))
        assert not found, path.name


def test_a_strategy_knows_how_long_a_collective_may_take() -> None:
    strategy = DDPStrategy(timeout=timedelta(seconds=6), process_group_backend="gloo")
    trainer = quiet_trainer(strategy=strategy, devices=1)
    assert private_names.collective_timeout(trainer) == timedelta(seconds=6)
    assert private_names.collective_timeout(quiet_trainer()) is None


@pytest.mark.parametrize(
    ("strategy", "shards"),
    [
        (FSDPStrategy(state_dict_type="sharded"), True),
        (FSDPStrategy(state_dict_type="full"), False),
        (ModelParallelStrategy(save_distributed_checkpoint=True), True),
        (ModelParallelStrategy(save_distributed_checkpoint=False), False),
        (DDPStrategy(), False),
    ],
)
def test_strategies_keep_whether_each_rank_writes_its_part(strategy: Any, shards: bool) -> None:
    assert private_names.saves_shards(SimpleNamespace(strategy=strategy)) is shards
