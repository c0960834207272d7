"""Generated text as it comes: shown piece by piece, and ended at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pretrain.data.tokenizers.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no whole character yet."""


class TextWatch:
    """Follows rows of `generate_batch` as its `ends`. `show` gets each piece of text of a row once no later token can change it."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), show: Callable[[int, str], object] | None = None
    ) -> None:
        self._tokenizer, self._stops, self._show = tokenizer, [stop for stop in stops if stop], show
        self._shown: dict[int, int] = {}

    def __call__(self, row: int, tokens: list[int]) -> bool:
        text = self.decode(tokens)
        stopped = any(stop in text for stop in self._stops)
        if self._show is not None:
            self._pass_on(row, self.cut(text) if stopped else text[: len(text) - self._open_end(text)])
        return stopped

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. A vocabulary may have more rows than the tokenizer has tokens; such a token has no text."""
        return self._tokenizer.decode([token for token in tokens if token < self._tokenizer.vocab_size])

    def cut(self, text: str) -> str:
        """The text before its first stop string."""
        return text[: min((text.index(stop) for stop in self._stops if stop in text), default=len(text))]

    def finish(self, row: int, tokens: Sequence[int]) -> str:
        """The whole text of a row that has ended. What was held back of it is shown."""
        text = self.cut(self.decode(tokens))
        if self._show is not None:
            self._pass_on(row, text)
        return text

    def _open_end(self, text: str) -> int:
        """Characters at the end that may still become part of a stop string, or are not whole."""
        whole = text.rstrip(REPLACEMENT)
        longest = max((n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])), default=0)
        return len(text) - len(whole) + longest

    def _pass_on(self, row: int, text: str) -> None:
        before = self._shown.get(row, 0)
        if len(text) > before:
            self._shown[row] = len(text)
            self._show(row, text[before:])
