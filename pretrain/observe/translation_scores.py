"""Scores of translations: BLEU (Papineni et al., ACL 2002) and chrF (Popović, WMT 2015), and the rates of character and word errors.

BLEU and chrF are computed by sacrebleu (Post, arXiv 1804.08771). All scores are in percent; error rates can exceed 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.errors import ConfigError, install_command


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
