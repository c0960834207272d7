"""The configuration: one dataclass per YAML section.

Every key carries its documentation and its legal range, so that checking (`load.py`), docs/configuration.md
(`show.py`) and the code that uses it read the same definition. `null` means "derived"; what it was derived to is in
the resolved configuration (`--print-config`, and config.yaml in the run directory).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.data_schema import Data
from pretrain.config.keys import SET, UNSET, Except, key, section
from pretrain.config.model_schema import Model

MOST_STEPS = 10**12


@dataclass
class Run:
    """What is run, where it is kept, and how it continues."""

    name: str | None = key(None, "Name of the run directory; the stem of the config file by default.")
    dir: str = key("runs", "Folder that holds run directories.")
    seed: int = key(
        0, "Seed of the initial weights, and of the data order unless `data.seed` is set.", ge=0, le=2**63 - 1, resume="accept"
    )
    steps: int = key(
        1000,
        "Optimizer steps of the whole run.",
        ge=1,
        resume="schedule",
        le=MOST_STEPS,
        when={"run.tokens": UNSET},
    )
    tokens: int | None = key(
        None,
        "Instead of `steps`: tokens of the whole run (samples × sequence_length). Its last step is the first that reaches them.",
        ge=1,
        resume="schedule",
        le=2**62,
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
        "owner gives a sign of life every 15 s. `auto` takes `flock` where it works.",
    )
    accept_changes: list[str] = key(
        [],
        "Keys whose change since the checkpoint is meant, e.g. [optim.lr, data.seed]: what would be an error is then a "
        "warning. The error names them, and the last column of these tables says which keys need it.",
    )
    threads: int | None = key(
        None,
        "Threads that a process computes with on a CPU. By default as OMP_NUM_THREADS says, which torchrun sets to 1 for several processes, "
        "else all cores.",
        ge=1,
        le=4096,
        resume="free",
    )
    affinity: Literal["none", "cores"] = key(
        "none",
        "`cores`: keep each process on cores of its own, by NUMA node: on a CPU its share of the host's, on GPUs those near its GPU, which ranks on "
        "one node share.",
        resume="free",
    )
    attention_kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "FA3", "FA4"] = key(
        "auto",
        "On GPUs, the kernel of scaled_dot_product_attention. `auto`: torch's choice by shape; another is the only one that is used, and inputs that "
        "it cannot take are an error. `FA3` and `FA4`: those packages in place of torch's flash kernel; they have to be installed.",
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
        "???", "Steps that begin before so many tokens (samples × sequence_length) take `sequences` samples.", ge=1, le=2**62
    )
    sequences: int = key(
        "???",
        "Samples per optimizer step in this stage, over all ranks.",
        ge=1,
        le=2**40,
    )


@dataclass
class LengthStage:
    """A stage of a run whose sequences are shorter than its samples."""

    until_tokens: int = key(
        "???",
        "Steps that begin before so many tokens (samples × sequence_length) have rows of `length` tokens.",
        ge=1,
        le=2**62,
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


@dataclass
class Translation:
    """Translations of validation pairs, decoded by all ranks together and scored: BLEU and chrF (sacrebleu), character and word error rate."""

    every_steps: int = key(
        0,
        "Optimizer steps between them; 0: never.",
        ge=0,
        when={"data.pairs": SET, "data.validation": SET},
        le=MOST_STEPS,
    )
    sequences: int = key(
        0,
        "Pairs per validation source: its first ones; 0 takes all.",
        ge=0,
        when={"validation.translation.every_steps": SET},
        le=2**40,
    )
    beam: int = key(
        1,
        "Hypotheses kept per sentence; 1 is greedy.",
        ge=1,
        when={"validation.translation.every_steps": SET},
        le=1000,
    )
    length_penalty: float = key(
        0.6,
        "Exponent of the length normalisation (arXiv 1609.08144, equation 14); 0: none.",
        ge=0,
        when={"validation.translation.every_steps": SET},
        le=100,
    )
    max_ratio: float = key(
        2.0,
        "Longest translation, as a multiple of the source's tokens, plus `max_extra`.",
        ge=0,
        when={"validation.translation.every_steps": SET},
        le=1000,
    )
    max_extra: int = key(
        10,
        "Tokens that a translation may have beyond that.",
        ge=1,
        when={"validation.translation.every_steps": SET},
        le=1_000_000,
    )
    lowercase: bool = key(False, "Whether scores ignore case.", when={"validation.translation.every_steps": SET})
    samples: int = key(
        3,
        "Translations that are written to the log.",
        ge=0,
        when={"validation.translation.every_steps": SET},
        le=1_000_000,
    )


@dataclass
class Loss:
    """What is minimised, beside the cross-entropy. Validation reports the cross-entropy alone."""

    label_smoothing: float = key(
        0.0,
        "Share of each target's probability that is spread over the vocabulary (arXiv 1512.00567).",
        ge=0,
        lt=1,
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
        64,
        "Samples per validation source: its first ones; 0 takes all.",
        ge=0,
        when={"data.validation": SET},
        le=2**40,
    )
    prompts: list[str] = key(
        [],
        "Texts that the model continues after each validation, always with the likeliest token.",
        when={"data.validation": SET},
    )
    prompt_tokens: int = key(32, "Tokens of each such continuation.", ge=1, le=1024, when={"validation.prompts": SET})
    translation: Translation = section(Translation)


@dataclass
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own."""

    pattern: str = key(
        "???",
        "Names of parameters, where `*` stands for any characters, e.g. `layers.*.attention.*`; quoted in YAML. Of several groups that match "
        "a name the first one holds.",
    )
    lr_scale: float = key(1.0, "Their learning rate, as a share of the schedule's. 0: they stay as they are.", ge=0, le=1e6)
    weight_decay: float | None = key(
        None,
        "Their weight decay, also for norms, biases and embeddings. By default that of `optim.weight_decay` and its rule.",
        ge=0,
        le=1000,
    )


@dataclass
class MuonOptions:
    """Options of Muon, for the matrices of blocks. All other parameters get AdamW with `optim.betas` and `optim.eps`."""

    momentum: float = key(0.95, "Decay rate of the running mean of gradients (Nesterov's).", ge=0, lt=1)
    polynomial: Literal["polar_express", "quintic"] = key(
        "polar_express",
        "What brings singular values to 1: the best polynomial of each iteration (arXiv 2505.16932), or one for all of them, which leaves "
        "them between 0.7 and 1.2 (kellerjordan.github.io/posts/muon).",
    )
    iterations: int = key(5, "Iterations of the polynomial.", ge=1, le=20)


@dataclass
class AdafactorOptions:
    """Options of Adafactor. Its state is a number per row and per column."""

    decay: float = key(
        0.8,
        "The mean of squares takes in a share of step^-decay of the new ones: all of them at first, less and less later.",
        gt=0,
        le=1,
    )
    clip: float = key(1.0, "Root mean square of a parameter's update beyond which it is scaled down.", gt=0, le=1e6)
    least_scale: float = key(
        1e-3,
        "Steps are as large as the learning rate times the root mean square of the weights, or times this where those are smaller.",
        gt=0,
        le=1e6,
    )


@dataclass
class Optim:
    """The optimizer. Norms, biases and embeddings get no weight decay, by rule."""

    name: Literal["adamw", "lion", "muon", "adafactor"] = key(
        "adamw",
        "AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused where torch has it; Lion (arXiv 2302.06675); Muon for the matrices of blocks and "
        "AdamW for the rest, at one rate (arXiv 2502.16982); Adafactor (arXiv 1804.04235), with steps in proportion to the weights.",
        resume="never",
    )
    lr: float = key(
        3e-4,
        "Peak learning rate; `schedule` scales it.",
        gt=0,
        le=1e38,
    )
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "Decay rates of the running means of the gradient and of its square.",
        ge=0,
        lt=1,
        when={"optim.name": ("adamw", "lion", "muon")},
    )
    eps: float = key(
        1e-8,
        "Added to the root of the mean square that a step is divided by.",
        gt=0,
        le=1,
        when={"optim.name": ("adamw", "muon")},
    )
    weight_decay: float = key(
        0.1,
        "Decoupled weight decay, times the learning rate.",
        ge=0,
        le=1000,
    )
    clip: float = key(
        1.0,
        "Largest 2-norm of all gradients together; larger ones are scaled down to it. 0: never.",
        ge=0,
        le=1e30,
    )
    skip_nonfinite: int = key(
        0,
        "Steps in a row that may be skipped because their loss or gradient is not finite; one more ends the run. A skipped step changes "
        "neither weights nor optimizer state, and its samples are consumed. 0: the first one ends the run.",
        ge=0,
        resume="free",
        le=MOST_STEPS,
    )
    base_width: int | None = key(
        None,
        "The `model.dim` that `lr`, `weight_decay` and `model.init_std` were tuned at. At another one, matrices are drawn and updated so that "
        "the best values stay the best (muP, arXiv 2203.03466): see docs/optimizers.md.",
        ge=1,
        le=1 << 24,
        when={"optim.name": ("adamw", "lion")},
    )
    groups: list[ParameterGroup] = key([], "Parameters with a learning rate or a weight decay of their own, by name.")
    ema_decay: float | None = key(
        None,
        "Keep a running mean of the weights beside them, with this decay per step (0.999, say). It is validated as well, and "
        "tools/convert_checkpoint.py exports it by `--weights ema`.",
        gt=0,
        lt=1,
    )
    muon: MuonOptions = section(MuonOptions, when={"optim.name": ("muon",)})
    adafactor: AdafactorOptions = section(AdafactorOptions, when={"optim.name": ("adafactor",)})


@dataclass
class RateStage:
    """A stage of a piecewise learning rate."""

    steps: int = key("???", "Steps of the stage.", ge=1, le=MOST_STEPS)
    ratio: float = key("???", "Learning rate at its last step, as a share of the peak.", ge=0, le=1000)
    shape: Literal["constant", "linear", "cosine", "exponential"] = key(
        "linear",
        "The way there from the rate before: at once (`constant`), by equal differences, by half a cosine, or by equal ratios.",
    )


@dataclass
class Schedule:
    """Learning rate as a pure function of the step."""

    name: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "piecewise"] = key(
        "cosine",
        "Shape after the warmup. `cosine` and `linear` fall until the last step, `constant` stays, `wsd` (warmup-stable-decay, "
        "arXiv 2405.18392) stays and then falls for `decay_steps`, `inverse_sqrt` (arXiv 1706.03762, section 5.3) falls with the "
        "square root of the step, from `optim.lr` at `warmup_steps`, `piecewise` follows `stages`.",
    )
    warmup_steps: int = key(
        0,
        "Steps of linear warmup, from `optim.lr / warmup_steps` at step 1 to `optim.lr`. Shortened, with a line that says so, where `run.steps` is below.",
        ge=0,
        le=MOST_STEPS,
        when={"schedule.warmup_tokens": UNSET},
    )
    warmup_tokens: int | None = key(
        None,
        "Instead of `warmup_steps`: the warmup's last step is the first that reaches so many tokens.",
        ge=1,
        le=2**62,
        when={"data.pairs": UNSET},
    )
    min_ratio: float = key(
        0.1,
        "Learning rate at the last step, as a share of the peak.",
        ge=0,
        le=1,
        when={"schedule.name": ("cosine", "linear", "wsd")},
    )
    decay_steps: int | None = key(
        None,
        "Steps of the final decay of `wsd`; a tenth of `run.steps` by default.",
        ge=1,
        when={"schedule.name": ("wsd",), "schedule.decay_tokens": UNSET},
        le=MOST_STEPS,
    )
    decay_tokens: int | None = key(
        None,
        "Instead of `decay_steps`: tokens of the steps of the final decay.",
        ge=1,
        le=2**62,
        when={"schedule.name": ("wsd",), "data.pairs": UNSET},
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt", "exponential"] = key(
        "linear",
        "How `wsd` falls: by equal differences, by half a cosine, as 1 - sqrt(share of the decay) (best in arXiv 2405.18392), or by equal "
        "ratios (arXiv 2404.06395).",
        when={"schedule.name": ("wsd",)},
    )
    stages: list[RateStage] = key(
        [],
        "What `piecewise` does after the warmup, stage after stage; after the last one the rate stays.",
        when={"schedule.name": ("piecewise",)},
    )


@dataclass
class DDP:
    """Options of DistributedDataParallel."""

    bucket_mb: float = key(
        25.0,
        "Gradients are reduced in buckets of this size, MiB, while backward goes on.",
        gt=0,
        le=1_000_000,
    )
    gradient_as_bucket_view: bool = key(True, "Let gradients be views of the buckets: saves a copy of the gradients.")


@dataclass
class Parallel:
    """How the model is spread over processes. Changes speed and memory, never the mathematics."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = key(
        "auto",
        "`single` process; `ddp` replicates; `fsdp` shards with FSDP2 (HSDP when `replicate` and `shard` are both above 1); "
        "`auto`: fsdp where `shard`, `context`, `tensor`, `pipeline` or `expert` is above 1, else single on one process, else ddp where the "
        "replicated state fits in 40% of the device memory (always on CPU), else fsdp.",
    )
    replicate: int | None = key(
        None,
        "Copies of the model; by default one per process with ddp, and with fsdp one, or the processes over `shard` (or write -1).",
        ge=1,
        le=10_000_000,
        rest=True,
    )
    shard: int | None = key(
        None,
        "Ranks that share one copy, each with a part of it; by default the processes over `replicate` (or write -1).",
        ge=1,
        le=10_000_000,
        rest=True,
    )
    tensor: int = key(
        1,
        "Ranks that share the matrices of every layer, and the positions of the sequences between them (tensor and sequence parallelism). Of this key, "
        "`context` and `pipeline`, one may be -1: the processes that the others leave.",
        ge=1,
        le=10_000_000,
        rest=True,
        when={"parallel.strategy": ("fsdp",)},
    )
    context: int = key(
        1,
        "Ranks that share the positions of every sequence (context parallelism), for sequences that are too long for one device.",
        ge=1,
        le=10_000_000,
        rest=True,
        when={"parallel.strategy": ("fsdp",)},
    )
    context_method: Literal["allgather", "ring"] = key(
        "allgather",
        "How queries meet the keys and values of other ranks: `allgather` gathers them in every layer; with `ring` they travel from rank to rank, and "
        "backward keeps only a rank's own, which needs less memory and more messages.",
        when={"parallel.context": Except(1)},
    )
    pipeline: int = key(
        1,
        "Ranks that share the layers, each with a stage of them, and pass on hidden states (pipeline parallelism).",
        ge=1,
        le=10_000_000,
        rest=True,
        when={"parallel.strategy": ("fsdp",)},
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipev"] = key(
        "1f1b",
        "In which order a rank takes micro-batches: `1f1b`, one forward, one backward; `gpipe`, all forward, then all backward, which needs more "
        "memory; `interleaved`, as 1f1b with `pipeline_chunks` stages per rank, which waits less and sends more; `zero_bubble`, gradients of "
        "weights while others would wait; `zero_bubble_v` and `dualpipev`, so too with two stages per rank, which waits least and sends more.",
        when={"parallel.pipeline": Except(1)},
    )
    pipeline_chunks: int = key(
        2, "Stages of each rank of the pipeline.", ge=2, le=10_000, when={"parallel.pipeline_schedule": ("interleaved",)}
    )
    expert: int = key(
        1,
        "Ranks that share the experts of every layer: each holds some of them, and tokens travel to them (expert parallelism). It takes no "
        "ranks of its own: it divides `shard` x `context`, and `model.experts.count`.",
        ge=1,
        le=10_000_000,
        when={"parallel.strategy": ("fsdp",)},
    )
    grad_sync: Literal["auto", "last", "every"] = key(
        "auto",
        "When the gradients of several micro-steps are synchronised: in the `last` micro-step only (no_sync: less communication), "
        "in `every` one, or `auto`: `last` for ddp; `every` for fsdp, which keeps gradients sharded; for HSDP, reduce-scatter in "
        "every one and all-reduce in the last. Pipelines that compute gradients of weights apart (`zero_bubble`, `zero_bubble_v`, `dualpipev`): `last`.",
        when={"parallel.strategy": Except("single")},
    )
    reshard_after_forward: Literal["always", "never", "last_block_kept"] | int = key(
        "always",
        "What becomes of gathered weights after forward: `always` frees them (ZeRO-3), `never` keeps them for backward (ZeRO-2), "
        "`last_block_kept` keeps those of the last block, whose backward comes first. A number frees all but this rank's part among so many "
        "neighbours, for instance the GPUs of a host, so that backward gathers inside the host.",
        ge=2,
        le=10_000_000,
        when={"parallel.strategy": ("fsdp",)},
    )
    prefetch: int = key(
        0,
        "Units (embedding, blocks, head) whose weights are gathered ahead of the one that computes, in forward and in backward. 0 leaves it "
        "to torch: none ahead in forward, one in backward.",
        ge=0,
        le=100_000,
        when={"parallel.strategy": ("fsdp",)},
    )
    offload: bool = key(
        False,
        "Keep sharded weights, gradients and optimizer state in host memory.",
        when={"parallel.strategy": ("fsdp",)},
    )
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "none",
        "What backward recomputes instead of storing it, in each block: `full` all but the block's inputs, `selective` all but the results "
        "of projections and of fused attention, `none` nothing.",
    )
    checkpoint_every_block: int = key(
        1,
        "Every how many-th block recomputes; the others store everything.",
        ge=1,
        le=100_000,
        when={"parallel.activation_checkpointing": Except("none")},
    )
    activation_offload: bool = key(
        False,
        "Keep what blocks store for backward in host memory. A GPU copies while it computes, and needs host memory for all blocks' activations.",
    )
    compile: Literal["none", "blocks", "model"] = key(
        "none",
        "What torch.compile compiles, for a slower start and faster steps: each of the `blocks`, which all share one compiled function, or the "
        "`model` as a whole (strategies single and ddp only).",
    )
    activation_memory_budget: float = key(
        1.0,
        "Share of the compiled activations that is stored; torch's compiler chooses what backward recomputes. 1: all; 0: only inputs.",
        ge=0,
        le=1,
        when={"parallel.compile": ("blocks", "model"), "parallel.activation_checkpointing": ("none",)},
    )
    backend: Literal["auto", "gloo", "nccl"] = key(
        "auto", "Library for communication; `auto`: NCCL on CUDA, gloo on CPU.", when={"parallel.strategy": Except("single")}
    )
    timeout_seconds: int = key(
        600, "Longest wait for another rank in a collective before the run fails, naming it.", ge=1, le=30 * 86400
    )
    join_seconds: int = key(
        600,
        "Longest wait at the start for a process of which nothing is heard; those that are there and open their data may take longer.",
        ge=1,
        le=30 * 86400,
        when={"parallel.strategy": Except("single")},
    )
    ddp: DDP = section(DDP, when={"parallel.strategy": ("ddp",)})


@dataclass
class Precision:
    """Number formats. Vectors (norms, biases) are stored in fp32 in any case, with their gradients and moments."""

    compute: Literal["fp32", "bf16", "auto"] = key(
        "fp32",
        "Format of activations and of the weights as used in forward and backward. `auto`: bf16 where this device multiplies faster in it, "
        "which is measured on a CPU; printed, and recorded as what it came to.",
    )
    fp8: Literal["none", "tensorwise", "rowwise", "mxfp8"] = key(
        "none",
        "Projections of blocks multiply in fp8, with a scale per tensor, one per row, or one per 32 numbers. It is made for GPUs from Ada and "
        "Hopper on (`mxfp8`: Blackwell), and for `parallel.compile`; a CPU computes the same slowly.",
        when={"precision.compute": ("bf16",)},
    )
    fp8_modules: list[str] = key(
        ["*"],
        "Names of the projections that do so; `*` may abbreviate. Experts, routers and the output head never do.",
        when={"precision.fp8": ("tensorwise", "rowwise", "mxfp8")},
    )
    tf32: bool = key(
        False,
        "On GPUs, whether products of fp32 matrices keep ten bits of each factor (TF32): several times faster, and less exact than fp32.",
        when={"precision.compute": ("fp32",)},
    )
    reduce: Literal["fp32", "bf16"] = key(
        "fp32", "Format in which gradients are summed over ranks.", when={"parallel.strategy": Except("single")}
    )
    master: Literal["fp32", "bf16"] = key(
        "fp32",
        "Format in which matrices are stored. In bf16 they are rounded at random after a step, in proportion to what is cut off, or else small "
        "updates would be lost. The random numbers follow from the step and the place of a weight: they are the same in every layout.",
        resume="never",
    )
    gradients: Literal["fp32", "bf16"] | None = key(
        None,
        "Format in which the gradients of matrices are added up over micro-steps and kept; null: that of `master`. bf16 for weights in fp32 is not "
        "for `parallel.strategy: ddp`, whose buckets have the format of the weights.",
    )
    moments: Literal["fp32", "bf16", "8bit"] = key(
        "fp32",
        "Format in which the optimizer's running means for matrices are stored; bf16 and 8bit are rounded at random. 8bit is for AdamW.",
        resume="never",
    )


@dataclass
class Checkpoint:
    """When the state is saved and how long it is kept. The last step is always saved."""

    every_steps: int = key(
        0,
        "Optimizer steps between checkpoints; 0: no periodic one.",
        ge=0,
        le=MOST_STEPS,
    )
    every_seconds: float = key(
        1800.0,
        "Seconds between checkpoints; 0: not by time.",
        ge=0,
        le=1e9,
    )
    background: bool = key(
        False,
        "Write a checkpoint while training goes on. Training stands still only while each rank copies what it will write to the host's memory, "
        "which has to have room for it. The last one of a run is waited for.",
        resume="free",
    )
    keep_last: int = key(
        2,
        "Newest checkpoints kept; 0 keeps all.",
        ge=0,
        le=MOST_STEPS,
    )
    keep_every_steps: int = key(
        0,
        "Checkpoints at multiples of this step are kept for ever; 0: none.",
        ge=0,
        when={"checkpoint.keep_last": Except(0)},
        le=MOST_STEPS,
    )
    export_check: bool = key(
        True,
        "Try the export to Hugging Face's format when a run starts, without weights and beside the first steps; the run ends if it "
        "would fail.",
    )


@dataclass
class WandbLog:
    """Weights & Biases (wandb.ai), from the main rank. A run that is continued continues there too."""

    project: str | None = key(
        None, "Send the numbers of each log line to this project; needs the package wandb (the extra `trackers`)."
    )
    entity: str | None = key(
        None, "Team or user that the project belongs to; null: the login's default.", when={"log.wandb.project": SET}
    )
    group: str | None = key(None, "Group that the run is shown in.", when={"log.wandb.project": SET})
    tags: list[str] = key([], "Tags of the run.", when={"log.wandb.project": SET})
    offline: bool = key(
        False,
        "Make no connection; write files to wandb/ of the run directory, for `wandb sync` later.",
        when={"log.wandb.project": SET},
    )


@dataclass
class MlflowLog:
    """MLflow (mlflow.org), from the main rank. A run that is continued continues there too."""

    experiment: str | None = key(
        None, "Send the numbers of each log line to this experiment; needs the package mlflow (the extra `trackers`)."
    )
    uri: str | None = key(
        None,
        "Tracking server or place, such as http://host:5000; null: what MLFLOW_TRACKING_URI says.",
        when={"log.mlflow.experiment": SET},
    )


@dataclass
class TrackioLog:
    """Trackio (Hugging Face), from the main rank. A run that is continued continues there too."""

    project: str | None = key(None, "Write the numbers of each log line to this project; needs the package trackio.")
    space: str | None = key(
        None,
        "Space of the Hugging Face Hub that shows them, such as user/name; null: a local database.",
        when={"log.trackio.project": SET},
    )


@dataclass
class PrometheusLog:
    """The last log line as Prometheus metrics, for Grafana and alerts, from the main rank."""

    file: str | None = key(
        None,
        "Text file that is replaced at each log line, for node_exporter's textfile collector (its name must end with .prom). Needs the package "
        "prometheus_client (the extra `trackers`).",
    )
    port: int | None = key(None, "Port at which the main rank's host answers http://HOST:PORT/metrics.", ge=1, le=65535)


@dataclass
class Log:
    """What is reported."""

    every_steps: int = key(
        10,
        "Optimizer steps between log lines.",
        ge=1,
        le=MOST_STEPS,
    )
    layers_every_steps: int = key(
        0,
        "Optimizer steps between statistics of each layer: norms of weights, gradients and updates, sizes of activations, largest scores of attention. "
        "0: none. Such a step takes longer, and copies the weights once.",
        ge=0,
        le=MOST_STEPS,
    )
    device_hour_price: float | None = key(
        None, "Price of an hour of one device (on a CPU: of one process), in any currency, for `cost` in the log.", ge=0, le=1e6
    )
    tensorboard: bool = key(True, "Write TensorBoard event files.")
    wandb: WandbLog = section(WandbLog)
    mlflow: MlflowLog = section(MlflowLog)
    trackio: TrackioLog = section(TrackioLog)
    prometheus: PrometheusLog = section(PrometheusLog)
    gradients_at: list[int] = key(
        [],
        "Steps whose whole gradients, before clipping, are written to gradients/step-N.safetensors, to compare layouts.",
        ge=1,
        le=MOST_STEPS,
    )
    memory_history: bool = key(
        False,
        "Remember every allocation of GPU memory, and write them to profile/ when a step does not fit. Costs some percent of a step; GPUs only.",
    )
    profile: list[int] = key(
        [],
        "Steps that torch.profiler records on every rank: traces and a page on where time and memory go, in profile/.",
        ge=1,
        le=MOST_STEPS,
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
