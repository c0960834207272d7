"""The configuration: one dataclass per YAML section.

Every key carries its documentation and its legal range, so that checking (`load.py`), docs/configuration.md
(`tools/make_docs.py`) and the code that uses it read the same definition. `null` means that a value is worked out, or that something is
off; the key's text says which. The resolved configuration (`--print-config`, and config.yaml in the run directory) has the values of the
model, the seed of the data, and steps for lengths in tokens. Other keys may stay null or `auto` there. The layout that they come to is printed
when a run starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.data_schema import Data
from pretrain.config.keys import MOST_STEPS, SET, TOKENS_OF_A_RUN, UNSET, Except, key, section
from pretrain.config.log_schema import Log
from pretrain.config.model_schema import Model
from pretrain.config.optim_schema import Optim, Schedule
from pretrain.config.parallel_schema import Parallel, Precision


@dataclass
class Run:
    """What is run, where it is kept, and how it continues."""

    name: str | None = key(None, "Name of the run directory; the stem of the config file by default.")
    dir: str = key("runs", "Folder that holds run directories.")
    seed: int = key(
        0, "Seed of the initial weights, and of the data order unless `data.seed` is set.", ge=0, le=2**63 - 1, resume="accept"
    )
    steps: int = key(
        1000, "Optimizer steps of the whole run.", ge=1, resume="schedule", le=MOST_STEPS, when={"run.tokens": UNSET}
    )
    tokens: int | None = key(
        None,
        "Instead of `steps`: tokens of the whole run (samples × sequence_length). Its last step is the first that reaches them.",
        ge=1,
        resume="schedule",
        le=TOKENS_OF_A_RUN,
        when={"data.pairs": UNSET},
    )
    resume: str = key(
        "auto",
        "`auto` continues from the run's newest good checkpoint or starts. `required` fails without a checkpoint, and `never` refuses a "
        "run directory that has one. A path continues from that checkpoint or run directory. The path of an older checkpoint of the run "
        "itself goes back to it: newer ones are set aside and not deleted.",
    )
    init_from: str | None = key(
        None,
        "Checkpoint whose weights a new run starts from (step 0, fresh optimizer), e.g. of `convert_checkpoint.py from-hf`.",
    )
    lock: Literal["auto", "flock", "file"] = key(
        "auto",
        "How a run directory is kept to one trainer. `flock` is the system's own lock. `file` is for file systems without it: a file whose "
        "owner gives a sign of life every 15 s. `auto` takes `flock` where it works, and waits for signs of life of an owner on another host too.",
    )
    accept_changes: list[str] = key(
        [],
        "Keys whose change since the checkpoint is meant, e.g. [optim.lr, data.seed]: what would be an error is then a "
        "warning. The error names them, and the last column of these tables says which keys need it.",
    )
    threads: int | None = key(
        None,
        "Threads that a process computes with on a CPU. By default OMP_NUM_THREADS if it is set, else all cores; torchrun sets it to 1 if it starts "
        "several processes.",
        ge=1,
        le=4096,
        resume="free",
    )
    affinity: Literal["none", "cores"] = key(
        "none",
        "`cores`: keep each process on cores of its own, by NUMA node. On a CPU processes divide the host's cores; with GPUs a process gets those near "
        "its GPU, shared with other ranks near them.",
        resume="free",
    )
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "FA3", "FA4"] = key(
        "auto",
        "The kernel of attention. On GPUs it is a kernel of scaled_dot_product_attention. `auto`: torch chooses by shape; cuDNN is left out where shapes "
        "change all the time (pairs, generation), because it plans each new shape. Any other value: only this kernel is used, and inputs that it cannot "
        "take are an error. `FA3` and `FA4` are packages in place of torch's flash kernel; install them first. FlexAttention is not affected. "
        "On CPUs, `auto` trains with blocks of matrix products where they are faster: in bf16; in fp32 without masks, with one thread per process, a head_dim "
        "above 32 and 129 to 1,536 positions. `flash` is torch's fused kernel there. The start of a run says which kernel is used.",
        resume="free",
    )
    deterministic: bool = key(
        False, "Bitwise reproducible kernels and reductions: the same layout resumed gives the same bits. Slower."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Device of every rank; `auto` is CUDA if torch sees a GPU.")


@dataclass
class BatchStage:
    """A stage of a batch-size ramp."""

    until_tokens: int = key(
        "???",
        "Steps that begin before so many tokens (samples × sequence_length) take `sequences` samples.",
        ge=1,
        le=TOKENS_OF_A_RUN,
    )
    sequences: int = key("???", "Samples per optimizer step in this stage, over all ranks.", ge=1, le=2**40)


@dataclass
class LengthStage:
    """A stage of a run whose sequences are shorter than its samples."""

    until_tokens: int = key(
        "???",
        "Steps that begin before so many tokens (samples × sequence_length) have rows of `length` tokens.",
        ge=1,
        le=TOKENS_OF_A_RUN,
    )
    length: int = key("???", "Tokens of a row: a divisor of `data.sequence_length`.", ge=1, le=2**40)


@dataclass
class Batch:
    """How many samples make an optimizer step. Accumulation is derived, never set."""

    sequences: int = key(
        16,
        "Samples per optimizer step, over all ranks: a multiple of `micro_sequences` times the data-parallel ranks.",
        ge=1,
        when={"data.pairs": UNSET},
        le=2**40,
    )
    micro_sequences: int = key(
        16,
        "Samples per rank in one forward and backward (a micro-step). Decides memory and speed, not the result.",
        ge=1,
        when={"data.pairs": UNSET},
        resume="free",
        le=2**40,
    )
    tokens: int | None = key(
        None,
        "On `data.pairs`, instead of `sequences`: most tokens of an optimizer step over all ranks, (longest source + longest target) × "
        "pairs.",
        ge=1,
        when={"data.pairs": SET},
        resume="never",
        le=2**50,
    )
    micro_tokens: int | None = key(
        None,
        "On `data.pairs`, instead of `micro_sequences`: most tokens per rank in one forward and backward, counted alike; by default "
        "a rank's whole share. Decides memory and speed, not the result.",
        ge=1,
        when={"data.pairs": SET},
        resume="free",
        le=2**50,
    )
    ramp: list[BatchStage] = key(
        [], "Other sizes before `sequences` is reached: a batch-size ramp, stage after stage.", when={"data.pairs": UNSET}
    )
    lengths: list[LengthStage] = key(
        [],
        "Shorter sequences before `data.sequence_length` is reached, stage after stage: each sample is cut into rows of `length` tokens, and "
        "attention stays within a row. Order, targets and tokens per step are the same.",
        when={"data.pairs": UNSET, "data.objective": ("next_token",)},
    )


TRANSLATING = {"validation.translation.every_steps": SET}


@dataclass
class Translation:
    """Translations of validation pairs, decoded by all ranks together and scored: BLEU and chrF (sacrebleu), character and word error rate."""

    every_steps: int = key(
        0,
        "Optimizer steps between translations of the validation pairs; 0: never.",
        ge=0,
        when={"data.pairs": SET, "data.validation": SET},
        le=MOST_STEPS,
    )
    sequences: int = key(0, "Pairs per validation source: its first ones; 0 takes all.", ge=0, when=TRANSLATING, le=2**40)
    beam: int = key(1, "Hypotheses kept per sentence; 1 is greedy.", ge=1, when=TRANSLATING, le=1000)
    length_penalty: float = key(
        0.6,
        "Exponent of the length normalisation (arXiv 1609.08144, equation 14); 0: none.",
        ge=0,
        when={**TRANSLATING, "validation.translation.beam": Except(1)},
        le=100,
    )
    max_ratio: float = key(
        2.0, "Longest translation, as a multiple of the source's tokens, plus `max_extra`.", ge=0, when=TRANSLATING, le=1000
    )
    max_extra: int = key(
        10,
        "Tokens that a translation may have beyond `max_ratio` times those of its source.",
        ge=1,
        when=TRANSLATING,
        le=1_000_000,
    )
    lowercase: bool = key(False, "Whether scores ignore case.", when=TRANSLATING)
    samples: int = key(3, "Translations that are written to the log.", ge=0, when=TRANSLATING, le=1_000_000)


@dataclass
class Loss:
    """What is minimised, beside the cross-entropy. Validation reports the cross-entropy alone."""

    label_smoothing: float = key(
        0.0, "Share of each target's probability that is spread over the vocabulary (arXiv 1512.00567).", ge=0, lt=1
    )
    z_loss: float = key(
        0.0,
        "Weight of the squared log-sum-exp of a token's logits, which keeps them from drifting (arXiv 2204.02311); 1e-4 is usual.",
        ge=0,
        le=1000,
    )
    predict_ahead_weight: float = key(
        0.3,
        "Weight of the losses of `model.predict_ahead` together (arXiv 2412.19437, section 4.2).",
        gt=0,
        when={"model.predict_ahead": SET},
        le=1000,
    )
    chunk_mb: int | None = key(
        None,
        "Memory for the logits that exist at one time, MB: they are computed, used and dropped in chunks of tokens. By default 256 on CPU, "
        "1024 on CUDA. Changes memory and speed, not the result.",
        ge=1,
        when={"model.family": Except("hf")},
        resume="free",
        le=1_000_000,
    )


@dataclass
class Validation:
    """Validation loss on a fixed list of samples: the same number at any world size."""

    every_steps: int = key(
        0,
        "Optimizer steps between validations; 0: only after the last step. `data.validation` names what is validated.",
        ge=0,
        when={"data.validation": SET},
        le=MOST_STEPS,
    )
    sequences: int = key(
        64, "Samples per validation source: its first ones; 0 takes all.", ge=0, when={"data.validation": SET}, le=2**40
    )
    prompts: list[str] = key(
        [],
        "Texts that the model continues after each validation, always with the likeliest token.",
        when={"data.validation": SET},
    )
    prompt_tokens: int = key(32, "Tokens of each such continuation.", ge=1, le=1024, when={"validation.prompts": SET})
    translation: Translation = section(Translation)


@dataclass
class Checkpoint:
    """When the state is saved and how long it is kept. The last step is always saved."""

    every_steps: int = key(0, "Optimizer steps between checkpoints; 0: no periodic one.", ge=0, le=MOST_STEPS)
    every_seconds: float = key(1800.0, "Seconds between checkpoints; 0: not by time.", ge=0, le=1e9)
    asynchronous: bool = key(
        False,
        "Write a checkpoint while training goes on. Training stands still only while each rank copies what it will write to the host's memory, "
        "which has to have room for it. The last one of a run is waited for.",
        resume="free",
    )
    keep_last: int = key(
        2,
        "Newest checkpoints kept, beside the last of those saved within a row of skipped steps; 0 keeps all.",
        ge=0,
        le=MOST_STEPS,
    )
    keep_every_steps: int = key(
        0,
        "Each multiple of this step is saved, and its checkpoint is kept for ever; 0: none.",
        ge=0,
        when={"checkpoint.keep_last": Except(0)},
        le=MOST_STEPS,
    )
    upload: str | None = key(
        None,
        "Copy each checkpoint to this object store while training goes on (s3://BUCKET/FOLDER, gs://, az://, file:///), below the run's name. A start "
        "whose run directory has none, or older ones, downloads the newest. Kept there as here (`keep_last`).",
    )
    export_check: bool = key(
        True,
        "Try the export to Hugging Face's format when a run starts, without weights and beside the first steps; the run ends if it "
        "would fail.",
    )


@dataclass
class Config:
    """A whole run. Sections in the order in which they are read."""

    run: Run = section(Run)
    model: Model = section(Model, resume="never")
    data: Data = section(Data, resume="content")
    batch: Batch = section(Batch, resume="accept")
    loss: Loss = section(Loss, resume="accept")
    optim: Optim = section(Optim, resume="accept")
    schedule: Schedule = section(Schedule, resume="schedule")
    parallel: Parallel = section(Parallel)
    precision: Precision = section(Precision, resume="accept")
    validation: Validation = section(Validation)
    checkpoint: Checkpoint = section(Checkpoint)
    log: Log = section(Log)
