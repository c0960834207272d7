"""The sections optim and schedule: who updates the weights, and at which rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pretrain.config.keys import MOST_STEPS, SET, TOKENS_OF_A_RUN, UNSET, Except, key, section

FALLING_AT_ONCE = ("cosine", "linear")
"""Schedules that fall from the end of the warmup to the last step."""
FALLING = (*FALLING_AT_ONCE, "wsd")
"""Schedules that have fallen to `min_ratio` at the last step."""


@dataclass
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own."""

    pattern: str = key(
        "???",
        "Names of parameters, where `*` stands for any characters, `?` for one and `[01]` for one of these, e.g. `layers.*.attention.*`; quoted in YAML. Of several groups that match "
        "a name the first one holds.",
    )
    lr_scale: float = key(
        1.0, "Their learning rate, as a share of the schedule's. 0: they stay as they are, without weight decay.", ge=0, le=1e6
    )
    weight_decay: float | None = key(
        None,
        "Their weight decay, also for norms, biases and embeddings. By default that of `optim.weight_decay` and its rule.",
        ge=0,
        le=1000,
    )
    optimizer: Literal["muon", "adamw"] | None = key(
        None,
        "With `optim.name=muon`: which of both updates them. Muon takes matrices, and of a tensor with three dimensions each matrix `[i]` apart. By default "
        "the matrices of blocks are Muon's and the rest is AdamW's.",
    )
    fused_rows: list[int] | None = key(
        None,
        "For Muon: the rows of each projection that these matrices fuse, e.g. `[2048, 512, 512]` of queries, keys and values. Each is "
        "orthogonalized apart. If a matrix has more rows, the order repeats, as where every head has its query, key and value together.",
        ge=1,
    )


@dataclass
class MuonOptions:
    """Options of Muon, for the matrices of blocks. All other parameters get AdamW with `optim.betas` and `optim.eps`."""

    momentum: float = key(0.95, "Decay rate of the running mean of gradients (Nesterov's).", ge=0, lt=1)
    polynomial: Literal["polar_express", "quintic"] = key(
        "polar_express",
        "What brings singular values near 1: the best polynomial of each iteration (arXiv 2505.16932), or one for all of them "
        "(kellerjordan.github.io/posts/muon). After five of the latter, those above a thousandth of the norm lie between 0.47 and 1.21.",
    )
    iterations: int = key(5, "Iterations of the polynomial.", ge=1, le=20)


@dataclass
class AdafactorOptions:
    """Options of Adafactor. Its state is a number per row and per column."""

    decay: float = key(
        0.8,
        "At step t new squares enter the mean of squares with the weight t^-decay: 1 at step 1, less and less later.",
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

    name: Literal["adamw", "lion", "muon", "adafactor", "schedule_free_adamw"] = key(
        "adamw",
        "AdamW (Loshchilov and Hutter, arXiv 1711.05101), fused where torch has it; Lion (arXiv 2302.06675); Muon for the matrices of blocks and "
        "AdamW for the rest, at one rate (arXiv 2502.16982); Adafactor (arXiv 1804.04235), with steps in proportion to the weights; schedule-free "
        "AdamW (arXiv 2405.15682), which needs `schedule.name=constant`: the model is a running mean of the weights.",
        resume="never",
    )
    lr: float = key(3e-4, "Peak learning rate; `schedule` scales it.", gt=0, le=1e38)
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "AdamW, and what Muon leaves to AdamW: decay rates of the running means of the gradient and of its square. Lion has one mean, of the gradient: "
        "the second number is its decay rate, the first its weight in an update. Schedule-free AdamW has the second mean of AdamW; the first number is the "
        "weight of the model in the weights that are trained.",
        ge=0,
        lt=1,
        when={"optim.name": ("adamw", "lion", "muon", "schedule_free_adamw")},
    )
    eps: float = key(
        1e-8,
        "Added to the root of the mean square that a step is divided by.",
        ge=1e-37,  # the least that fp32 holds without loss
        le=1,
        when={"optim.name": ("adamw", "muon", "schedule_free_adamw")},
    )
    weight_decay: float = key(0.1, "Decoupled weight decay, times the learning rate.", ge=0, le=1000)
    clip: float = key(
        1.0, "Largest 2-norm of all gradients together; larger ones are scaled down to it. 0: never.", ge=0, le=1e30
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
        # Those that pretrain/models/width.py has a rule for.
        when={"optim.name": ("adamw", "lion", "muon", "schedule_free_adamw")},
    )
    groups: list[ParameterGroup] = key([], "Parameters with a learning rate or a weight decay of their own, by name.")
    ema_decay: float | None = key(
        None,
        "Keep a running mean of the weights beside them, with this decay per step (0.999, say). It is validated as well, and "
        "tools/convert_checkpoint.py exports it by `--weights ema`.",
        gt=0,
        lt=1,
        when={"optim.name": Except("schedule_free_adamw")},
    )
    muon: MuonOptions = section(MuonOptions, when={"optim.name": ("muon",)})
    adafactor: AdafactorOptions = section(AdafactorOptions, when={"optim.name": ("adafactor",)})


@dataclass
class RateStage:
    """A stage of a piecewise learning rate."""

    steps: int | None = key(None, "Steps of the stage.", ge=1, le=MOST_STEPS)
    ratio: float = key("???", "Learning rate at its last step, as a share of the peak.", ge=0, le=1000)
    shape: Literal["constant", "linear", "cosine", "1-sqrt", "exponential"] = key(
        "linear",
        "The way there from the rate before: at once (`constant`), by equal differences, by half a cosine, as the root of the share of the stage, or by "
        "equal ratios.",
    )
    tokens: int | None = key(
        None,
        "Instead of `steps`: the stage's last step is the first after which it has so many tokens.",
        ge=1,
        le=TOKENS_OF_A_RUN,
    )
    by_tokens: bool | None = key(
        None,
        "Whether the rate follows the tokens and not the steps, under `batch.ramp`. By default, if the stage has `tokens`.",
    )


@dataclass
class Schedule:
    """Learning rate as a pure function of the step."""

    name: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt", "piecewise"] = key(
        "cosine",
        "Shape after the warmup. `cosine` and `linear` fall until the last step. `constant` stays. `wsd` (warmup-stable-decay, "
        "arXiv 2405.18392) stays and then falls for `decay_steps`. `inverse_sqrt` (arXiv 1706.03762, section 5.3) falls with the "
        "square root of the step, from `optim.lr` at `warmup_steps`. `piecewise` follows `stages`.",
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
        le=TOKENS_OF_A_RUN,
        when={"data.pairs": UNSET},
    )
    warmup_by_tokens: bool | None = key(
        None,
        "Whether the rate of the warmup rises with the tokens (samples × sequence_length) and not with the steps, and whether "
        "`inverse_sqrt` falls so. By default, if `warmup_tokens` is given.",
        when={"batch.ramp": SET},
    )
    min_ratio: float = key(
        0.1,
        "Learning rate at the last step, as a share of the peak, unless the warmup takes all steps.",
        ge=0,
        le=1,
        when={"schedule.name": FALLING},
    )
    decay_steps: int | None = key(
        None,
        "Steps of the final decay of `wsd`; by default the last tenth of the run: of its tokens with `decay_by_tokens`, else of its steps.",
        ge=1,
        when={"schedule.name": ("wsd",), "schedule.decay_tokens": UNSET},
        le=MOST_STEPS,
    )
    decay_tokens: int | None = key(
        None,
        "Instead of `decay_steps`: tokens of the final decay, which has as many whole steps as fit in, and at least one.",
        ge=1,
        le=TOKENS_OF_A_RUN,
        when={"schedule.name": ("wsd",), "data.pairs": UNSET},
    )
    decay_by_tokens: bool | None = key(
        None,
        "Whether the rate falls with the tokens and not with the steps. By default, if the length of the fall is given in tokens: by "
        "`run.tokens` for `cosine`, `linear`, and `wsd` without `decay_steps`, or by `decay_tokens`.",
        when={"schedule.name": FALLING, "batch.ramp": SET},
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
