"""What a run reads, in lines: stores, filters, order, weights, and what of it a number of samples takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_stable.data.filtered_store import FilteredStore
from lit_stable.data.store import TokenStore

if TYPE_CHECKING:
    from lit_stable.data.datamodule import TokenDataModule


def describe_data(data: TokenDataModule) -> list[str]:
    """The stores with what their filters keep, and every way in which the reading is out of the ordinary."""
    training = {f"data.sources.{name}": store for name, store in data.opened.training.items()}
    validation = {f"data.validation.{name}": store for name, store in data.opened.validation.items()}
    return [*_stores(training), *_stores(validation), *_options(data)]


def describe_reading(data: TokenDataModule, samples: int) -> list[str]:
    """Samples and epochs of each source among the first so many samples."""
    mixture = data.mixture()
    rows = zip(mixture.sources, mixture.counts(samples).tolist(), mixture.num_windows.tolist(), strict=True)
    return [
        f"  {name}: {count:,} samples ({count / max(1, samples):.2%}), {count / windows:.3g} epochs of {windows:,}"
        for name, count, windows in rows
    ]


def _stores(stores: Mapping[str, TokenStore]) -> list[str]:
    return [f"{name}: {_amount(store)}" for name, store in stores.items()]


def _amount(store: TokenStore) -> str:
    if not isinstance(store, FilteredStore):
        return f"{store.num_tokens:,} tokens in {store.num_documents:,} documents"
    kept, dropped = store.num_documents, store.all_documents - store.num_documents
    return (
        f"{store.num_tokens:,} of {store.all_tokens:,} tokens; filter {store.condition.text} keeps {kept:,} and drops"
        f" {dropped:,} documents ({kept / store.all_documents:.1%} kept)"
    )


def _options(data: TokenDataModule) -> list[str]:
    order, lines = data.order, []
    if order.by == "shards":
        lines.append(f"order: shards of {order.shard_windows:,} windows, {order.buffer_shards} mixed at a time")
    elif order.by != "shuffle":
        lines.append(f"order: {'by date' if order.by == 'date' else 'as stored'}")
    reshuffles = order.reshuffle if data.reshuffles is None else {r.mark: r.seed for r in data.reshuffles}
    lines += [f"what is left is shuffled anew behind {mark}, seed {seed}" for mark, seed in reshuffles.items()]
    if data.weight_schedule is not None:
        shape, unit = data.weight_schedule.shape, data.weight_schedule.unit
        marks = data.weight_schedule.marks.items()
        lines.append(f"weights ({shape}, by {unit}): " + "; ".join(f"{m}: {_shares(w)}" for m, w in marks))
    if data.mask_repeats is not None:
        mask = data.mask_repeats
        lines.append(
            f"no loss on {mask.scope} with a period of 1 to {mask.max_period} tokens held {mask.min_count} times"
        )
    return lines


def _shares(weights: Mapping[str, float]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{name} {weight / total:.3g}" for name, weight in weights.items())
