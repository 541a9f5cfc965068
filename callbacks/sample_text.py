"""What the model writes, as it learns: somebody should read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .base import MisconfigurationException, refuse_all
from .events import Events
from .extra_forward import extra_forward, through_root
from .generation import check_sampling, continue_tokens
from .monitor import Monitor
from .progress import Progress
from .rank_gather import gather_ranks
from .scalars import Scalars
from .seeds import mix
from .text_log import log_text
from .token_statistics import repeated_ngrams

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

FILE = "samples.txt"
_NGRAM = 4


class SampleText(Monitor):
    """Let the model continue fixed prompts every so often, and show the text.

    OPT-175B's team found by reading that their model had learned to write escape characters: the loss had looked good.
    The text goes to every logger that takes text, and is appended to ``samples.txt`` in the folder of the run's events.

    The run does not notice: modules are in evaluation mode, draws come from a generator of its own, seeded by ``seed``
    and the step; see ``extra_forward``. All ranks make the same number of forward passes, as a sharded model needs,
    and rank 0's text is shown. One takes ``new_tokens`` forward passes over all prompts at once, without a cache.

    What the LightningModule must offer: ``forward(ids)``, or ``token_logits(ids)`` where its forward is something else:
    token ids (B, T) to logits (B, T, V), or to an object with ``logits``, causal. Its ``config.max_length``, if there
    is one, bounds T. The tokenizer, with ``encode(text) -> ids`` and ``decode(ids) -> text``, is its attribute
    ``tokenizer``, or what the data module's ``text_tokenizer()`` returns. Without one, prompts are given as
    ``prompt_ids`` and ids are shown.

    Logged: ``stability/sample_repeated_tokens`` (share of new tokens equal to the one before) and
    ``stability/sample_repeated_ngrams`` (share of 4-grams of new tokens that stood earlier in the continuation), means
    over prompts, 0 to 1. A young model repeats itself; one that has learned to write and begins to repeat is sick.

    Args:
        every_steps: Optimizer steps between samples, rounded up to a multiple of ``log_every_n_steps``; ``None``:
            every logging step.
        prompts: Texts to continue; ``None``: one, that is nothing but the tokenizer's end-of-text.
        prompt_ids: Instead of ``prompts``: token ids.
        new_tokens: Tokens per prompt, >= 2.
        temperature: Divides the logits; 0: the most likely token each time.
        top_k: Draw among so many most likely tokens; ``None``: among all.
        seed: Of the draws.

    Raises:
        MisconfigurationException: as :class:`Monitor`; when a number is out of range, both kinds of prompts are given,
            or there is no tokenizer for texts.

    Example::

        >>> Trainer(callbacks=[SampleText(500, prompts=["Once upon a time"])], logger=False)  # doctest: +SKIP
    """

    def __init__(
        self,
        every_steps: int | None = None,
        prompts: list[str] | None = None,
        prompt_ids: list[list[int]] | None = None,
        new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(every_steps)
        problems = []
        if prompts is not None and prompt_ids is not None:
            problems.append("`SampleText`: prompts and prompt_ids are both given; keep one.")
        try:
            check_sampling(prompt_ids if prompt_ids is not None else [[0]], new_tokens, temperature, top_k)
        except ValueError as error:
            problems += [f"`SampleText`: {line}" for line in str(error).splitlines()]
        if 0 <= new_tokens < 2:
            problems.append(f"`SampleText(new_tokens={new_tokens})`: must be at least 2.")
        refuse_all(problems)
        self.prompts, self.prompt_ids = prompts, prompt_ids
        self.new_tokens, self.temperature, self.top_k, self.seed = new_tokens, temperature, top_k, seed
        self._ids: list[list[int]] = []
        self._tokenizer: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            Progress.of(trainer)
            Events.of(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tokenizer = find_tokenizer(trainer, pl_module)
        if self.prompt_ids is not None:
            self._ids = self.prompt_ids
            return
        if self._tokenizer is None:
            raise MisconfigurationException(
                f"`SampleText`: {type(pl_module).__name__} has no `tokenizer` and its data module no"
                " `text_tokenizer()`, so texts cannot be read or written; give prompt_ids."
            )
        if self.prompts is None:
            self._ids = [[end_of_text(self._tokenizer)]]
            return
        self._ids = [[int(i) for i in self._tokenizer.encode(text)] for text in self.prompts]
        empty = next((index for index, ids in enumerate(self._ids) if not ids), None)
        if empty is not None:
            raise MisconfigurationException(f"`SampleText(prompts[{empty}]={self.prompts[empty]!r})`: has no token.")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self.has_ended(trainer):
            return
        step = Progress.of(trainer).steps
        new = self._continue(trainer, pl_module, step)
        repeated = (new[:, 1:] == new[:, :-1]).double().mean()
        own = torch.stack([repeated, repeated_ngrams(new, _NGRAM).mean()])
        names = ["stability/sample_repeated_tokens", "stability/sample_repeated_ngrams"]
        Scalars.of(trainer).add(names, gather_ranks(own)[0])
        if trainer.is_global_zero:
            self._show(trainer, step, new.tolist())

    def _continue(self, trainer: Trainer, module: LightningModule, step: int) -> torch.Tensor:
        forward = getattr(module, "token_logits", None) or module.forward
        generator = torch.Generator(module.device).manual_seed(mix(self.seed, step) >> 1)
        made: list[torch.Tensor] = []

        def run() -> None:
            made.append(
                continue_tokens(
                    forward,
                    self._ids,
                    self.new_tokens,
                    device=module.device,
                    temperature=self.temperature,
                    top_k=self.top_k,
                    generator=generator,
                    max_length=getattr(getattr(module, "config", None), "max_length", None),
                )
            )

        with extra_forward(trainer, module):
            through_root(trainer, module, run)
        return made[0]

    def _show(self, trainer: Trainer, step: int, new: list[list[int]]) -> None:
        texts = [f"{self._text(prompt)}|{self._text(ids)}" for prompt, ids in zip(self._ids, new, strict=True)]
        for index, text in enumerate(texts):
            log_text(trainer, f"samples/{index}", text, step)
        folder = Events.of(trainer).folder or Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.writelines(f"step {step}, prompt {index}:\n{text}\n\n" for index, text in enumerate(texts))

    def _text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self._tokenizer is None else str(self._tokenizer.decode(ids))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._tokenizer = None


def find_tokenizer(trainer: Trainer, module: LightningModule) -> Any:
    """The LightningModule's ``tokenizer``, else what the data module's ``text_tokenizer()`` returns, else ``None``."""
    own = getattr(module, "tokenizer", None)
    if hasattr(own, "encode") and hasattr(own, "decode"):
        return own
    opens = getattr(trainer.datamodule, "text_tokenizer", None)  # type: ignore[attr-defined]
    return None if opens is None else opens()


def end_of_text(tokenizer: Any) -> int:
    """The id behind each document: ``eot_id``, or ``eos_token_id`` as Hugging Face's tokenizers have it.

    Raises:
        MisconfigurationException: when the tokenizer has neither.
    """
    for name in ("eot_id", "eos_token_id"):
        if isinstance(getattr(tokenizer, name, None), int):
            return int(getattr(tokenizer, name))
    raise MisconfigurationException("`SampleText`: the tokenizer names no end-of-text token; give prompts.")
