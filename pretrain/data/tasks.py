"""The tasks of a network: they turn a sample's tokens into the network's inputs.

Next token: every token is predicted from those before it. Span corruption is the objective of T5 (Raffel et al., arXiv 1910.10683,
sections 3.1.4 and 3.3.4), for an encoder-decoder:

    sample   Thank you for inviting me to your party last week <eod>
    source   Thank you <s0> me to your party <s1> week <eod>            the encoder reads it
    target   <s0> for inviting <s1> last <eod>                          the decoder is to write it

A sample of L tokens always loses round(L x density) tokens in the same number of spans. So all sources have one length, all targets
another, and nothing is padded. A sample begins with a stretch that is kept and ends with one that is lost. Which tokens are lost is a
pure function of the seed and the sample's position in the stream. No layout or restart changes it, and every epoch loses others.

torch is imported only for the tensors at the end, so that tools which look at data answer at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.config.data_schema import Data
from pretrain.conventions import document_starts, position_keys, sample_keys, scramble
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


class Objective(ABC):
    """Samples in, inputs of a network out, as a pure function."""

    @abstractmethod
    def inputs(self, tokens_BT: Tensor, targets_BT: Tensor, positions_B: np.ndarray) -> dict[str, Tensor]:
        """The network's inputs by name, each with a row per sample, `targets_BT` among them.

        `tokens_BT`: the samples' tokens, int64; `targets_BT`: the token after each, or IGNORED; `positions_B`: places in the stream.
        """

    @abstractmethod
    def for_validation(self) -> Objective:
        """The same objective independent of the run: positions are then those in the validation source."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """JSON values that change when the network's inputs from a sample change."""

    def lengths(self, sequence_length: int) -> tuple[float, ...]:
        """Tokens that the network sees of a sample: its length, or those of its source and its target."""
        return (sequence_length,)

    def added_tokens(self, vocab_size: int) -> list[str]:
        """The names in transformers of tokens beyond the tokenizer's `vocab_size`, in the order of their ids."""
        return []

    def describe(self) -> list[str]:
        """Lines for the log."""
        return []


@dataclass(frozen=True)
class NextToken(Objective):
    """Predict every token from those before it.

    `mask_eod_id`: the token that closes a document, if attention ends there; `dropout_seed`: the seed of dropout's masks, None without dropout;
    `lists_starts`: whether the network is told where documents begin.
    """

    mask_eod_id: int | None = None
    dropout_seed: int | None = None
    lists_starts: bool = False

    def inputs(self, tokens_BT: Tensor, targets_BT: Tensor, positions_B: np.ndarray) -> dict[str, Tensor]:
        import torch

        inputs = {"tokens_BT": tokens_BT, "targets_BT": targets_BT}
        if self.mask_eod_id is not None:
            documents_BT = documents_of(tokens_BT.numpy(), self.mask_eod_id)
            inputs["documents_BT"] = torch.from_numpy(documents_BT)
            if self.lists_starts:
                inputs["starts_BN"] = torch.from_numpy(document_starts(documents_BT))
        if self.dropout_seed is not None:
            inputs["keys_B"] = torch.from_numpy(sample_keys(self.dropout_seed, positions_B))
        return inputs

    def for_validation(self) -> NextToken:
        return replace(self, dropout_seed=None)

    def identity(self) -> dict[str, Any]:
        return {"name": "next_token"}


def documents_of(tokens_BT: np.ndarray, eod_id: int) -> np.ndarray:
    """The document of each input, [B, T], counted from 0 in each row: one more after every end-of-document token.

    Padding consists of end-of-document tokens, so each of its tokens is a document of its own.
    """
    rows, length = tokens_BT.shape
    is_first = np.empty(tokens_BT.shape, dtype=bool)
    is_first[:, 0] = True
    np.equal(tokens_BT[:, :-1], eod_id, out=is_first[:, 1:])
    firsts = np.flatnonzero(is_first)  # first tokens of documents, in all rows
    row_starts = np.searchsorted(firsts, np.arange(0, rows * length, length))
    numbers = np.arange(len(firsts)) - row_starts[firsts // length]
    # Repeating is several times faster than a running sum over all tokens.
    return np.repeat(numbers, np.diff(firsts, append=rows * length)).reshape(rows, length)


@dataclass(frozen=True)
class Spans:
    """How a sample of `length` tokens is corrupted: `noise` of them are taken out, in `count` spans."""

    length: int
    noise: int
    count: int

    @classmethod
    def of_data(cls, data: Data) -> Spans | None:
        """The spans of a configuration; None with another objective. Raises ConfigError if no spans fit."""
        if data.objective != "span_corruption":
            return None
        options = data.span_corruption
        spans = cls.of(data.sequence_length, options.noise_density, options.mean_span_length)
        if spans.count > options.sentinels:
            raise ConfigError(
                f"data.span_corruption.sentinels={options.sentinels}: data.sequence_length={data.sequence_length} makes {spans.count} spans; "
                "raise it, or mean_span_length"
            )
        return spans

    @classmethod
    def of(cls, length: int, density: float, mean_span: float) -> Spans:
        """Counts like T5's: rounded, with at least one token taken out and one left. Raises ConfigError if no spans fit."""
        if length < 2:
            raise ConfigError(
                f"data.sequence_length={length}: data.objective=span_corruption takes at least 2 tokens; raise it"
            )
        noise = min(max(round(length * density), 1), length - 1)
        count = max(round(noise / mean_span), 1)
        if count > length - noise:
            raise ConfigError(
                f"data.span_corruption: {noise} of {length} tokens in {count} spans leave no token between the spans; lower noise_density, or "
                "raise mean_span_length"
            )
        return cls(length, noise, count)

    @property
    def source_length(self) -> int:
        """Tokens that the encoder reads: the remaining ones, a sentinel per span, the end."""
        return self.length - self.noise + self.count + 1

    @property
    def target_length(self) -> int:
        """Tokens that the decoder must write: each span after its sentinel, then the end."""
        return self.noise + self.count + 1

    def masks(self, seed: int | None, positions_B: np.ndarray) -> np.ndarray:
        """Which tokens are taken out of the samples at these positions, [B, L]. All ways to place the spans are equally likely. `seed`:
        the seed of the data's order; None in validation.
        """
        keys_B = position_keys(f"spans/{'validation' if seed is None else seed}", positions_B)
        kept_BN = compositions(self.length - self.noise, self.count, scramble(keys_B))
        lost_BN = compositions(self.noise, self.count, scramble(keys_B + _STEP))
        lengths = np.stack((kept_BN, lost_BN), axis=-1)  # kept, lost, kept, lost, ...
        return np.repeat(np.tile([False, True], lengths.size // 2), lengths.ravel()).reshape(-1, self.length)


def sentinel_ids(data: Data, vocab_size: int) -> range:
    """The ids that stand for spans, rising, for a tokenizer of `vocab_size` tokens; empty without spans."""
    options = data.span_corruption
    if data.objective != "span_corruption":
        return range(0)
    if options.first_sentinel is None:
        return range(vocab_size, vocab_size + options.sentinels)
    if options.first_sentinel < options.sentinels:
        raise ConfigError(
            f"data.span_corruption.first_sentinel={options.first_sentinel}: {options.sentinels} sentinels that count down from there reach "
            "below 0; it is the id of the first span's, lower sentinels, or remove it"
        )
    return range(options.first_sentinel - options.sentinels + 1, options.first_sentinel + 1)


def compositions(total: int, parts: int, keys_B: np.ndarray) -> np.ndarray:
    """`total` as a sum of `parts` integers of at least 1. Each key gives one of all such sums, [B, parts]."""
    # The parts end at the places of the smallest random numbers.
    numbers = scramble(keys_B[:, None] + np.arange(total - 1, dtype=np.uint64) * _STEP)
    ends = np.sort(np.argsort(numbers, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    return np.diff(ends, axis=1, prepend=0, append=total)


@dataclass(frozen=True)
class SpanCorruption(Objective):
    """The objective of T5.

    `first_sentinel`: id of the first span's sentinel; the others count down. `end_id`: the token that ends sources and targets.
    `start_id`: the token that decoding starts from. `seed`: the seed of the data's order; None in validation. `dropout_seed`: the seed of
    dropout masks; None without dropout.
    """

    spans: Spans
    first_sentinel: int
    end_id: int
    start_id: int
    seed: int | None
    dropout_seed: int | None

    def inputs(self, tokens_BT: Tensor, targets_BT: Tensor, positions_B: np.ndarray) -> dict[str, Tensor]:
        import torch

        source_BS, targets_BT = self.corrupt(tokens_BT.numpy(), positions_B)
        tokens_BT = np.roll(targets_BT, 1, axis=1)
        tokens_BT[:, 0] = self.start_id
        inputs = {"source_BS": source_BS, "tokens_BT": tokens_BT, "targets_BT": targets_BT}
        if self.dropout_seed is not None:
            inputs["keys_B"] = sample_keys(self.dropout_seed, positions_B)
        return {name: torch.from_numpy(array) for name, array in inputs.items()}

    def corrupt(self, tokens_BT: np.ndarray, positions_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source [B, source_length] and target [B, target_length] of samples at these positions, int64."""
        spans, rows = self.spans, len(tokens_BT)
        lost_BT = spans.masks(self.seed, positions_B)
        first_BT = lost_BT & ~np.pad(lost_BT, ((0, 0), (1, 0)))[:, :-1]
        number_BT = first_BT.cumsum(axis=1) - 1  # the number of the span
        source_BS = np.full((rows, spans.source_length), self.end_id, dtype=np.int64)
        replaced_BT = np.where(first_BT, self.first_sentinel - number_BT, tokens_BT)
        source_BS[:, :-1] = replaced_BT[~lost_BT | first_BT].reshape(rows, -1)
        targets_BT = np.full((rows, spans.target_length), self.end_id, dtype=np.int64)
        row, _ = np.nonzero(lost_BT)
        place = (lost_BT.cumsum(axis=1) + number_BT)[lost_BT]  # a sentinel stands before each of the spans up to here
        targets_BT[row, place] = tokens_BT[lost_BT]
        starts = first_BT[lost_BT]
        targets_BT[row[starts], place[starts] - 1] = replaced_BT[first_BT]
        return source_BS, targets_BT

    def for_validation(self) -> SpanCorruption:
        return replace(self, seed=None, dropout_seed=None)

    def lengths(self, sequence_length: int) -> tuple[float, ...]:
        return self.spans.source_length, self.spans.target_length

    def added_tokens(self, vocab_size: int) -> list[str]:
        return [f"<extra_id_{self.first_sentinel - token}>" for token in range(vocab_size, self.first_sentinel + 1)]

    def identity(self) -> dict[str, Any]:
        return {"name": "span_corruption", "first_sentinel": self.first_sentinel, **asdict(self.spans)}

    def describe(self) -> list[str]:
        spans = self.spans
        return [
            f"task     span corruption: of {spans.length} tokens {spans.noise} are taken out in {spans.count} spans; sources of "
            f"{spans.source_length} tokens, targets of {spans.target_length}"
        ]
