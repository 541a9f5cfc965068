"""Images and captions: read, prepared, and handed out in the order and from the position of a text run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_stable.callbacks import AccumulationWindows
from lit_stable.cli.spine import spine
from lit_stable.data.tokenizer import load_tokenizer
from lit_stable.run.surgery import Surgery, SurgeryOptions
from lit_stable.vlm.datamodule import PairDataModule, up_to_the_end
from lit_stable.vlm.digits import NAMES, digit_pairs
from lit_stable.vlm.pairs import Pairs

Image = pytest.importorskip("PIL.Image")


def data(**options: Any) -> PairDataModule:
    module = PairDataModule(**{"sequence_length": 32, "micro_batch": 4, "global_batch": 8, **options})
    module.prepare_data()
    module.setup("fit")
    return module


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_STABLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield data()


def image_folder(folder: Path, count: int = 40) -> Path:
    folder.mkdir()
    lines = []
    for n in range(count):
        pixels = np.full((6, 9, 3), (5 * n, 2 * n, 255 - n), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
        lines.append(json.dumps({"image": f"{n}.png", "caption": f"shade {n}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_digits_have_captions_that_say_what_is_seen():
    full, names = digit_pairs("full"), digit_pairs("names")
    assert full.images.shape == (1797, 1, 8, 8)
    assert full.images.dtype == np.uint8
    assert full.images.max() == 255
    assert set(names.captions) == set(NAMES)
    assert all(name in caption for name, caption in zip(names.captions, full.captions, strict=True))
    shares = [np.mean([word in caption for caption in full.captions]) for word in ("thin", "bold", "g left", "g right")]
    assert min(shares) > 0.15
    assert max(shares) < 0.5


def test_the_image_in_a_row_is_the_one_of_its_caption(digits):
    """Each of a batch, in training and in validation, is found among the pairs as it was read."""
    pairs, tokenizer = digits.pairs(), digits.text_tokenizer()
    known = {image.tobytes(): caption for image, caption in zip(pairs.images, pairs.captions, strict=True)}
    training = digits.stream(start=5).read(np.arange(40))
    validation = next(iter(digits._validation(0, 1, None)[0]))
    for batch in (training, validation):
        for ids, labels, image in zip(batch["input_ids"], batch["labels"], batch["images"], strict=True):
            caption = known[image.numpy().tobytes()]
            assert ids[0] == digits.eot_id
            kept = labels[labels != -100]
            assert kept[-1] == digits.eot_id
            assert tokenizer.decode(kept[:-1].tolist()) == caption
            assert torch.equal(ids[1 : len(kept)], kept[:-1])


def test_no_image_is_in_both_splits(digits):
    splits = [np.load(digits.folder / split / "images.npy") for split in ("train", "validation")]
    kinds = [{image.tobytes() for image in images} for images in splits]
    assert not kinds[0] & kinds[1]
    assert sum(map(len, splits)) == 1797
    assert 0.05 < len(splits[1]) / 1797 < 0.15


def test_samples_do_not_depend_on_micro_batch_ranks_or_start(digits):
    straight = digits.stream(start=0).read(np.arange(16))["images"]
    parts = [digits.stream(start=8, rank=rank, size=2) for rank in (0, 1)]
    second = torch.cat([next(iter(part))["images"] for part in parts])
    assert torch.equal(second, straight[8:16])


def test_labels_end_with_the_first_end_of_text():
    labels = torch.tensor([[5, 9, 9, 9], [9, 5, 9, 9], [5, 6, 7, 8]])
    assert up_to_the_end(labels, 9).tolist() == [[5, 9, -100, -100], [9, -100, -100, -100], [5, 6, 7, 8]]


def test_validation_is_judged_against_the_labels_that_count(digits):
    """Of bytes of short captions about 2.8 nats; with what fills windows up it would be below 2."""
    assert 2.4 < digits.unigram_entropy("pairs") < 3.2


def test_a_folder_of_images(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path / "cache"))
    folder = image_folder(tmp_path / "shades")
    module = data(path=str(folder), image_size=4, channels=3)
    batch = module.stream().read(np.arange(4))
    assert batch["images"].shape == (4, 3, 4, 4)
    number = int(module.text_tokenizer().decode(batch["input_ids"][0, 1:9].tolist()).split()[1].split("<")[0])
    assert batch["images"][0, :, 0, 0].tolist() == [5 * number, 2 * number, 255 - number]
    assert "data.images" in module.fingerprint()
    before = module.fingerprint()
    Image.fromarray(np.zeros((6, 9, 3), dtype=np.uint8)).save(folder / "0.png")
    assert data(path=str(folder), image_size=4, channels=3).fingerprint()["data.images"] != before["data.images"]


def test_a_caption_may_hold_what_other_texts_end_lines_with(tmp_path):
    folder = image_folder(tmp_path / "shades", 1)
    lines = [json.dumps({"image": "0.png", "caption": c}, ensure_ascii=False) for c in ("one\u2028two", "three\x85")]
    (folder / "captions.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    assert PairDataModule(32, 4, 8, path=str(folder)).pairs().captions == ["one\u2028two", "three\x85"]


def test_what_cannot_be_read_is_told_line_by_line(tmp_path):
    folder = image_folder(tmp_path / "shades", 1)
    (folder / "bad.png").write_text("no image")
    lines = [
        '{"image": "0.png"}',
        "no json",
        '{"image": "bad.png", "caption": "x"}',
        '{"image": "0.png", "caption": ""}',
    ]
    (folder / "captions.jsonl").write_text("\n".join(lines))
    module = PairDataModule(32, 4, 8, path=str(folder))
    problems = "\n".join(module.path_problems())
    for number, said in enumerate(
        ["must hold the texts", "is not JSON", "{folder}/bad.png: is no image", "its caption is empty"], 1
    ):
        assert f"captions.jsonl:{number}: {said.format(folder=folder)}" in problems
    (missing,) = PairDataModule(32, 4, 8, path=str(tmp_path)).path_problems()
    assert "holds no captions.jsonl" in missing
    assert json.loads(missing[missing.index("{") : missing.index("}") + 1]) == {"image": "PATH", "caption": "TEXT"}
    (folder / "captions.jsonl").write_bytes(b'{"image": "0.png", "caption": "\xff"}')
    with pytest.raises(ValueError, match=r"captions.jsonl: is not UTF-8 .*; save it so"):
        PairDataModule(32, 4, 8, path=str(folder)).pairs()
    (folder / "captions.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no pair"):
        PairDataModule(32, 4, 8, path=str(folder)).pairs()


def test_without_its_packages_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "pip install 'lit-stable[vlm]'" in PairDataModule(32, 4, 8).path_problems()[0]


def test_the_tokens_of_all_captions_may_weigh_the_same():
    module = PairDataModule(32, 4, 8, average_over="tokens")
    windows = [c for c in spine(module, 10, Surgery(SurgeryOptions()), []) if isinstance(c, AccumulationWindows)]
    assert [window.token_weights is not None for window in windows] == [True]


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, digits):
    with pytest.raises(ValueError, match=r"image_size=16, channels=1: the digits have 8.*\n.*micro_batch"):
        PairDataModule(32, 3, 8, image_size=16)
    with pytest.raises(ValueError, match=r"sequence_length=16: the caption 'a .*' needs 30 with end-of-text"):
        data(sequence_length=16)
    monkeypatch.setattr(PairDataModule, "pairs", lambda self: Pairs(np.zeros((2, 1, 8, 8), np.uint8), ["a", "b"]))
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="of 2 images none is left for"):
        data()


def test_the_tokenizer_of_the_language_model_can_be_given(tmp_path, monkeypatch, digits):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path))
    given = tmp_path / "tokenizer.json"
    load_tokenizer(digits.opened.training["pairs"].tokenizer_path).save(given)
    module = data(tokenizer=str(given))
    assert module.eot_id == digits.eot_id
    assert module.opened.training["pairs"].tokenizer_sha256 == digits.opened.training["pairs"].tokenizer_sha256


def test_loaders_are_those_of_this_rank(digits):
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    digits.trainer = SimpleNamespace(strategy=strategy, world_size=1, global_rank=0)
    (loader,) = digits.val_dataloader()
    (whole,) = digits.test_dataloader()
    assert sum(int((batch["labels"] != -100).any(1).sum()) for batch in whole) > 150
    assert next(iter(loader))["images"].dtype == torch.uint8


def test_of_several_ranks_the_first_alone_reads_the_images(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_STABLE_CACHE", str(tmp_path / "cache"))
    options = {"path": str(image_folder(tmp_path / "shades")), "image_size": 4}
    said = []

    def broadcast(thing: str) -> str:
        said.append(thing)
        return said[0]

    first, second = (PairDataModule(32, 4, 8, **options) for _ in range(2))
    for rank, module in enumerate((first, second)):
        module.trainer = SimpleNamespace(is_global_zero=rank == 0, strategy=SimpleNamespace(broadcast=broadcast))
    first.prepare_data()
    first.setup("fit")
    monkeypatch.setattr(second, "pairs", lambda: pytest.fail("the second reads all images"))
    second.setup("fit")
    assert second.fingerprint() == first.fingerprint()
    assert first._pairs is None, "what is prepared is not kept in memory too"
