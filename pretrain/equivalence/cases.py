"""The layouts that `tools/check_equivalence.py` compares: a table of named ones, what a user writes, or all that fit.

DDP on 2                                    a name of the table, or a part of one
strategy=fsdp tensor=2 micro_sequences=2    keys of the section `parallel`; the number of processes follows from the sizes
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.config.keys import SetKey, is_met, keys_of
from pretrain.config.load import load_config
from pretrain.config.parallel_schema import Parallel
from pretrain.config.schema import Config
from pretrain.data.training_data import open_data
from pretrain.distributed.cores import cores_of_host
from pretrain.distributed.mesh import AXES
from pretrain.distributed.ranks import choose_device
from pretrain.equivalence.shrink import shrunk
from pretrain.errors import ConfigError, UserError
from pretrain.train.plan import make_plan, with_vocabularies
from pretrain.train.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain" / "equivalence" / "measured_run.py"
SINGLE, TABLE = "single", "table"
_SIZES = tuple(f"parallel.{axis}" for axis in (*AXES, "expert"))


@dataclass(frozen=True)
class Case:
    """A layout: the number of processes, the samples of a micro-batch, the launcher and the overrides."""

    name: str
    processes: int
    micro: int
    overrides: tuple[str, ...] = ()
    launcher: str = "torchrun"

    @property
    def splits(self) -> bool:
        """Whether ranks share matrices, positions or experts."""
        own = dict(override.split("=", 1) for override in self.overrides)
        return any(own.get(f"parallel.{axis}", "1") != "1" for axis in ("tensor", "context", "expert"))

    def arguments(self, config: Path, overrides: list[str]) -> list[str]:
        """Those of pretrain/run.py. The layout's own overrides come last: the others may set the micro-batch of another layout."""
        return ["--config", str(config), *overrides, *self.overrides]

    def command(self, config: Path, overrides: list[str]) -> list[str]:
        script = [str(SCRIPT), *self.arguments(config, overrides)]
        if self.processes == 1:
            return [sys.executable, *script]
        if self.launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes), *script]
        settings = str(ROOT / "launch" / "accelerate" / "cpu_2.yaml")
        processes = ["--num_processes", str(self.processes), "--main_process_port", "0"]
        return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", settings, *processes, *script]

    def resets(self, config: Config) -> list[str]:
        """Overrides that undo settings of `config` for another layout: copies, shards, and keys that this strategy refuses."""
        own = dict(override.split("=", 1) for override in self.overrides)
        strategy = own["parallel.strategy"]

        def is_of_another(key: SetKey) -> bool:
            wanted = key.when.get("parallel.strategy", (strategy,))
            of_axis = [axis for axis in ("pipeline", "context") if key.path.startswith(f"parallel.{axis}_")]
            unused = any(own.get(f"parallel.{axis}", "1") == "1" for axis in of_axis)
            return key.path in _SIZES or unused or not is_met(wanted, strategy)

        changed = [key for key in keys_of(config) if key.value != key.default and key.path not in own]
        return [f"{key.path}={json.dumps(key.default)}" for key in changed if is_of_another(key)]


def single(sequences: int, micro: int) -> Case:
    """One process with micro-batches of `micro` samples."""
    name = SINGLE if micro == sequences else f"{SINGLE}, accumulation {sequences // micro}"
    return Case(name, 1, micro, (f"batch.micro_sequences={micro}", "parallel.strategy=single"))


def with_references(wanted: list[Case], sequences: int) -> list[Case]:
    """The wanted layouts, after the single processes that they are compared with: one for each size of micro-batches, the largest first."""
    sizes = {case.micro for case in wanted}
    own = [single(sequences, micro) for micro in sorted(sizes, reverse=True)]
    return own + [case for case in wanted if case not in own]


def cases(sequences: int, experts: bool = False) -> list[Case]:
    """The layouts of docs/equivalence.md, on 1, 2 and 4 processes, for a global batch of `sequences` (a multiple of 16).

    Each size of micro-batches has a case with a single process. `experts`: with the layouts of a mixture of experts.
    """

    def case(name: str, processes: int, micro_steps: int, keys: str, launcher: str = "torchrun") -> Case:
        """`keys`: of the section `parallel`, as a user writes them."""
        own = dict(key.split("=") for key in keys.split())
        data_size = processes // math.prod(int(own.get(axis, 1)) for axis in ("context", "tensor", "pipeline"))
        micro = sequences // data_size // micro_steps
        overrides = (f"batch.micro_sequences={micro}", *(f"parallel.{key}" for key in keys.split()))
        return Case(name, processes, micro, overrides, launcher)

    hsdp = "strategy=fsdp replicate=2 shard=2"
    with_experts = [
        case("expert parallel on 2", 2, 1, "strategy=fsdp expert=2"),
        case("expert parallel on 4", 4, 1, "strategy=fsdp expert=4"),
        case("FSDP2 on 4, expert parallel on 2, accumulation 4", 4, 4, "strategy=fsdp expert=2"),
        case("HSDP 2x2, expert parallel on 2", 4, 1, f"{hsdp} expert=2"),
        case("FSDP2 on 2 x tensor parallel on 2, expert parallel on 2", 4, 1, "strategy=fsdp tensor=2 expert=2"),
        case("FSDP2 on 2 x context parallel on 2, expert parallel on 4", 4, 1, "strategy=fsdp context=2 expert=4"),
    ]
    return [
        case(SINGLE, 1, 1, "strategy=single"),
        *(case(f"{SINGLE}, accumulation {n}", 1, n, "strategy=single") for n in (2, 4, 8, 16)),
        case("DDP on 2", 2, 1, "strategy=ddp"),
        case("DDP on 4", 4, 1, "strategy=ddp"),
        case("DDP on 2, accumulation 4, no_sync", 2, 4, "strategy=ddp grad_sync=last"),
        case("DDP on 2, accumulation 4, sync every", 2, 4, "strategy=ddp grad_sync=every"),
        case("FSDP2 on 2", 2, 1, "strategy=fsdp"),
        case("FSDP2 on 4", 4, 1, "strategy=fsdp"),
        case("FSDP2 on 2, accumulation 4, sync last", 2, 4, "strategy=fsdp grad_sync=last"),
        case("FSDP2 on 2, accumulation 4, sync every", 2, 4, "strategy=fsdp grad_sync=every"),
        case("FSDP2 on 2, recomputed activations", 2, 1, "strategy=fsdp activation_checkpointing=full"),
        case("HSDP 2x2", 4, 1, hsdp),
        case("HSDP 2x2, accumulation 4", 4, 4, hsdp),
        case("tensor parallel on 2", 2, 1, "strategy=fsdp tensor=2"),
        case("tensor parallel on 4", 4, 1, "strategy=fsdp tensor=4"),
        case("FSDP2 on 2 x tensor parallel on 2", 4, 1, "strategy=fsdp shard=2 tensor=2"),
        case("replicated 2 x tensor parallel on 2, accumulation 4", 4, 4, "strategy=fsdp replicate=2 shard=1 tensor=2"),
        case("context parallel on 2", 2, 1, "strategy=fsdp context=2"),
        case("context parallel on 4", 4, 1, "strategy=fsdp context=4"),
        case("FSDP2 on 2 x context parallel on 2, accumulation 4", 4, 4, "strategy=fsdp shard=2 context=2"),
        case("pipeline on 2, accumulation 4", 2, 4, "strategy=fsdp pipeline=2"),
        case("FSDP2 on 2 x pipeline on 2, accumulation 4", 4, 4, "strategy=fsdp shard=2 pipeline=2"),
        case("tensor parallel on 2 x pipeline on 2, accumulation 4", 4, 4, "strategy=fsdp shard=1 tensor=2 pipeline=2"),
        case("DDP on 2, accelerate launch", 2, 1, "strategy=ddp", "accelerate"),
        case("FSDP2 on 2, accelerate launch", 2, 1, "strategy=fsdp", "accelerate"),
        *(with_experts if experts else []),
    ]


# ---- what a user asks for ---------------------------------------------------------------------------------------------


def wanted_cases(texts: list[str], config: Config, experts: bool, processes: int) -> list[Case]:
    """The layouts that `--layouts` names, in its order. Raises ConfigError for a text that is neither a layout nor in a name of the table."""
    found: list[Case] = []
    for text in texts:
        found += [written(text, config, processes)] if "=" in text else named(text, config, experts)
    return list(dict.fromkeys(found))


def named(text: str, config: Config, experts: bool) -> list[Case]:
    """The cases of the table with `text` in their name; all of them for the word `table`."""
    every = cases(config.batch.sequences, experts)
    found = [case for case in every if text == TABLE or text.lower() in case.name.lower()]
    if not found:
        names = "; ".join(case.name for case in every)
        raise ConfigError(
            f"--layouts {text!r} is in no name of the table ({names}); write one, or keys such as 'strategy=fsdp tensor=2'"
        )
    if config.batch.sequences % 16:
        raise ConfigError(
            f"--layouts {text!r}: the layouts of the table cut a step into 16 parts, but batch.sequences={config.batch.sequences}; set a "
            "multiple of 16, or write keys such as 'strategy=fsdp tensor=2'"
        )
    return found


def written(text: str, config: Config, processes: int) -> Case:
    """The layout that a user writes as keys of the section `parallel`, and perhaps `micro_sequences` of a micro-batch.

    Without sizes of the data axes it takes `processes`.
    """
    pairs = dict(pair.split("=", 1) for pair in text.split() if "=" in pair)
    known = {"micro_sequences", *(field.name for field in dataclasses.fields(Parallel))}
    wrong = [word for word in text.split() if word.split("=")[0].split(".")[0] not in known or "=" not in word]
    if wrong:
        of_all = wrong[0].split(".")[0] in {field.name for field in dataclasses.fields(Config)}
        remedy = "write overrides before --layouts" if of_all else "write key=value, for instance tensor=2"
        raise ConfigError(f"--layouts {text!r}: {wrong[0]} is no key of the section parallel; {remedy}")
    keys = Counter(word.split("=")[0] for word in text.split())
    if repeated := [key for key, times in keys.items() if times > 1]:
        raise ConfigError(f"--layouts {text!r}: {repeated[0]} is there twice; write it once")
    try:
        sizes = {axis: int(pairs[axis]) for axis in AXES if pairs.get(axis, "-1") not in ("-1", "null")}
        micro = int(pairs.pop("micro_sequences")) if "micro_sequences" in pairs else None
    except ValueError as error:
        raise ConfigError(f"--layouts {text!r}: {error}; sizes are numbers of ranks") from error
    if wrong := [f"{axis}={size}" for axis, size in sizes.items() if size < 1]:
        raise ConfigError(f"--layouts {text!r}: {wrong[0]} is not a number of ranks; give 1 or more, or -1 for the rest")
    pairs.setdefault("strategy", "fsdp")
    together = math.prod(sizes.get(axis, 1) for axis in ("context", "tensor", "pipeline"))
    takes_rest = any(pairs.get(axis) == "-1" for axis in ("context", "tensor", "pipeline"))
    data_size = sizes.get("replicate", 1) * sizes.get("shard", 1)
    if pairs["strategy"] == SINGLE:
        count = 1
    elif takes_rest:
        count = processes
    elif {"replicate", "shard"} & sizes.keys():
        count = math.prod(sizes.values())
    else:
        count = max(processes // together * together, together)
        data_size = count // together
    if micro is None:
        micro = _micro(config, data_size, sizes.get("pipeline", 1))
    overrides = (f"batch.micro_sequences={micro}", *(f"parallel.{key}={value}" for key, value in pairs.items()))
    return Case(text, count, micro, overrides)


def _micro(config: Config, data_size: int, stages: int) -> int:
    """The size of micro-batches for at least two micro-steps of each rank, and as many as stages. If no size gives that, the configured one."""
    share = config.batch.sequences // data_size
    counts = [n for n in range(max(2, stages), share + 1) if share % n == 0]
    if config.batch.sequences % data_size or not counts:
        return min(config.batch.micro_sequences, max(1, share))
    return share // counts[0]


def every_case(config: Config, processes: int) -> Iterator[Case]:
    """Every layout of up to so many processes, legal or not: each product of the axes, with both ways of context parallelism, and experts on as many ranks
    as share weights.
    """
    order = ("replicate", "shard", "context", "tensor", "pipeline")
    for count in _counts(processes):
        yield written(f"strategy=ddp replicate={count}", config, count)
        for sizes in sorted(_products(count, len(order)), reverse=True):
            axes = dict(zip(order, sizes))
            named = [axis for axis in order if axes[axis] > 1 or (axis == "shard" and axes["replicate"] == 1)]
            text = " ".join(["strategy=fsdp", *(f"{axis}={axes[axis]}" for axis in named)])
            sharing = axes["shard"] * axes["context"]
            for ranks in (n for n in range(1, sharing + 1) if sharing % n == 0):
                for method in ("", " context_method=ring")[: 2 if axes["context"] > 1 else 1]:
                    yield written(text + (f" expert={ranks}" if ranks > 1 else "") + method, config, count)


def _counts(processes: int) -> list[int]:
    """Powers of two up to `processes`, and it."""
    return sorted({processes, *(2**n for n in range(1, processes.bit_length()))} - {1})


def _products(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    if factors == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        for rest in _products(number // first, factors - 1):
            yield first, *rest


def reason_against(case: Case, path: Path, overrides: list[str]) -> str | None:
    """Why a layout cannot run this configuration, in one line; None if it can."""
    try:
        resets = case.resets(load_config(path, overrides)[0])
        config, _ = load_config(path, [*overrides, *resets, *case.overrides])
        make_plan(config, case.processes, choose_device(config, 0))
    except UserError as error:
        return " ".join(str(error).split())
    return None


@dataclass(frozen=True)
class LayoutChoice:
    """The layouts to compare, after the single processes that they are compared with."""

    cases: list[Case]
    overrides: list[str]
    """For every layout: those that were given, and those that shrink the model."""
    lines: list[str]
    """What is to be said about it."""


def chosen(path: Path, overrides: list[str], texts: list[str] | None, ranks: int | None, shrink: bool) -> LayoutChoice:
    """The layouts that are asked for; without `texts` every legal one. Raises ConfigError where none is legal, or one that is asked for is not."""
    config, _ = load_config(path, overrides)
    if config.data.pairs is not None:
        raise ConfigError(
            "tools/check_equivalence.py compares steps of a fixed number of samples, and data.pairs has others in each; use an "
            "encoder-decoder on data.objective=span_corruption"
        )
    most = ranks or _processes(config)
    complete, vocabulary = _completed(config)
    lines, experts = [], bool(complete.model.experts.count)
    if shrink:
        sharing = [case.processes for case in wanted_cases(texts or [], config, experts, most)]
        small = shrunk(config, complete, vocabulary, max([most, *sharing]))
        lines.append("shrunk by " + " ".join(f"'{override}'" if " " in override else override for override in small))
        overrides = [*overrides, *small]
        config, _ = load_config(path, overrides)
    every = list(every_case(config, most)) if texts is None else wanted_cases(texts, config, experts, most)
    reasons = {case: reason_against(case, path, overrides) for case in every}
    legal = [case for case, reason in reasons.items() if reason is None]
    refused = {case: reason for case, reason in reasons.items() if reason is not None}
    if texts is not None and refused:
        case, reason = next(iter(refused.items()))
        raise ConfigError(f"--layouts {case.name!r}: {reason}")
    if not legal:
        raise ConfigError(f"no layout on up to {most} processes is legal: {next(iter(refused.values()))}")
    lines += [f"refused   {case.name}: {reason}" for case, reason in refused.items()]
    if texts is None:
        lines.append(f"{len(legal)} legal layouts on up to {most} processes")
    return LayoutChoice(with_references(legal, config.batch.sequences), overrides, lines)


def _completed(config: Config) -> tuple[Config, int]:
    """The configuration, complete on one process, and the tokens of its data's vocabulary."""
    alone = dataclasses.replace(config, parallel=type(config.parallel)())
    complete = resolve(alone)
    data = open_data(complete, complete.model.encoder.decoder_start_id)
    return with_vocabularies(complete, data), data.vocabularies["vocab_size"].size


def _processes(config: Config) -> int:
    """The GPUs of this host; on a CPU its cores, up to 4."""
    import torch

    if choose_device(config, 0).type == "cuda":
        return max(2, torch.cuda.device_count())
    return max(2, min(4, cores_of_host()))
