"""How likely a model finds texts: perplexity, and bits per byte, which compare between tokenizers.

Every token of a text is predicted once. A text longer than the model is cut into windows, as lm-evaluation-harness cuts it for rolling log-likelihoods:

    tokens            a b c d e f g h i j        length 4
    first window      | a b c d                   after the token that begins a text
    second window       d|e f g h                 the last token before is its context
    last window             f g h|i j             the rest, with as much context as fits
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pretrain.data.preparation.documents import PieceReader
from pretrain.data.preparation.inputs import find_inputs
from pretrain.data.preparation.preparation_plan import Piece, Settings
from pretrain.data.preparation.text_inputs import CORRECT_IT, Tally
from pretrain.data.shards.reader import PreparedData
from pretrain.data.tokenizers.tokenizer import identity_of
from pretrain.errors import ConfigError, DataError
from pretrain.huggingface.open_model import Opened
from pretrain.models.attention_ways import changing_shapes
from pretrain.models.generate import batchable

Window = tuple[list[int], list[int]]
"""Context, which is not empty, and the tokens after it that are predicted."""
WINDOWS_AT_ONCE = 1024
"""Windows that are sorted by length together, so that batches have little padding."""


@dataclass(frozen=True)
class Score:
    """How likely some texts are. `nats`: minus the logarithm of their probability; `size`: their bytes of UTF-8, None if unknown."""

    name: str
    documents: int
    tokens: int
    size: float | None
    nats: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.size if self.size else None

    def as_dict(self) -> dict[str, object]:
        """The score as JSON values."""
        values = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"name": self.name, "documents": self.documents, "tokens": self.tokens, "bytes": self.size, **values}


class Scorer:
    """Log-likelihoods under a model. `length`: inputs that it sees at once, by default as many as it knows; `rows`: windows in a forward pass."""

    def __init__(self, opened: Opened, length: int | None = None, rows: int = 8) -> None:
        longest = opened.network.config.max_sequence_length
        if length is not None and not 1 <= length <= longest:
            raise ConfigError(f"--length {length} is not in 1..{longest}, the positions that the model knows")
        self.opened, self.length, self.rows = opened, length or longest, rows
        self.device = next(opened.network.parameters()).device
        self.begin = opened.begin or [opened.tokenizer.eod_id]
        """What stands before a text: what the model expects, or the end of another document, as in training."""
        opened.known(self.begin, "what stands before every text")

    def windows(self, tokens: Sequence[int]) -> Iterator[Window]:
        """The windows of a text: see the drawing above."""
        text = [*self.begin, *tokens]
        for first in range(len(self.begin), len(text), self.length):
            end = min(first + self.length, len(text))
            yield text[max(0, end - self.length - 1) : first], text[first:end]

    @torch.no_grad()
    @changing_shapes()
    def log_likelihoods(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """By window, the log-likelihood of its predicted tokens in nats, and whether each is the likeliest one.

        Raises DataError for a window that predicts more tokens than the model sees at once.
        """
        if (longest := max((len(predicted) for _, predicted in windows), default=0)) > self.length:
            raise DataError(
                f"a text of {longest} tokens is to be scored as a whole, and the model sees {self.length} at once; leave its task out, or give a "
                "larger --length"
            )
        found: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        texts = [(context + predicted)[-self.length - 1 :] for context, predicted in windows]
        for chosen in self._batches(texts):
            rows = [texts[i] for i in chosen]
            tokens_BT = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.long)
            for row, tokens in enumerate(rows):  # padding comes after all that counts, and nothing looks ahead
                tokens_BT[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            logits_BTV = self.opened.network(tokens_BT.to(self.device))
            for i, tokens, logits_TV in zip(chosen, rows, logits_BTV):
                found[i] = self._of_row(logits_TV, tokens, len(windows[i][1]))
        return found

    def _batches(self, texts: Sequence[list[int]]) -> Iterator[list[int]]:
        """The indices of the texts of each forward pass, the longest first."""
        for group in reversed(batchable(self.opened.network, [len(text) for text in texts])):
            group.sort(key=lambda i: -len(texts[i]))
            yield from (group[first : first + self.rows] for first in range(0, len(group), self.rows))

    @staticmethod
    def _of_row(logits_TV: torch.Tensor, tokens: list[int], predicted: int) -> tuple[float, bool]:
        scores = logits_TV[len(tokens) - 1 - predicted : len(tokens) - 1].float().log_softmax(-1)
        target = torch.tensor(tokens[len(tokens) - predicted :], device=scores.device)
        return float(scores.gather(1, target[:, None]).double().sum()), bool((scores.argmax(-1) == target).all())

    def score(self, name: str, texts: Iterable[tuple[Sequence[int], float | None]], most_tokens: int | None = None) -> Score:
        """The score of texts, each given as its tokens and its size in bytes. After `most_tokens` no further text is taken."""
        documents = tokens = 0
        size: float | None = 0.0
        nats = 0.0
        waiting: list[Window] = []
        for ids, bytes_of_text in texts:
            documents, tokens = documents + 1, tokens + len(ids)
            size = None if size is None or bytes_of_text is None else size + bytes_of_text
            waiting += self.windows(ids)
            if len(waiting) >= WINDOWS_AT_ONCE:
                nats -= math.fsum(value for value, _ in self.log_likelihoods(waiting))
                waiting = []
            if most_tokens is not None and tokens >= most_tokens:
                break
        nats -= math.fsum(value for value, _ in self.log_likelihoods(waiting))
        if not tokens:
            raise DataError(f"{name}: has no text to score")
        return Score(name, documents, tokens, size, nats)


def documents_of(pattern: str, opened: Opened, text_field: str, text_mode: str) -> Iterator[tuple[list[int], float]]:
    """Tokens and size of each document in files of text: the kinds that preparation reads. Raises DataError."""
    settings = Settings(text_field=text_field, text_mode=text_mode)
    for file in find_inputs([pattern]):
        reader = PieceReader(Piece(file), settings, 0, Tally(), CORRECT_IT)
        for text, row in reader.documents():
            if not isinstance(text, str):
                raise DataError(f"{file.name}: has token ids; prepare them, and give the prepared directory")
            if text:
                origin = reader.origin(row)
                yield opened.known(opened.tokenizer.encode(text, origin), origin), float(len(text.encode("utf-8")))


def prepared_documents(path: Path, opened: Opened) -> Iterator[tuple[list[int], float | None]]:
    """Tokens of prepared data, each document with its end, and their size by the data's mean. Raises DataError if the tokenizers differ."""
    data = PreparedData.open(path)
    if difference := identity_of(opened.tokenizer).difference(data.manifest.tokenizer):
        raise DataError(f"{path}: the model and the data have {difference}; give the text itself with --text")
    for document in range(data.documents):
        start, end = data.document_span(document)
        yield opened.known(data.read(start, end - start).tolist(), f"{path}, document {document + 1}"), _size(data, end - start)


def _size(data: PreparedData, tokens: int) -> float | None:
    return None if data.bytes_per_token is None else float(data.bytes_per_token) * tokens
