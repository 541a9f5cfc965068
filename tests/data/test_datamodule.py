from __future__ import annotations

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
from lit_stable.data.prepare import prepare
from lit_stable.data.sources import Source
from lit_stable.data.store import TokenStore

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
                "sources": {"text": {"path": folder, "weight": 2}},
                "validation": {"a": folder},
                "skip_steps": [7, "9-10"],
            }
        }
    )
    data = parser.instantiate_classes(config).data
    assert data.sources == {"text": Source(folder, 2.0)}
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
