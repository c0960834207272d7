"""The sections of data: the sources, how their tokens become samples, the order of samples, and what the model learns from one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.keys import SET, TOKENS_OF_A_RUN, UNSET, key, section


@dataclass
class Source:
    """One prepared directory."""

    path: str = key(
        "???",
        "Directory written by tools/prepare_data.py. Where it wrote `train` and `validation`, name one of them: data/web/train.",
    )
    name: str | None = key(
        None, "Name in logs and in `data.stages`; by default the directory's, or its parent's where that is `train`."
    )
    weight: float | None = key(
        None,
        "Share of the samples, relative to the weights of the other sources; 1 by default, 0 to be named in a stage only.",
        ge=0,
        le=1e15,
    )
    tokens: int | None = key(
        None,
        "Budget of this source, instead of a weight: how many of its tokens a run reads that is as long as all budgets together. If one source has a "
        "budget, all need one.",
        ge=1,
        le=TOKENS_OF_A_RUN,
    )
    loss_weight: float = key(
        1.0,
        "Factor on the losses of its samples in what is minimised. `loss` in the log stays the cross-entropy of all samples alike.",
        ge=0,
        le=1e6,
    )
    max_epochs: int | None = key(
        None,
        "Most repetitions: a source that has come so often leaves the mixture, and its share goes to the others.",
        ge=1,
        le=2**31,
    )


@dataclass
class ValidationSource:
    """One prepared directory that is not trained on."""

    path: str = key("???", "Directory written by tools/prepare_data.py.")
    name: str | None = key(None, "Name in logs; by default the directory's, or its parent's where that is `validation`.")


@dataclass
class MixtureStage:
    """A part of the stream with weights of its own."""

    until_tokens: int | None = key(
        None,
        "Where the stage ends, in tokens since the start of the run (samples × sequence_length); null: never.",
        ge=1,
        le=TOKENS_OF_A_RUN,
    )
    weights: dict[str, float] = key(
        {}, "Weight of each source by name; 0 where none is given. Empty: the sources' own weights.", ge=0, le=1e15
    )


@dataclass
class Text:
    """Instead of prepared `sources`, text, which the first start prepares in `data.cache.dir`; later starts find it there."""

    input: list[str] = key([], "Files, folders, globs and URLs of text, as of tools/prepare_data.py --input.")
    dataset: str | None = key(None, "Instead of files, a Hugging Face dataset, by name (it is downloaded) or a directory.")
    dataset_config: str | None = key(None, "Configuration of the dataset.", when={"data.text.dataset": SET})
    revision: str | None = key(
        None, "Revision of the dataset; give one, so that it cannot change during the run.", when={"data.text.dataset": SET}
    )
    split: str = key("train", "Split of the dataset.", when={"data.text.dataset": SET})
    tokenizer: str | None = key(None, "Directory or file of the tokenizer.")
    text_field: str = key("text", "JSON field, or column, that holds the text.")
    documents: Literal["file", "line"] = key("file", "What a document is in plain text.", when={"data.text.dataset": UNSET})


@dataclass
class CacheOptions:
    """Local copies of what lies on remote storage, prepared text and packing indices."""

    dir: str | None = key(
        None, "Folder on a local disk; `pretrain` in the user's cache folder ($XDG_CACHE_HOME, ~/.cache) by default."
    )
    limit_gb: float = key(100.0, "Most that is kept of remote shards, GB; the least recently used are dropped.", gt=0, le=1e9)


@dataclass
class SpanOptions:
    """The objective of T5 (arXiv 1910.10683, section 3.1.4): spans are taken out of a sample, the encoder reads the rest, the decoder writes
    the spans. The number of tokens that are lost, and of spans, is the same in every sample.
    """

    noise_density: float = key(0.15, "Share of a sample's tokens that is taken out.", gt=0, lt=1)
    mean_span_length: float = key(3.0, "Tokens of a span on average.", ge=1, le=2**31 - 1)
    sentinels: int = key(
        100,
        "Ids at the end of the vocabulary that stand for a span each, beyond those of the tokenizer; a sample's spans at most.",
        ge=1,
        le=2**26,
    )
    first_sentinel: int | None = key(
        None,
        "Id that stands for the first span of a sample, where the tokenizer has sentinels itself (32099 with T5's own); those of the "
        "others count down. By default the last id of the vocabulary with `sentinels`.",
        ge=0,
        le=2**26,
    )


@dataclass
class Data:
    """What is read and in which order."""

    sequence_length: int = key(
        256,
        "Tokens per sample; the target of each is the token after it. With `objective: span_corruption`, before "
        "corruption: 568 make T5's sources of 512 and targets of 114.",
        ge=1,
        le=2**31 - 1,
        when={"data.pairs": UNSET},
    )
    sources: list[Source] = key([], "Training data: one or more prepared directories, mixed by weight.")
    stages: list[MixtureStage] = key(
        [],
        "Weights that change during the run, stage after stage. Stages, and sources, may be added to a run under way.",
        when={"data.pairs": UNSET},
    )
    validation: list[ValidationSource] = key([], "Validation data; each source gets a loss of its own.", resume="free")
    objective: Literal["next_token", "span_corruption"] = key(
        "next_token",
        "What is learnt from a sample: each token from those before it, or, by an encoder-decoder, spans that were taken out.",
        when={"data.pairs": UNSET},
    )
    span_corruption: SpanOptions = section(SpanOptions, when={"data.objective": ("span_corruption",)})
    packing: Literal["concatenate", "best_fit", "padded"] = key(
        "concatenate",
        "How documents become samples: end to end and cut into windows; as many whole documents as fit (arXiv 2404.10830); or one "
        "document per sample. The latter two cut only documents longer than a sample, and pad.",
        when={"data.pairs": UNSET},
    )
    document_mask: bool = key(
        False,
        "No token attends to another document in its sample, and positions start at 0 in each document.",
        when={"data.pairs": UNSET, "data.packing": ("concatenate", "best_fit")},
    )
    boundary_loss: bool = key(
        True,
        "Whether the first token of a document is a target where another document stands before it.",
        when={"data.pairs": UNSET, "data.packing": ("concatenate", "best_fit")},
    )
    shuffle: Literal["full", "shards"] = key(
        "full",
        "Order of an epoch. `full`: any sample may come at any time. `shards`: a few shards are open at a time, and their samples are mixed; for remote "
        "storage.",
        when={"data.pairs": UNSET},
    )
    shuffle_shards: int = key(
        8, "Shards that are mixed at a time with `shuffle: shards`.", ge=1, le=2**31 - 1, when={"data.shuffle": ("shards",)}
    )
    seed: int | None = key(None, "Seed of the data order; `run.seed` by default.", ge=0, le=2**63 - 1)
    workers: int = key(
        1,
        "Prefetching threads per rank; changes nothing but speed. 0 reads in the training thread.",
        ge=0,
        le=64,
        resume="free",
    )
    verify: Literal["full", "size"] = key(
        "full", "Check of the shards at start: sha256 of every file (shared among the ranks), or sizes only.", resume="free"
    )
    text: Text = section(Text)
    pairs: str | None = key(
        None,
        "Instead of `sources`: sentence pairs for an encoder-decoder, a directory written by tools/prepare_pairs.py. A step then takes "
        "`batch.tokens`, and `validation` names such directories too.",
    )
    cache: CacheOptions = section(CacheOptions, resume="free")
