"""Translations of validation pairs: all ranks decode them together, and the main rank scores and shows them.

The scores are BLEU (Papineni et al., ACL 2002) and chrF (Popović, WMT 2015), computed by sacrebleu (Post, arXiv 1804.08771), and the
rates of character and word errors. All are in percent; error rates can exceed 100.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.pairs.prepared_pairs import Line, PreparedPairs, encode_lines, read_lines
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.distributed.ranks import Ranks
from pretrain.errors import ConfigError, DataError, GenerationError, install_command
from pretrain.huggingface.open_model import known_ids, open_translator
from pretrain.models.generate import Search, are_no_numbers, translate
from pretrain.models.shape import start_token
from pretrain.train.stop import StopPoll

log = logging.getLogger(__name__)

CHUNK = 64
"""Sentences that are decoded together. The number is fixed, so that a chunk has the same sentences at every world size."""


def translate_and_score(
    call: Callable[..., Tensor], pairs: PreparedPairs, config: Config, ranks: Ranks, share: tuple[int, int], poll: StopPoll
) -> dict[str, float] | None:
    """Scores of the translations of a validation source, on the main rank; None on the others, who decode their share (`translate_sources`).

    References are decoded from the targets' tokens; preparation counts those that differ from the text. Raises Stopped on all
    ranks if one was asked to stop.
    """
    options = config.validation.translation
    numbers = np.arange(min(options.sequences, len(pairs)) if options.sequences else len(pairs))
    search = Search(options.beam, options.length_penalty, options.max_ratio, options.max_extra)
    sources, targets = ranks.attempt("reading of pairs", lambda: pairs.read(numbers), DataError)
    end = pairs.target.eod_id
    start = start_token(config.model, end)
    translations = translate_sources(numbers_only(call), sources, config.model.layers, start, end, search, ranks, share, poll)
    if not ranks.is_main:
        return None
    source_tokenizer, tokenizer = (_tokenizer(str(side.tokenizer_path)) for side in (pairs.source, pairs.target))
    hypotheses = [text_of(tokenizer, tokens) for tokens in translations]
    references = [text_of(tokenizer, target[:-1].tolist()) for target in targets]
    for i in np.linspace(0, len(numbers), min(options.samples, len(numbers)), endpoint=False).astype(int).tolist():
        log.info("source     %s", text_of(source_tokenizer, sources[i][:-1].tolist()))
        log.info("reference  %s", references[i])
        log.info("hypothesis %s", hypotheses[i])
    return score(hypotheses, references, options.lowercase).numbers()


def numbers_only(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A network whose logits are numbers. A run that has diverged is found by its loss: its translations are worth nothing, and only have to end."""
    return lambda **inputs: call(**inputs).nan_to_num()


def translate_sources(
    call: Callable[..., Tensor],
    sources: list[np.ndarray],
    layers: int,
    start_id: int,
    end_id: int,
    search: Search,
    ranks: Ranks,
    share: tuple[int, int] = (0, 1),
    poll: StopPoll | None = None,
) -> list[list[int]]:
    """The translation of each source (token ids, its end token included), the same on every rank.

    Chunks of sentences of similar length are dealt out. `share`: this rank's number among those that see different samples, and how many
    these are. All ranks make the same number of calls. `poll`: checked at every token.
    """

    def agree(number: int) -> int:
        if poll is not None:
            poll.check()
        return ranks.largest("length of translations", number)

    if poll is not None:
        poll.begin()
    by_length = sorted(range(len(sources)), key=lambda i: (-len(sources[i]), i))
    chunks = [by_length[i : i + CHUNK] for i in range(0, len(by_length), CHUNK)]
    results: dict[int, list[int]] = {}
    number, count = share
    for first in range(0, len(chunks), count):
        mine = chunks[first + number] if first + number < len(chunks) else []
        rows = [sources[i] for i in mine] or [np.array([end_id])]
        lengths_B = torch.tensor([len(row) for row in rows])
        source_BS = torch.full((len(rows), int(lengths_B.max())), end_id)
        for row, source in enumerate(rows):
            source_BS[row, : len(source)] = torch.from_numpy(source)
        inputs = source_BS.to(ranks.device), lengths_B.to(ranks.device)
        found = translate(call, *inputs, layers, start_id, end_id, search, agree)
        results |= dict(zip(mine, found))
    together = {i: tokens for part in ranks.gather("translations", results) for i, tokens in part.items()}
    return [together[i] for i in range(len(sources))]


def translate_file(
    model: Path, source: str, reference: str | None, search: Search, lowercase: bool
) -> tuple[list[str], list[str] | None]:
    """The translation of each line of a file, and the lines of `reference`. The translation of an empty line is empty.

    Raises GenerationError where the model's logits are no numbers. Raises ConfigError if there are references and no sacrebleu to score them. Raises DataError, naming the line, for one that is not UTF-8,
    that the tokenizer refuses, or that has a token which the model does not know. Raises DataError for a reference with another number of lines.
    """
    if reference:
        require_sacrebleu()
    network, source_tokenizer, tokenizer = open_translator(model)
    model, end = network.config, tokenizer.eod_id
    known_ids([end], model.vocab_size, "the end of a translation")
    lines = list(_usable_lines(source, lowercase))
    references = [line.text for line in _usable_lines(reference, lowercase)] if reference else None
    if references is not None and len(references) != len(lines):
        raise DataError(
            f"{reference} has {len(references)} lines, but {source} has {len(lines)}; line i of one must translate line i of the other"
        )
    if not lines:
        raise DataError(f"{source} has no lines")
    filled = [i for i, line in enumerate(lines) if line.text]
    sources = encode_lines(source_tokenizer, [lines[i] for i in filled])
    rows = model.vocab_size if model.encoder.share_embedding else model.encoder.vocab_size
    for i, ids in zip(filled, sources):
        if isinstance(ids, str):  # why it cannot be encoded
            raise DataError(f"{lines[i].origin}: {ids}")
        known_ids(ids.tolist(), rows, lines[i].origin)
    alone = Ranks(0, 0, 1, torch.device("cpu"))

    def checked(**inputs: Any) -> Tensor:
        logits_BTV = network(**inputs)
        if are_no_numbers(logits_BTV).any():
            raise GenerationError(
                f"{source}: the model's logits are no numbers (NaN or infinity): its weights are damaged or diverged; try another checkpoint"
            )
        return logits_BTV

    found = translate_sources(checked, sources, model.layers, start_token(model, end), end, search, alone)
    translations = [""] * len(lines)
    for i, tokens in zip(filled, found):
        translations[i] = text_of(tokenizer, tokens)
    return translations, references


def _usable_lines(file: str, lowercase: bool) -> Iterator[Line]:
    for line in read_lines([file], lowercase):
        if line.problem:
            raise DataError(f"{line.origin}: {line.problem}")
        yield line


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of a sentence. A vocabulary may have more rows than the tokenizer has tokens; those ids have no text."""
    return tokenizer.decode([token for token in tokens if token < tokenizer.vocab_size and token != tokenizer.eod_id]).strip()


@functools.lru_cache(4)
def _tokenizer(path: str) -> Tokenizer:
    return load_tokenizer(path)


@dataclass(frozen=True)
class Scores:
    """The scores of a corpus. `signature`: the settings of sacrebleu's BLEU."""

    bleu: float
    chrf: float
    cer: float
    wer: float
    signature: str

    def numbers(self) -> dict[str, float]:
        """The numbers that are logged."""
        return {"bleu": self.bleu, "chrf": self.chrf, "cer": self.cer, "wer": self.wer}

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f}  chrF {self.chrf:.2f}  CER {self.cer:.2f}  WER {self.wer:.2f}"


def require_sacrebleu() -> None:
    """Raise ConfigError if sacrebleu is not installed: at the start of a run, not at its first score."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"BLEU and chrF need sacrebleu, which is not installed; run {install_command('translation')}"
        ) from error


def score(hypotheses: Sequence[str], references: Sequence[str], lowercase: bool = False) -> Scores:
    """Scores of one hypothesis for each reference. `lowercase`: compare both sides in lower case."""
    require_sacrebleu()
    from sacrebleu.metrics import BLEU, CHRF

    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if lowercase:
        hypotheses, references = ([text.lower() for text in side] for side in (hypotheses, references))
    # The text is in lower case already; sacrebleu needs the option to say so in its signature.
    bleu, chrf = BLEU(lowercase=lowercase), CHRF(lowercase=lowercase)
    return Scores(
        bleu.corpus_score(hypotheses, [references]).score,
        chrf.corpus_score(hypotheses, [references]).score,
        error_rate([list(h) for h in hypotheses], [list(r) for r in references]),
        error_rate([h.split() for h in hypotheses], [r.split() for r in references]),
        str(bleu.get_signature()),
    )


def error_rate(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Insertions, deletions and substitutions in the whole corpus, per hundred units of the references (100 × errors if these are empty)."""
    errors = sum(edit_distance(h, r) for h, r in zip(hypotheses, references, strict=True))
    return 100 * errors / max(1, sum(map(len, references)))


def edit_distance(one: Sequence[str], other: Sequence[str]) -> int:
    """Levenshtein distance, by bit-parallel dynamic programming (Myers, JACM 1999, in Hyyrö's form of 2003).

    A column of differences is two integers, so a step costs O(len(one) / 64).
    """
    if not one:
        return len(other)
    places: dict[str, int] = {}
    for i, unit in enumerate(one):
        places[unit] = places.get(unit, 0) | 1 << i
    mask, last = (1 << len(one)) - 1, 1 << len(one) - 1
    rises, falls, distance = mask, 0, len(one)  # of the distance, down the column
    for unit in other:
        equal = places.get(unit, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right_rises, right_falls = falls | ~(diagonal | rises) & mask, rises & diagonal
        distance += bool(right_rises & last) - bool(right_falls & last)
        right_rises, right_falls = (right_rises << 1 | 1) & mask, right_falls << 1 & mask
        rises, falls = right_falls | ~(diagonal | right_rises) & mask, right_rises & diagonal
    return distance
