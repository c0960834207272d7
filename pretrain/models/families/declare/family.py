"""A family: values of the switches, and the names Hugging Face transformers has for everything.

Both directions, configuration and weights, follow from the declarations alone. Nothing is ignored: a field of config.json that no
declaration reads is refused, and so is a switch of ours that the family cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from pretrain.config.model_schema import Model
from pretrain.config.schema import Loss
from pretrain.errors import ConfigError, clipped, shown
from pretrain.models.experts import check_router, router_caution
from pretrain.models.families.declare.consistency import check_names, check_shared
from pretrain.models.families.declare.rope import ROPE_FIELDS, name_in_hf, refuse_null_share, rope_from_hf, rope_to_hf
from pretrain.models.families.declare.typed_values import missing, typed
from pretrain.models.families.declare.weights import Entry, resolve
from pretrain.models.layer_specs import layer_specs
from pretrain.models.shape import PLAIN, completed, flat, query_scalar, with_values

REQUIRED = object()

_ALWAYS_SAID = ("family", "dim", "layers", "heads", "vocab_size", "max_sequence_length")

# Fields of config.json that are about files, generation or training, and change no logit.
INERT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "bos_token_id", "eos_token_id",
    "pad_token_id", "use_cache", "pretraining_tp", "_name_or_path", "output_attentions", "output_hidden_states", "return_dict",
    "id2label", "label2id", "is_encoder_decoder", "problem_type", "chunk_size_feed_forward", "attention_dropout",
    "cache_implementation",
    "auto_map",  # names code in the model's repository, which is never run
    # What transformers 4 wrote besides: about files, heads of other tasks, and how to generate.
    "_attn_implementation_autoset", "_flash_attn_2_enabled", "_commit_hash", "use_return_dict", "unsloth_version", "unsloth_fixed", "tokenizer_class", "output_past", "return_dict_in_generate", "output_scores",
    "tf_legacy_loss", "prefix", "finetuning_task", "num_labels", "task_specific_params", "sep_token_id", "decoder_start_token_id",
    "remove_invalid_values", "gradient_checkpointing", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id",
    "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip

# Fields of every config.json of transformers 4 that would change what is computed; they may say that they do not.
HARMLESS: dict[str, Any] = {
    "is_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False,
    "pruned_heads": {}, "torchscript": False, "use_bfloat16": False,
}  # fmt: skip

# Keys of ours that change no logit of an export: how it is trained and computed.
NOT_EXPORTED = {
    "family", "hf_config", "attention_backend", "predict_ahead", "experts.correction_rate", "experts.balance_loss",
    "experts.balance_scope", "experts.router_z_loss", "dropout", "attention_dropout", "init", "init_std",
}  # fmt: skip

# Keys of ours that null derives from others; to any other null would mean what a new model of the family has, which no file means.
DERIVED = {"kv_heads", "head_dim", "ffn_dim"}


def same(value: Any, other: Any) -> Any:
    """The value as it is: for fields that mean the same on both sides."""
    return value


@dataclass(frozen=True)
class Field:
    """One of our keys, and the field of config.json that says the same.

    `default` is what an absent field means; `to(value, model)` and `back(value, config)` translate where the values differ. Several keys
    of ours may share a field of theirs: each then needs a `back` of its own, and an export demands that all of them write the same.
    """

    ours: str
    theirs: str
    default: Any = REQUIRED
    to: Callable[[Any, Model], Any] = same
    back: Callable[[Any, dict[str, Any]], Any] = same


@dataclass(frozen=True)
class Family:
    """How a family is computed and how transformers writes it. Values may be functions of the model (docs/adding_a_family.md).

    fixed        switches that make the family what it is; no other value can be exported
    defaults     what a new model has unless the configuration says otherwise
    constants    fields of config.json that may have one value only, and are written with it
    accepted     fields of config.json that may have one value only, and are not written
    derived      fields that say again, for older readers, what `fields` say: written unless None; `back` of those fields reads them
    inert        fields without effect, besides INERT
    rope         how rotary positions are written; `optional`: a base of null means no positions; None: this family has none
    theta, local_theta, scaling
                 the bases and the scaling that hold where a config.json does not name them
    balance      of families with experts, the router_aux_loss_coef that holds where a config.json does not name it; None: transformers has
                 no balancing loss there
    aliases      other values of model_type that mean this family
    inert_rope   parameters of rotary positions without effect
    partial      transformers rotates a share of each head here; elsewhere it ignores the field
    refuse       says why transformers would not take a model
    dropped      which tensors of a file are no part of the model; an import says what it leaves out
    copies       names under which files may hold the embedding again
    own_head     whether files with these names have a head of their own, although config.json of this model calls it tied
    prefix       what stands before every name of the trunk; files of the base model, without a head, and older ones leave it out
    nested       what stands there instead in files of models of which this is one part
    other_name   the name in `weights` of a tensor that files may hold under this one; a name that it does not know comes back
    llama_cpp    the switches that llama.cpp obeys, besides sizes, with the values that it computes; None: not tried
    not_obeyed   fields of config.json that transformers computes by and the model does not, with the value at which both agree
    elsewhere    what other programs make of a model (families/declare/other_readers.py has both)
    is_ours      its networks are made of our layers: ranks can share them, attention takes masks, and no block changes the result of a
                 projection in place. False: they are code of transformers
    packages     packages beside torch that compute it, which ranks must have in one version
    """

    name: str
    model_type: str = ""
    architecture: str = ""
    fields: tuple[Field, ...] = ()
    weights: tuple[Entry, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Callable[[Model], Any]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    rope: Literal["uniform", "optional", "by_layer_type"] | None = "uniform"
    theta: float = 10000.0
    local_theta: float | None = None
    scaling: dict[str, Any] | None = None
    partial: bool = False
    inert_rope: frozenset[str] = frozenset()
    not_obeyed: dict[str, Any] = field(default_factory=dict)
    refuse: Callable[[Model], str | None] | None = None
    dropped: Callable[[str, Model], bool] | None = None
    copies: tuple[str, ...] = ()
    own_head: Callable[[Model, Collection[str]], bool] | None = None
    prefix: str = "model."
    nested: str = ""
    other_name: Callable[[str, Model], str] | None = None
    llama_cpp: dict[str, Callable[[Any, Model], bool]] | None = None
    elsewhere: Callable[[Model], Sequence[str]] | None = None
    aliases: tuple[str, ...] = ()
    balance: float | None = None
    is_ours: bool = True
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a slip in the family's file."""
        check_names(self.name, [*(item.ours for item in self.fields), *self.fixed, *self.defaults])
        check_shared(self.name, self.fields, same)

    def switches(self, model: Model) -> dict[str, Any]:
        """What the family says of switches that the configuration leaves open."""
        return {name: _value(value, model) for name, value in {**self.defaults, **self.fixed}.items()}

    def complete(self, model: Model, sequence_length: int | None = None) -> Model:
        """The section with every derivable key filled in (`vocab_size` stays as it is). Raises ConfigError naming both keys."""
        return completed(model, self.switches, sequence_length)

    def smallest_section(self, model: Model) -> dict[str, Any]:
        """The fewest dotted keys of which `complete` makes this complete model again, and its sizes."""
        said = {name: value for name, value in flat(model).items() if value is not None}
        for name in [name for name in said if name not in _ALWAYS_SAID]:
            fewer = {other: value for other, value in said.items() if other != name}
            try:
                if self.complete(with_values(Model(), fewer)) == model:
                    said = fewer
            except ConfigError:  # it is needed
                continue
        return said

    def usual_switches(self, given: Model, model: Model) -> dict[str, list[Any]]:
        """Values that change nothing where they are given, by their paths. `given`: as configured; `model`: the same, complete."""
        own = {"rope.local_theta": model.rope.theta, **self.switches(given)}
        return {f"model.{name}": [each[name] for each in (PLAIN, own) if name in each] for name in flat(model)}

    def build(self, model: Model, loss: Loss | None = None) -> nn.Module:
        """The network of a complete model: see `models.build_network`."""
        if model.encoder.layers:
            from pretrain.models.encoder_decoder import EncoderDecoder

            return EncoderDecoder(model, loss)
        from pretrain.models.decoder import Decoder

        return Decoder(model, loss)

    def use_plain_kernels(self, network: nn.Module) -> None:
        """Let a network that `build` made compute by kernels that have every number format. Ours choose by the format themselves."""

    def reach(self, model: Model) -> tuple[int, int]:
        """The sliding window of a complete model, and the length from which dynamic scaling changes its rotation. 0: it has no such thing."""
        grows = model.positions == "rope" and model.rope.scaling == "dynamic"
        return model.attention.window or 0, model.rope.original_length if grows else 0

    @property
    def has_export(self) -> bool:
        """Whether transformers has a class for the family."""
        return bool(self.architecture)

    def check_training(self, model: Model) -> None:
        """Raise ConfigError for a complete model that training could not reach."""
        check_router(model)

    def describe(self, model: Model) -> list[str]:
        """Lines that a start prints about a complete model."""
        caution = router_caution(model)
        return [f"caution  {caution}"] if caution else []

    def to_hf(self, model: Model) -> dict[str, Any]:
        """config.json of a complete model. Raises ConfigError naming a switch that the family cannot express.

        No token has a special meaning: transformers would give some families tokens of its own, perhaps beyond the vocabulary.
        """
        self._check_expressible(model)
        config = {"architectures": [self.architecture], "model_type": self.model_type, **self._written(model)}
        config |= rope_to_hf(model, self.rope, self.partial, self.scaling is not None) if self.rope else {}
        config |= {name: value for name, make in self.derived.items() if (value := make(model)) is not None}
        if self.balance is not None:  # without the rounding of the division when it was read
            config[BALANCE] = float(f"{model.experts.balance_loss * layers_with_experts(model):.12g}")
        config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return config | self.constants

    def _written(self, model: Model) -> dict[str, Any]:
        """What `fields` say of a model. Raises ConfigError for two keys of ours that would write one field of theirs differently."""
        values, written, writers = flat(model), {}, {}
        for item in self.fields:
            value = item.to(values[item.ours], model)
            if written.setdefault(item.theirs, value) != value:
                other = writers[item.theirs]
                raise ConfigError(
                    f"model.{item.ours}={values[item.ours]} with model.{other}={values[other]}: {self.architecture} says both in one field, "
                    f"{item.theirs}; make them agree, or set model.family=custom (which has no export)"
                )
            writers[item.theirs] = item.ours
        return written

    def _with_balance(self, model: Model, config: dict[str, Any]) -> Model:
        """A model whose experts are balanced as strongly as by transformers' own loss, which averages over layers: ours adds them up."""
        if self.balance is None or not layers_with_experts(model):
            return model
        weight = config.get(BALANCE)
        weight = typed("experts.balance_loss", BALANCE, self.balance if weight is None else weight, config)
        return with_values(model, {"experts.balance_loss": weight / layers_with_experts(model)})

    def import_notes(self, config: dict[str, Any], model: Model) -> list[str]:
        """What an import says of the training that a config.json describes and `from_hf` carried over to a model, or did not."""
        notes = [
            f"{name}={config[name]} is obeyed by transformers alone, whose logits may differ from these; an export says {value}"
            for name, value in self.not_obeyed.items()
            if config.get(name, value) != value
        ]
        if not model.experts.count:
            return notes
        ours = model.experts
        if weight := config.get(BALANCE):
            notes.append(
                f"{BALANCE}={weight} is model.experts.balance_loss={ours.balance_loss:.4g} here: transformers averages its loss over "
                f"{layers_with_experts(model)} layers, ours adds them up; model.yaml says it, and is the place to change it"
            )
        weight = config.get("aux_loss_alpha")
        if (
            type(weight) in (int, float) and 0 < weight < 1e9
        ):  # any other is no weight, and has no effect in transformers either
            notes.append(
                f"aux_loss_alpha={weight} is not used, as transformers does not; model.experts.balance_loss="
                f"{weight / max(1, ours.active):.4g} would be that loss"
            )
        return notes

    def entries(self, model: Model, parameters: Sequence[str]) -> list[Entry]:
        """The weight map of a model with these parameters. Raises ValueError where it does not cover them."""
        return resolve(self.weights, model, parameters)

    def copies_of(self, model: Model) -> dict[str, str]:
        """Names under which a file may hold a tensor again, and the name it has here, both theirs: a tied head above all."""
        ours = {line.ours: line.theirs[0] for line in self.weights}
        heads = [line.theirs[0] for line in self.weights if line.ours == ("output.weight",) and model.tie_embeddings]
        return dict.fromkeys([*heads, *self.copies], ours[("embedding.weight",)])

    def _check_expressible(self, model: Model) -> None:
        if not self.has_export:
            raise ConfigError(f"model.family={self.name} is no model of transformers', so it has no export")
        if self.refuse and (why := self.refuse(model)):
            raise ConfigError(f"{why}, so it is no model of model.family={self.name} in transformers")
        if self.rope and not self.partial and model.rope.fraction != 1:
            raise ConfigError(
                f"model.rope.fraction={model.rope.fraction}: model.family={self.name} rotates whole heads; remove it"
            )
        free = {f.ours for f in self.fields} | NOT_EXPORTED
        if self.rope == "optional" and model.positions == "none":
            free.add("positions")
        for name, value in flat(model).items():
            section, _, key = name.partition(".")
            if name in free or (section == "rope" and self.rope and key not in ("layout", "pattern")):
                continue
            expected = _value(self.fixed.get(name, PLAIN.get(name)), model)
            if name == "attention.query_scalar" and name not in self.fixed:
                expected = query_scalar(model)
            if name == "rope.local_theta":
                expected = model.rope.theta
            if value != expected:
                raise ConfigError(
                    f"model.{name}={value} is not what model.family={self.name} computes, which is {expected}; remove it, or set "
                    "model.family=custom (which has no export)"
                )

    def _rotation(self, config: dict[str, Any]) -> dict[str, Any]:
        """What a config.json says of rotary positions, by our keys."""
        if self.partial:
            refuse_null_share(config, self.name)
        known = _without(config, self.inert_rope)
        return rope_from_hf(known, self.rope, self.name, self.theta, self.local_theta, self.scaling)

    def from_hf(self, config: dict[str, Any]) -> Model:
        """The complete model of a config.json. Raises ConfigError naming a field that is missing, unknown or not supported."""
        kind = config.get("model_type")
        if kind is not None and kind not in (self.model_type, *self.aliases):
            raise ConfigError(
                f"config.json: model_type={shown(kind)} contradicts architectures=['{self.architecture}'], which is of "
                f"model_type={self.model_type!r}: transformers would load a {shown(kind)}; correct the one that is wrong"
            )
        ours = {item.theirs for item in self.fields}
        rest = {name: value for name, value in config.items() if name in ours or name not in INERT | self.inert}
        for name, value in {**HARMLESS, **self.accepted, **self.constants}.items():
            # transformers takes null for false.
            if rest.pop(name, value) not in ((value,) if value is True else (value, None)):
                raise ConfigError(
                    f"config.json: {name}={shown(config[name])} is not supported for {self.name}; only {shown(value)} is"
                )
        values: dict[str, Any] = {}
        for item in self.fields:
            raw = rest.get(item.theirs, item.default)
            if raw is REQUIRED or (raw is None and item.default is REQUIRED):
                raise missing(item.ours, item.theirs)
            values[item.ours] = typed(item.ours, item.theirs, item.back(raw, config), config)
            if values[item.ours] is None and item.default is not None and item.ours not in DERIVED:
                raise ConfigError(f"config.json: {item.theirs} is null, which means nothing to {self.name}; remove it")
        rest = {name: value for name, value in rest.items() if name not in ours}
        if self.rope:
            # Where a field says that nothing is rotated, its numbers mean nothing.
            rope = {} if values.get("positions") == "none" else self._rotation(config)
            for name, value in rope.items():
                said = f"rope_scaling or rope_parameters: {name_in_hf(name)}"
                values[name] = typed(name, said, value, {said: value})
            rest = {name: value for name, value in rest.items() if name not in ROPE_FIELDS}
        rest = {name: value for name, value in rest.items() if name not in self.derived}
        if unknown := sorted(rest):
            raise ConfigError(
                f"config.json: {clipped(unknown[0])}={shown(rest[unknown[0]])} is not known for {self.name}; it may change what is computed"
            )
        model = self.complete(with_values(Model(family=self.name), {n: v for n, v in values.items() if v is not None}))
        model = self._with_balance(model, config)
        self._check_expressible(model)
        return model


def _without(config: dict[str, Any], inert: frozenset[str]) -> dict[str, Any]:
    """A config.json whose rotary positions lack these parameters."""
    groups = {name: config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), dict)}
    return config | {name: {k: v for k, v in group.items() if k not in inert} for name, group in groups.items()}


BALANCE = "router_aux_loss_coef"


def layers_with_experts(model: Model) -> int:
    """The number of layers whose MLP has experts."""
    return sum(spec.experts for spec in layer_specs(model)) if model.experts.count else 0


def _value(value: Any, model: Model) -> Any:
    return value(model) if callable(value) else value
