from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer

from lit_stable.callbacks import BatchSizeWarmup
from lit_stable.callbacks.progress import Progress
from lit_stable.data import corpus
from lit_stable.data.corpus import PythonStandardLibrary
from lit_stable.data.datamodule import TokenDataModule
from lit_stable.data.description import describe_data
from lit_stable.data.epochs import SampleOrder
from lit_stable.data.mask_repeats import MaskRepeats
from lit_stable.data.prepare import prepare
from lit_stable.data.sources import Source
from lit_stable.data.store import TokenStore
from lit_stable.data.weights import WeightSchedule

SIZES = {"sequence_length": 8, "micro_batch": 2, "global_batch": 4}


def write_text(folder, name: str, tokenizer: str = "bytes", validation_fraction: float = 0.2):
    (folder / f"{name}.txt").write_text("\n\n".join(f"{name} document {number}" for number in range(60)))
    prepare([folder / f"{name}.txt"], folder / name, tokenizer, validation_fraction, "\n\n", report=lambda _: None)
    return str(folder / name)


@pytest.fixture
def folder(tmp_path):
    return write_text(tmp_path, "text")


def attach(data: TokenDataModule, rank: int = 0, size: int = 1, samples: int = 0) -> Progress:
    progress = Progress()
    progress.samples = samples
    progress.steps = samples // SIZES["global_batch"]
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(callbacks=[progress], strategy=strategy, global_rank=rank, world_size=size)
    data.setup()
    return progress


class Recorder(LightningModule):
    """A model that remembers what it read and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows: list[torch.Tensor] = []
        self.validation_rows = 0

    def training_step(self, batch, batch_idx):
        self.rows.append(batch["input_ids"])
        return self.weight * batch["input_ids"].sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validation_rows += int((batch["labels"][:, 0] != -100).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(data: TokenDataModule, steps: int, checkpoint=None) -> tuple[Trainer, Recorder]:
    recorder = Recorder()
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=data.accumulation(1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Progress()],
    )
    trainer.fit(recorder, datamodule=data, ckpt_path=checkpoint)
    return trainer, recorder


def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(tmp_path, folder):
    def data(num_workers: int, micro_batch: int = 2) -> TokenDataModule:
        sizes = SIZES | {"micro_batch": micro_batch}
        return TokenDataModule({"text": Source(folder)}, **sizes, num_workers=num_workers, skip_steps=["3-4"])

    straight_trainer, straight = fit(data(num_workers=0), 6)
    first_trainer, first = fit(data(num_workers=1), 2)
    first_trainer.save_checkpoint(tmp_path / "a.ckpt")
    second_trainer, second = fit(data(num_workers=0, micro_batch=4), 6, tmp_path / "a.ckpt")
    assert torch.equal(torch.cat(first.rows + second.rows), torch.cat(straight.rows))
    for trainer in (straight_trainer, second_trainer):
        progress = Progress.of(trainer)
        assert (progress.samples, progress.dropped, progress.requests) == (24, [(8, 16)], ["3-4"])


def test_skipping_steps_drops_exactly_their_data(folder):
    plain = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0)
    skipping = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0, skip_steps=["2", "3-4"])
    all_rows = torch.cat(fit(plain, 6)[1].rows)
    trainer, recorder = fit(skipping, 3)
    assert torch.equal(torch.cat(recorder.rows), torch.cat([all_rows[:4], all_rows[16:24]]))
    assert Progress.of(trainer).samples == 12


def test_a_skip_of_committed_steps_is_refused(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, skip_steps=["3-4"])
    attach(data, samples=12)
    with pytest.raises(ValueError, match=r"skip_steps=3-4: begins at a step that is committed already"):
        data.train_dataloader()


def test_ranks_share_a_step(folder):
    rows = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        data = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0)
        attach(data, rank, size, samples=8)
        rows.append(next(iter(data.train_dataloader()))["input_ids"])
    alone = TokenDataModule({"text": Source(folder)}, **(SIZES | {"micro_batch": 4}), num_workers=0)
    attach(alone, samples=8)
    together = next(iter(alone.train_dataloader()))["input_ids"]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(torch.cat(rows[1:]), together)


def test_batch_sizes_must_fit_the_ranks(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES)
    assert data.accumulation(1) == 2
    attach(data, size=3)
    with pytest.raises(ValueError, match=r"data\.global_batch=4: must be a multiple of data\.micro_batch=2 x 3"):
        data.train_dataloader()


def test_validation_comes_with_the_sources_or_by_name(tmp_path, folder):
    web = write_text(tmp_path, "web", validation_fraction=0.0)
    data = TokenDataModule({"text": Source(folder), "web": Source(web)}, **SIZES, validation_windows=7)
    attach(data)
    assert data.source_names == ["text", "web"]
    assert data.validation_names == ["text"]
    named = {"held out": folder, "training": f"{folder}/train"}
    data = TokenDataModule({"web": Source(web)}, **SIZES, validation=named, validation_windows=7)
    attach(data)
    assert data.validation_names == ["held out", "training"]
    assert list(data.validation_sources) == ["held out", "training"]
    for loader in data.val_dataloader():
        labels = torch.cat([batch["labels"] for batch in loader])
        assert int((labels[:, 0] != -100).sum()) == 7
        assert {int(value) for batch in loader for value in batch["source"]} == {0}


def test_the_fingerprint_tells_stores_apart_by_what_they_hold(tmp_path, folder):
    other = write_text(tmp_path, "other")
    prints = []
    for path in (folder, folder, other):
        data = TokenDataModule({"text": Source(path)}, **SIZES)
        attach(data)
        prints.append(data.fingerprint())
    assert prints[0].keys() == {"data.sources.text", "data.validation.text"}
    assert prints[0] == prints[1]
    assert prints[0]["data.sources.text"] != prints[2]["data.sources.text"]


def test_validation_runs_under_the_trainer(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, validation_windows=5)
    recorder = Recorder()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(recorder, datamodule=data, verbose=False)
    assert recorder.validation_rows == 5


def test_a_bare_store_is_a_source_without_validation(folder):
    data = TokenDataModule({"text": Source(f"{folder}/train")}, **SIZES)
    attach(data)
    assert data.val_dataloader() == []


def test_vocabulary_and_entropy_are_those_of_the_stores(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, validation_windows=None)
    attach(data)
    assert (data.vocab_size, data.eot_id) == (257, 256)
    labels = TokenStore(f"{folder}/validation").read(1, 1 + 8 * TokenStore(f"{folder}/validation").num_windows(8))
    frequencies = np.unique(labels, return_counts=True)[1] / len(labels)
    assert data.unigram_entropy("text") == pytest.approx(-(frequencies * np.log(frequencies)).sum())
    assert data.model_problems(vocab_size=257, max_length=8) == []
    too_small, too_short = data.model_problems(vocab_size=256, max_length=7)
    assert too_small == "model.gpt.vocab_size=256: must be at least 257, the vocabulary of the data."
    assert too_short == "data.sequence_length=8: must be at most model.gpt.max_length=7."


def test_the_ledger_names_what_the_loader_gives(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0)
    attach(data, samples=data.samples_before(5))
    batch = next(iter(data.train_dataloader()))
    texts = [
        bytes(row).decode() for row in np.where(batch["input_ids"] == 256, 10, batch["input_ids"]).astype(np.uint8)
    ]
    assert [sample.text.replace("<|endoftext|>", "\n") for sample in data.ledger().step(5)][:2] == texts


def test_a_builtin_source_is_tokenised_on_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "library").mkdir()
    for number in range(200):
        (tmp_path / "library" / f"m{number}.py").write_text(f"x = {number}\n")
    library = PythonStandardLibrary(tmp_path / "library")
    monkeypatch.setitem(corpus.BUILTIN, "python-stdlib", lambda: library)
    data = TokenDataModule({"python": Source("builtin:python-stdlib")}, **SIZES, tokenizer="bpe:300")
    data.prepare_data()
    attach(data)
    assert data.validation_names == ["python"]
    assert data.vocab_size <= 300


def test_all_bad_arguments_are_told_at_once():
    with pytest.raises(ValueError, match=r"data\.micro_batch=6: must divide data\.global_batch=32") as error:
        TokenDataModule(
            {"a": Source("x", weight=-1.0), "b": Source("y", weight=2.0)},
            sequence_length=0,
            micro_batch=6,
            global_batch=32,
            validation_windows=0,
            tokenizer="bpe:1",
            seed_data=-1,
            num_workers=-1,
            skip_steps=["9-3"],
        )
    for part in (
        "data.sequence_length=0: must be at least 1.",
        "data.num_workers=-1: must be at least 0.",
        "data.seed_data=-1: must be at least 0.",
        "data.validation_windows=0: must be at least 1, or null for all.",
        "data.tokenizer=bpe:1: the size must be",
        "data.skip_steps='9-3': must be a step",
        "data.sources.a.weight=-1.0: must be finite and at least 0.",
    ):
        assert part in str(error.value).splitlines() or any(
            line.startswith(part) for line in str(error.value).splitlines()
        )


def test_sources_must_be_there_and_one_must_weigh():
    with pytest.raises(ValueError, match="must name at least one source"):
        TokenDataModule({}, **SIZES)
    with pytest.raises(ValueError, match="all weights are 0"):
        TokenDataModule({"a": Source("x", weight=0.0)}, **SIZES)


def test_all_bad_stores_are_told_at_once(tmp_path, folder):
    other = write_text(tmp_path, "other", tokenizer="bpe:300")
    shard = tmp_path / "other" / "validation" / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes() + b"x")
    sources = {"text": Source(folder), "gone": Source(str(tmp_path / "gone")), "other": Source(other)}
    data = TokenDataModule(sources, **SIZES)
    with pytest.raises(ValueError, match=r"data\.sources\.gone=.*: is not a token store") as error:
        data.setup()
    assert "data.sources.other: was tokenised with another tokenizer than data.sources.text" in str(error.value)
    assert "shard-00000.bin: has" in str(error.value)


def test_a_store_shorter_than_a_window_is_refused(folder):
    data = TokenDataModule({"text": Source(folder)}, sequence_length=100_000, micro_batch=1, global_batch=1)
    with pytest.raises(ValueError, match=r"data\.sequence_length=100000: data\.sources\.text holds only \d+ tokens"):
        data.setup()


def test_an_unknown_builtin_is_refused():
    data = TokenDataModule({"a": Source("builtin:poems")}, **SIZES)
    with pytest.raises(ValueError, match="builtin:poems: no such corpus"):
        data.prepare_data()
    with pytest.raises(ValueError, match=r"data\.sources\.a=builtin:poems: builtin:poems: no such corpus"):
        data.setup()


def test_a_recipe_can_say_everything(folder):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TokenDataModule, "data")
    config = parser.parse_object(
        {
            "data": {
                **SIZES,
                "sources": {"text": {"path": folder, "filter": "score >= 1"}},
                "validation": {"a": folder},
                "skip_steps": [7, "9-10"],
                "order": {"by": "shards", "reshuffle": {"5 steps": 3}},
                "weight_schedule": {"marks": {"0": {"text": 1}}, "shape": "linear"},
                "mask_repeats": {"scope": "tokens"},
            }
        }
    )
    data = parser.instantiate_classes(config).data
    assert data.sources == {"text": Source(folder, filter="score >= 1")}
    assert data.order == SampleOrder("shards", reshuffle={"5 steps": 3})
    assert data.weight_schedule == WeightSchedule({"0": {"text": 1.0}}, "linear")
    assert data.mask_repeats == MaskRepeats(scope="tokens")
    assert data.skip_steps == [7, "9-10"]
    assert parser.parse_string(parser.dump(config)).data == config.data


def test_steps_and_micro_batches_follow_the_trainers_ramp(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0, skip_steps=["2-3"])
    progress = attach(data)
    ramp = BatchSizeWarmup("1 for 2 steps", fit_micro_batch=True)
    ramp.adopt(data)
    data.trainer.callbacks.append(ramp)
    assert [data.samples_before(step) for step in (1, 2, 3, 4)] == [0, 1, 2, 6]
    loader = iter(data.train_dataloader())
    assert progress.dropped == [(1, 6)]  # steps 2 and 3: one sample and four
    assert [len(next(loader)["source"]) for _ in range(5)] == [1, 1, 2, 2, 2]
    assert [sample.position for sample in data.ledger().step(3)] == [2, 3, 4, 5]


def test_steps_to_skip_follow_a_ramp_that_was_put_under_a_run_that_had_begun(folder):
    data = TokenDataModule({"text": Source(folder)}, **SIZES, num_workers=0, skip_steps=["15"])
    progress = attach(data, samples=8)  # two steps of 4
    ramp = BatchSizeWarmup("1 for 20 samples then 4", fit_micro_batch=True)
    ramp.adopt(data)
    data.trainer.callbacks.append(ramp)
    data.train_dataloader()
    assert progress.dropped == [(20, 24)]


@pytest.fixture
def dated(tmp_path):
    """400 documents of 2019 to 2022, out of order, with a score; a store of them by date and one as they came."""
    records = [
        {"text": f"text {n:03d}", "date": 20190101 + n * 7919 % 400 // 100 * 10_000 + n % 28, "score": n % 10 / 10}
        for n in range(400)
    ]
    (tmp_path / "dated.jsonl").write_text("\n".join(map(json.dumps, records)))
    for name, order in (("by_date", "date"), ("mixed", "input")):
        options = {"keep": "score", "order": order, "report": lambda line: None}
        prepare([tmp_path / "dated.jsonl"], tmp_path / name, "bytes", 0.0, **options)
    return tmp_path


def dates_read(data: TokenDataModule, steps: int) -> list[int]:
    """The date of every document of every sample, as the ledger has them."""
    attach(data)
    samples = [sample for step in range(1, steps + 1) for sample in data.ledger().step(step)]
    return [place.date for sample in samples for place in sample.documents]


def test_by_date_the_ledger_ascends_and_shuffled_it_does_not(dated):
    source = {"text": Source(str(dated / "by_date"))}
    by_date = dates_read(TokenDataModule(source, **SIZES, order=SampleOrder("date")), 40)
    assert by_date == sorted(by_date)
    assert by_date[0] < by_date[-1]
    shuffled = dates_read(TokenDataModule(source, **SIZES), 40)
    assert shuffled != sorted(shuffled)


def test_by_date_is_refused_on_data_that_are_not(dated, folder):
    source = {"mixed": Source(str(dated / "mixed")), "plain": Source(folder)}
    data = TokenDataModule(source, **SIZES, order=SampleOrder("date"))
    with pytest.raises(ValueError, match=r"data\.order\.by=date: documents of mixed are not in the order") as error:
        data.setup()
    assert "documents of plain have no dates; prepare it with --order date." in str(error.value)


def reshuffling(folder, requests, **sizes) -> TokenDataModule:
    order = SampleOrder("stored", reshuffle=requests)
    return TokenDataModule({"text": Source(folder)}, **(SIZES | sizes), num_workers=0, order=order)


def test_a_reshuffle_in_mid_run_reads_the_rest_once_and_resumes_bit_for_bit(tmp_path, folder):
    """The remedy of the late failures: from a step on, what was not read is read in another order."""
    windows = TokenStore(f"{folder}/train").num_windows(8)
    steps = windows // 4
    stored = torch.cat(fit(reshuffling(folder, {}), steps)[1].rows)
    straight = torch.cat(fit(reshuffling(folder, {"10 steps": 7}), steps)[1].rows)
    assert torch.equal(straight[:40], stored[:40])
    assert not torch.equal(straight[40:], stored[40:])
    named = reshuffling(folder, {"10 steps": 7})
    attach(named)
    read = [sample.window for step in range(1, steps + 1) for sample in named.ledger().step(step)]
    store = TokenStore(f"{folder}/train")
    assert straight.tolist() == [store.window(window, 8)[:-1].tolist() for window in read]
    assert len(set(read)) == len(read) == steps * 4
    for stop in (6, 10, 13):  # before, at and behind the point
        first_trainer, first = fit(reshuffling(folder, {"10 steps": 7}), stop)
        first_trainer.save_checkpoint(tmp_path / "a.ckpt")
        second = fit(reshuffling(folder, {"10 steps": 7}, micro_batch=4), steps, tmp_path / "a.ckpt")[1]
        assert torch.equal(torch.cat(first.rows + second.rows), straight)


def test_a_reshuffle_that_was_passed_stays_and_one_that_was_not_is_refused(tmp_path, folder):
    trainer, first = fit(reshuffling(folder, {"3 steps": 7}), 6)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    straight = torch.cat(fit(reshuffling(folder, {"3 steps": 7}), 9)[1].rows)
    # Without the request, and with another global batch, the passed point is where it was.
    without = reshuffling(folder, {})
    rest = torch.cat(fit(without, 9, tmp_path / "a.ckpt")[1].rows)
    assert torch.equal(torch.cat([*first.rows, rest]), straight)
    assert "what is left is shuffled anew behind 3 steps, seed 7" in describe_data(without)
    ledger = without.ledger()
    texts = [bytes(np.where(row == 256, 10, row).astype(np.uint8)).decode() for row in straight[28:32]]
    assert [sample.text.replace("<|endoftext|>", "\n") for sample in ledger.step(8)] == texts
    other = reshuffling(folder, {"3 steps": 8})
    with pytest.raises(ValueError, match=r"reshuffle=\{3 steps: 8\}: is behind the run"):
        fit(other, 9, tmp_path / "a.ckpt")


def test_without_a_reshuffle_a_checkpoint_has_no_state_of_the_data(tmp_path, folder):
    assert reshuffling(folder, {}).state_dict() == {}
    trainer, _ = fit(reshuffling(folder, {}), 1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert "TokenDataModule" not in torch.load(tmp_path / "a.ckpt", weights_only=True)


def test_a_filter_keeps_its_documents_and_is_part_of_the_fingerprint(dated):
    sources = {"text": Source(str(dated / "mixed"), filter="top 0.3 by score")}
    data = TokenDataModule(sources, **SIZES, num_workers=0)
    attach(data)
    store = data.opened.training["text"]
    assert (store.num_documents, store.all_documents) == (120, 400)
    read = {place.number for step in range(1, 40) for sample in data.ledger().step(step) for place in sample.documents}
    scores = store.values("score", 0, 400)
    assert {scores.value(number) for number in read} == {0.7, 0.8, 0.9}
    assert data.fingerprint()["data.sources.text"].endswith(", top 0.3 by score)")


def test_validation_from_a_date_is_the_future_of_what_is_trained_on(dated):
    sources = {"text": Source(str(dated / "mixed"), filter="score >= 0.5")}
    data = TokenDataModule(sources, **SIZES, validation_from="2022-01-01", num_workers=0)
    assert max(dates_read(data, 50)) < 20220101
    assert data.validation_names == ["text_from_20220101"]
    held_out = data.opened.validation["text_from_20220101"]
    places = held_out.documents_in(0, held_out.num_tokens)
    assert min(place.date for place in places) >= 20220101
    assert held_out.num_documents + data.opened.training["text"].num_documents == 200
    assert next(iter(data.val_dataloader()[0]))["input_ids"].shape == (2, 8)


@pytest.mark.parametrize("date", ["2022-01-01", "20220101", 20220101])
def test_a_source_without_later_documents_has_no_later_set(dated, date):
    sources = {"text": Source(str(dated / "mixed")), "early": Source(str(dated / "mixed"), filter="date < 2021-01-01")}
    data = TokenDataModule(sources, **SIZES, validation_from=date)
    attach(data)
    assert data.validation_names == ["text_from_20220101"]


def test_a_split_by_time_that_leaves_nothing_on_one_side_is_refused(dated):
    text, late = Source(str(dated / "mixed")), Source(str(dated / "mixed"), filter="date >= 2022-01-01")
    with pytest.raises(ValueError, match=r"^data\.validation_from=20300101: no document is dated so late; give an ear"):
        TokenDataModule({"text": text}, **SIZES, validation_from="2030-01-01").setup()
    with pytest.raises(ValueError, match=r"data\.sources\.late=.*: filter=date >= 2022-01-01 and date < 2") as error:
        TokenDataModule({"text": text, "late": late}, **SIZES, validation_from="2022-01-01").setup()
    assert "data.validation_from=20220101: adds `date < 20220101` to the filter of every source." in str(error.value)
    with pytest.raises(ValueError, match=r"data\.validation_from=0: must be a date"):
        TokenDataModule({"text": text}, **SIZES, validation_from=0)


def test_a_schedule_of_weights_shows_in_the_ledger_to_the_sample(tmp_path, folder):
    other = write_text(tmp_path, "other")
    sources = {"text": Source(folder), "other": Source(other)}
    marks = {"0": {"text": 1, "other": 0}, "40": {"text": 1, "other": 3}, "120": {"text": 0, "other": 1}}
    data = TokenDataModule(sources, **SIZES, num_workers=0, weight_schedule=WeightSchedule(marks))
    attach(data)
    ledger = data.ledger()
    expected = {1: (0, 0), 11: (40, 0), 31: (60, 60), 41: (60, 100)}
    for step, (text, others) in expected.items():
        assert ledger.counts(step) == {"text": text, "other": others}
    read = [sample.source for step in range(1, 41) for sample in ledger.step(step)]
    assert (read.count("text"), read.count("other")) == (60, 100)
    assert data.ledger([(40, 120)]).counts(21) == {"text": 40, "other": 40}


def test_repetitions_have_no_labels_in_training_and_all_of_them_in_validation(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("ab" * 100 + "".join(map(chr, range(33, 97))) * 4)
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, "bytes", 0.0, report=lambda line: None)
    options = {
        "validation": {"v": str(tmp_path / "validation" / "train")},
        "num_workers": 0,
        "validation_windows": None,
    }
    sources = {"text": Source(str(tmp_path / "train"))}
    masked = {}
    for scope in ("tokens", "sequence"):
        data = TokenDataModule(
            sources, 32, 1, 14, **options, order=SampleOrder("stored"), mask_repeats=MaskRepeats(2, 10, scope)
        )
        attach(data)
        batches = iter(data.train_dataloader())
        masked[scope] = [int((next(batches)["labels"] == -100).sum()) for _ in range(14)]
        assert all((batch["labels"] != -100).all() for batch in data.val_dataloader()[0])
    # Windows of 33 tokens: six within the repetition, one with its last eight tokens, which hold no ten periods.
    assert masked["tokens"] == [32] * 6 + [0] * 8
    assert masked["sequence"] == [32] * 6 + [0] * 8


def test_all_bad_choices_are_told_at_once():
    with pytest.raises(ValueError, match=r"data\.validation_from=summer: must be a date") as error:
        TokenDataModule(
            {"a": Source("x", weight=2.0, filter="score"), "b": Source("y")},
            **SIZES,
            order=SampleOrder("shards", 0, reshuffle={"soon": 1}),
            weight_schedule=WeightSchedule({"0": {"a": 1.0}}),
            validation_from="summer",
            mask_repeats=MaskRepeats(0),
        )
    for part in (
        "data.order.reshuffle={soon: 1}: must be a count of steps or samples",
        "data.order.shard_windows=0: must be at least 1.",
        "data.mask_repeats.max_period=0: must be at least 1.",
        "data.sources.a.weight=2.0 and data.weight_schedule: each says the mixture; give one of them.",
        "data.weight_schedule.marks.0: names a; must give a weight to each of a, b.",
        "data.sources.a.filter=score: must read KEY >= VALUE",
    ):
        assert any(line.startswith(part) for line in str(error.value).splitlines()), part
