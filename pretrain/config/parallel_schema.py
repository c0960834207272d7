"""The sections parallel and precision: how a model is spread over processes, and in which number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.keys import Except, key, section


@dataclass
class DDP:
    """Options of DistributedDataParallel."""

    bucket_mb: float = key(
        25.0, "Gradients are reduced in buckets of this size, MiB, while backward goes on.", gt=0, le=1_000_000
    )
    gradient_as_bucket_view: bool = key(
        True,
        "Let gradients be views of the buckets, also those of micro-steps that are added up: saves a second set of gradients.",
    )


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
        "Copies of the model; by default one per process with ddp, and with fsdp one, or the number of processes divided by `shard` (or write -1).",
        ge=1,
        le=10_000_000,
        rest=True,
    )
    shard: int | None = key(
        None,
        "Ranks that share one copy, each with a part of it; by default the number of processes divided by `replicate` (or write -1).",
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
        "memory; `interleaved`, as 1f1b with `pipeline_chunks` stages per rank, which waits less and sends more; `zero_bubble` computes gradients "
        "of weights when the rank would wait; so do `zero_bubble_v` and `dualpipev`, with two stages per rank, which wait least and send more.",
        when={"parallel.pipeline": Except(1)},
    )
    pipeline_chunks: int = key(
        2, "Stages of each rank of the pipeline.", ge=2, le=10_000, when={"parallel.pipeline_schedule": ("interleaved",)}
    )
    expert: int = key(
        1,
        "Ranks that share the experts of every layer: each holds some of them, and tokens travel to them (expert parallelism). It takes no "
        "ranks of its own: it divides `shard` x `context`, and `model.experts.count`. -1: `shard` x `context`.",
        ge=1,
        le=10_000_000,
        rest=True,
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
        "What becomes of gathered weights after forward: `always` frees them (ZeRO-3), `never` keeps them until the last backward of a step (ZeRO-2), "
        "`last_block_kept` keeps those of the last block, whose backward comes first. With a number n, every n neighbouring "
        "ranks keep one whole copy, 1/n each: if n is the number of GPUs of a host, backward gathers inside the host.",
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
        False, "Keep sharded weights, gradients and optimizer state in host memory.", when={"parallel.strategy": ("fsdp",)}
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
        "Share of the compiled activations that is stored; torch's compiler chooses what backward recomputes. 1: all; 0: only inputs. "
        "Not with `tensor` or `context`.",
        ge=0,
        le=1,
        when={"parallel.compile": ("blocks", "model"), "parallel.activation_checkpointing": ("none",)},
    )
    cuda_graph: bool = key(
        False,
        "On a GPU, record the kernels of a micro-step once and then launch them together: faster where kernels are shorter than their launch, as in "
        "small models. It keeps the memory of a micro-step.",
        when={"parallel.strategy": ("single",)},
    )
    backend: Literal["auto", "gloo", "nccl"] = key(
        "auto",
        "Library for communication; `auto`: NCCL on CUDA, gloo on CPU. With gloo, processes of `strategy: ddp` may share a GPU, for tests.",
        when={"parallel.strategy": Except("single")},
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
        "which the main rank measures on a CPU. A run that goes on keeps what it came to, which is printed and recorded.",
    )
    fp8: Literal["none", "tensorwise", "rowwise", "mxfp8"] = key(
        "none",
        "Projections of blocks multiply in fp8, with a scale per tensor, one per row, or one per 32 numbers. It is made for GPUs from Ada and "
        "Hopper on (`mxfp8`: Blackwell), and for `parallel.compile`; a CPU computes the same slowly.",
        when={"precision.compute": ("bf16",)},
    )
    fp8_modules: list[str] = key(
        ["*"],
        "Names of the projections that do so; `*` may abbreviate. Experts, routers, the output head, and projections to single numbers (of linear attention, and the gate of a shared expert) never do.",
        when={"precision.fp8": ("tensorwise", "rowwise", "mxfp8")},
    )
    tf32: bool = key(
        False,
        "On GPUs, whether matrix products in fp32 keep ten bits of each factor (TF32): several times faster, and less exact than fp32.",
        when={"precision.compute": ("fp32",)},
    )
    reduce: Literal["fp32", "bf16"] = key(
        "fp32", "Format in which gradients are summed over ranks.", when={"parallel.strategy": Except("single")}
    )
    master: Literal["fp32", "bf16"] = key(
        "fp32",
        "Format in which matrices are stored. In bf16 they are rounded at random after a step, in proportion to what is cut off, or else small "
        "updates would be lost. The random numbers follow from the step and the place of a weight: they are the same in every layout.",
        when={"precision.compute": ("bf16",)},
        resume="never",
    )
    keep_casts: bool | None = key(
        None,
        "Under `single` and `ddp`, whether matrices are cast to bf16 once per step and the copies kept (2 bytes per weight). Else they are cast in every "
        "micro-step, and again for backward where blocks are compiled. No bit changes. null: once, where a step has several micro-steps, unless blocks are recomputed or "
        "offloaded to save memory.",
        when={"precision.compute": Except("fp32"), "precision.master": ("fp32",), "parallel.strategy": Except("fsdp")},
        resume="free",
    )
    gradients: Literal["fp32", "bf16"] | None = key(
        None,
        "Format in which the gradients of matrices are added up over micro-steps and kept; null: that of `master`. bf16 for weights in fp32 is not "
        "for `parallel.strategy: ddp`, whose buckets have the format of the weights.",
    )
    moments: Literal["fp32", "bf16", "8bit"] = key(
        "fp32",
        "Format in which the optimizer's running means for matrices are stored; bf16 and 8bit are rounded at random. 8bit is for AdamW; Adafactor has fp32 "
        "only.",
        resume="never",
    )
