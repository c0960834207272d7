"""Continuations of prompts in the loop: what the model writes, to read along with the curves.

The likeliest token is taken each time. The whole text goes through the network for each token, because that works in every layout; so this is for few
prompts and short continuations. Batches have one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pretrain.config.schema import Config
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.distributed.ranks import Ranks
from pretrain.errors import ConfigError
from pretrain.train.stop import StopPoll


def check_prompts(config: Config) -> None:
    """Raise ConfigError if the model of a run cannot continue texts."""
    if config.validation.prompts and (
        config.data.objective != "next_token" or config.data.pairs is not None or config.model.encoder.layers
    ):
        raise ConfigError(
            "validation.prompts: only models of next tokens continue texts; remove it (pairs: validation.translation)"
        )


class Prompts:
    """The prompts of a run as tokens, which tools/generate.py has of a checkpoint as well. Raises ConfigError for one that is too long,
    and DataError for one that the tokenizer refuses.
    """

    def __init__(self, config: Config, tokenizer_path: Path) -> None:
        options, self.tokenizer = config.validation, load_tokenizer(tokenizer_path)
        self.texts, self.count = options.prompts, options.prompt_tokens
        self.ids = [
            self.tokenizer.encode(text, f"validation.prompts.{number}") or [self.tokenizer.eod_id]
            for number, text in enumerate(self.texts)
        ]
        for number, ids in enumerate(self.ids):
            if len(ids) + self.count > config.data.sequence_length:
                raise ConfigError(
                    f"validation.prompts.{number} has {len(ids)} token{'s' if len(ids) > 1 else ''}, and with validation.prompt_tokens={self.count} more it is longer "
                    f"than data.sequence_length={config.data.sequence_length}; shorten one of them"
                )

    def continued(self, call: Callable[..., Tensor], ranks: Ranks, poll: StopPoll) -> dict[str, str]:
        """The text that follows each prompt, up to the end of a document. All ranks call it together.

        `call`: the network's forward in the layout of the run. Raises Stopped on all ranks if one was asked to stop.
        """
        end, longest = self.tokenizer.eod_id, max(map(len, self.ids)) + self.count
        rows_BT = torch.full((len(self.ids), longest), end)
        for row_T, ids in zip(rows_BT, self.ids):
            row_T[: len(ids)] = torch.tensor(ids)
        row_B, place_B = torch.arange(len(self.ids)), torch.tensor([len(ids) for ids in self.ids])
        poll.begin()
        for made in range(self.count):
            logits_BTV = call(tokens_BT=rows_BT.to(ranks.device))
            # A vocabulary may have more rows than the tokenizer has tokens.
            likeliest_BT = logits_BTV[..., : self.tokenizer.vocab_size].argmax(dim=-1).cpu()
            rows_BT[row_B, place_B + made] = likeliest_BT[row_B, place_B + made - 1]
            poll.check()
        found = {}
        for text, ids, row in zip(self.texts, self.ids, rows_BT.tolist()):
            new = row[len(ids) : len(ids) + self.count]
            found[text] = self.tokenizer.decode(new[: new.index(end)] if end in new else new)
        return found
