"""Names of settings that people bring from other tools, and what the same thing is called here.

Sources: TrainingArguments of transformers, nanoGPT's train.py, Megatron-LM's arguments.py, Lightning's Trainer, litgpt's and torchtitan's
configurations, config.json of models.
"""

from __future__ import annotations

_ACCUMULATION = (
    "accumulation is derived: micro-steps = batch.sequences / (batch.micro_sequences x data-parallel ranks); set batch.sequences to the "
    "samples of a whole optimizer step over all ranks, and --check prints the micro-steps"
)
_MICRO = "it is batch.micro_sequences here: samples per rank in one forward and backward (batch.sequences: those of a whole optimizer step)"
_GLOBAL = "it is batch.sequences here: samples per optimizer step over all ranks (batch.micro_sequences: per rank in one forward and backward)"
_EITHER = (
    "it is batch.micro_sequences here if it counts samples per rank in one forward and backward, as in nanoGPT; it is batch.sequences if it counts those "
    "of a whole optimizer step over all ranks"
)
_FORMAT = "it is precision.compute here: fp32, bf16 or auto"
_FP16 = "fp16 is not supported, because it needs loss scaling; set precision.compute=bf16"
_EPOCHS = "runs are counted in optimizer steps or in tokens: set run.steps or run.tokens; --check prints how many epochs of the data they are"
_RATIO = "warmup is counted in steps or in tokens: set schedule.warmup_steps to the ratio x run.steps"
_DECAY = "cosine and linear fall until run.steps here; schedule.decay_steps is only the final decay of wsd. A cosine that ends before the run is a stage of schedule.name=piecewise"
_MIN_LR = "it is schedule.min_ratio here: the last learning rate as a share of optim.lr"
_SHARDED = "sharding is parallel.strategy=fsdp here (FSDP2); parallel.reshard_after_forward=never is ZeRO-2"
_INIT_FROM = "run.init_from is a checkpoint whose weights a new run starts from; a run that has checkpoints continues by itself (run.resume)"
_TRACKERS = "trackers have keys of their own: log.wandb.project, log.mlflow.experiment, log.trackio.project, log.tensorboard"
_SHAPE = "the shape of a model is a file of configs/models (include: it), and its kind is model.family"
_BETAS = "it is a part of optim.betas here: a list of two numbers"
_RUN_DIR = "a run is kept in run.dir/run.name"


def _renamed(key: str) -> str:
    return f"it is {key} here"


_ANSWERS: dict[str, tuple[str, ...]] = {
    _ACCUMULATION: (
        "gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accum_steps", "accumulation", "accumulation_steps",
        "accumulate_grad_batches", "gradient_accumulation_iters", "batch_accumulation_per_replica",
    ),
    _MICRO: (
        "per_device_train_batch_size", "per_device_batch_size", "micro_batch_size", "device_batch_size", "local_batch_size",
        "train_micro_batch_size_per_gpu", "device_train_microbatch_size",
    ),
    _EITHER: ("batch_size",),
    _GLOBAL: ("global_batch_size", "train_batch_size", "total_batch_size", "global_train_batch_size"),
    _renamed("optim.lr"): ("learning_rate", "max_lr", "peak_lr"),
    _renamed("run.steps"): ("max_steps", "max_iters", "train_iters", "train_steps", "training_steps", "num_steps", "num_train_steps", "total_steps", "training.steps", "train.steps"),
    _renamed("run.tokens"): ("total_tokens", "train_tokens", "num_tokens", "max_train_tokens", "training_tokens", "max_tokens"),
    _EPOCHS: ("num_train_epochs", "num_epochs", "epochs", "max_epochs"),
    _FORMAT: ("bf16", "mixed_precision", "dtype", "torch_dtype", "amp", "autocast", "mixed_precision_param"),
    _renamed("precision.reduce"): ("mixed_precision_reduce", "reduce_dtype"),
    _FP16: ("fp16", "half"),
    "it is a callback here, given by a script that starts the run: EarlyStopping and KeepBest of docs/extending.md": (
        "early_stopping", "early_stopping_patience", "patience", "load_best_model_at_end", "metric_for_best_model", "save_best", "keep_best",
    ),
    "code of your own comes in by a script that starts the run: docs/extending.md": ("callbacks", "callback", "logger", "loggers"),
    _TRACKERS: ("report_to", "log_with", "logger_name"),
    _renamed("log.wandb.project"): ("wandb", "wandb_project", "use_wandb", "wandb_log", "enable_wandb"),
    _renamed("log.tensorboard"): ("enable_tensorboard", "use_tensorboard"),
    _renamed("log.profile"): ("profiling", "enable_profiling", "profiler"),
    _renamed("log.mlflow.experiment"): ("mlflow", "mlflow_experiment"),
    _RATIO: ("warmup_ratio", "warmup_fraction", "warmup_share", "lr_warmup_fraction"),
    _renamed("schedule.warmup_tokens"): ("num_warmup_tokens", "lr_warmup_tokens"),
    _renamed("schedule.decay_shape"): ("lr_wsd_decay_style", "decay_type"),
    _renamed("schedule.warmup_steps"): ("warmup_iters", "num_warmup_steps", "lr_warmup_iters", "lr_warmup_steps"),
    _renamed("schedule.name"): ("lr_scheduler_type", "lr_scheduler", "lr_schedule", "lr_decay_style", "scheduler"),
    _renamed("schedule.decay_steps"): ("lr_wsd_decay_iters",),
    _DECAY: ("lr_decay_steps", "lr_decay_iters"),
    _MIN_LR: ("min_lr", "min_lr_ratio", "lr_min_ratio", "final_lr_frac", "min_lr_factor"),
    _renamed("optim.clip"): ("max_grad_norm", "max_norm", "grad_clip", "clip_grad", "gradient_clip_val", "grad_clip_norm"),
    _BETAS: ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    _renamed("optim.eps"): ("adam_epsilon", "adam_eps"),
    _SHAPE: ("model.name", "model.flavor", "model_name"),
    _renamed("optim.name"): ("optimizer", "optimizer_type", "optim_type"),
    _renamed("optim.groups"): ("param_groups", "parameter_groups", "group_overrides", "lr_mult", "no_decay"),
    _renamed("optim.ema_decay"): ("ema", "use_ema", "ema_update_rate", "model_ema_decay"),
    _renamed("optim.muon.momentum"): ("muon_momentum",),
    _renamed("optim.muon.iterations"): ("ns_steps", "muon_num_ns_steps"),
    _renamed("parallel.activation_checkpointing"): ("gradient_checkpointing", "activation_checkpoint", "recompute", "recompute_activations"),
    _renamed("parallel.activation_offload"): ("offload_activations", "enable_activation_offload", "cpu_offloading_activations", "activation_offloading"),
    _renamed("parallel.compile"): ("torch_compile", "use_compile"),
    _renamed("parallel.shard"): ("data_parallel_shard_degree",),
    _renamed("parallel.replicate"): ("data_parallel_replicate_degree",),
    "it comes with parallel.tensor here": ("sequence_parallel",),
    _SHARDED: ("fsdp", "fsdp2", "fully_shard", "zero_stage", "zero", "deepspeed", "sharding_strategy"),
    _renamed("parallel.tensor"): ("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_degree"),
    _renamed("parallel.pipeline"): (
        "pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size", "pipeline_parallel_degree",
    ),
    _renamed("parallel.context"): ("cp", "cp_size", "context_parallel_size", "context_parallel_degree"),
    _renamed("parallel.context_method"): ("cp_comm_type", "context_parallel_rotate_method"),
    _renamed("parallel.expert"): (
        "ep", "ep_size", "ep_degree", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree", "moe_ep_size",
    ),
    _renamed("data.sequence_length"): (
        "block_size", "seq_len", "seq_length", "max_seq_len", "max_seq_length", "context_length", "sequence_len", "n_ctx",
    ),
    _renamed("data.workers"): ("num_workers", "dataloader_num_workers"),
    _renamed("model.layers"): ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    _renamed("model.heads"): ("n_head", "n_heads", "num_heads", "num_attention_heads"),
    _renamed("model.experts.count"): ("num_experts", "n_routed_experts", "num_local_experts"),
    _renamed("model.experts.active"): ("num_experts_per_tok", "num_experts_per_token", "moe_router_topk", "moe_top_k", "router_topk", "top_k", "moe_k"),
    _renamed("model.experts.shared"): ("n_shared_experts", "num_shared_experts"),
    _renamed("model.experts.ffn_dim"): ("moe_intermediate_size", "moe_ffn_hidden_size"),
    _renamed("model.experts.correction_rate"): ("moe_router_bias_update_rate", "load_balance_coeff", "expert_bias_update_rate"),
    "multi-head latent attention is model.latent.kv_rank above 0 here": ("mla", "use_mla", "multi_latent_attention"),
    _renamed("model.latent.kv_rank"): ("kv_lora_rank",),
    _renamed("model.latent.query_rank"): ("q_lora_rank",),
    _renamed("model.latent.rope_dim"): ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    _renamed("model.latent.plain_dim"): ("qk_nope_head_dim",),
    "multi-token prediction is model.predict_ahead here: the number of tokens beyond the next one": (
        "mtp", "num_mtp_modules", "mtp_num_layers", "num_nextn_predict_layers",
    ),
    _renamed("loss.predict_ahead_weight"): ("mtp_loss_weight", "mtp_loss_scaling_factor"),
    _renamed("model.linear_attention.pattern"): ("layer_types", "full_attention_interval", "linear_attention_freq"),
    "model.sublayers says which layers have attention or an MLP alone here, and model.linear_attention.pattern which have Mamba 2": (
        "hybrid_override_pattern", "layers_block_type", "hybrid_layer_pattern",
    ),
    _renamed("model.linear_attention.kernel"): ("linear_conv_kernel_dim", "conv_kernel_size", "conv_size", "mamba_d_conv"),
    _renamed("model.linear_attention.key_heads"): ("linear_num_key_heads", "mamba_n_groups", "mamba_num_groups"),
    _renamed("model.linear_attention.value_heads"): ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
    _renamed("model.linear_attention.key_dim"): ("linear_key_head_dim", "mamba_d_state", "mamba_state_dim", "ssm_state_size"),
    _renamed("model.linear_attention.value_dim"): ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim"),
    "it is model.experts.balance_loss here, whose text in docs/configuration.md says how other tools scale theirs": (
        "moe_aux_loss_coeff", "router_aux_loss_coef",
    ),
    "it is run.attention_kernel here; model.attention_backend is for masks of documents and windows": (
        "attn_implementation", "use_flash_attn", "flash_attention",
    ),
    _renamed("model.kv_heads"): ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_query_groups", "num_query_groups"),
    _renamed("model.dim"): ("n_embd", "hidden_size", "d_model", "embed_dim"),
    _renamed("model.ffn_dim"): ("intermediate_size", "ffn_hidden_size", "d_ff", "mlp_hidden_size"),
    _renamed("model.tie_embeddings"): ("tie_word_embeddings", "weight_tying", "tie_weights"),
    _renamed("model.max_sequence_length"): ("max_position_embeddings", "max_positions"),
    _renamed("model.rope.theta"): ("rope_theta", "rotary_base"),
    "the name of a run is run.name, also in trackers": ("wandb_run_name", "run_name", "exp_name"),
    "prepared data is listed in data.sources; data.text.dataset is a Hugging Face dataset that the first start prepares": ("dataset", "dataset_name"),
    _INIT_FROM: ("init_from", "initial_checkpoint_dir", "initial_load_path", "model_name_or_path", "pretrained_model_name_or_path"),
    _RUN_DIR: ("output_dir", "out_dir", "save_dir", "save_folder", "default_root_dir", "dump_folder"),
    "it is run.resume here: a checkpoint's directory; by itself a run continues from its newest": (
        "resume_from_checkpoint", "resume_from", "load_checkpoint", "load_step",
    ),
    "checkpoints are always written: checkpoint.every_steps and checkpoint.every_seconds say when": ("checkpoint.enable", "enable_checkpoint", "save_strategy"),
    _renamed("data.seed"): ("data_seed", "shuffle_seed", "dataloader_seed"),
    _renamed("run.seed"): ("training.seed", "train.seed"),
    "the launcher decides how many processes there are: torchrun --nnodes and --nproc-per-node, or Slurm (docs/launching.md)": (
        "devices", "num_nodes", "nnodes", "num_processes", "gpus", "num_gpus", "world_size",
    ),
    "data is prepared with its tokenizer (tools/prepare_data.py --tokenizer), and a run takes it from there; text that a start prepares has data.text.tokenizer": (
        "tokenizer_dir", "tokenizer_path", "tokenizer_name", "tokenizer_name_or_path", "hf_assets_path",
    ),
    "a trained model is scored by tools/evaluate.py (docs/evaluation.md)": ("eval_only", "do_eval", "do_predict"),
    "validation has the batch of training: batch.micro_sequences": ("per_device_eval_batch_size", "eval_batch_size"),
    "a rate that does not fall is schedule.name=constant": ("decay_lr",),
    _renamed("checkpoint.every_steps"): ("save_steps", "save_interval", "save_every", "checkpoint_interval", "ckpt_interval", "checkpoint.interval"),
    _renamed("checkpoint.keep_last"): ("save_total_limit", "keep_latest_k"),
    _renamed("checkpoint.asynchronous"): ("async_save", "async_checkpoint", "async_checkpointing", "async_mode"),
    "it is validation.sequences here: samples per validation source, not batches": ("eval_iters", "eval.max_iters", "validation.steps"),
    _renamed("validation.every_steps"): (
        "eval_steps", "eval_interval", "eval_every", "val_check_interval", "eval.interval", "eval.every_steps", "validation.freq", "eval_strategy", "evaluation_strategy",
    ),
    _renamed("log.every_steps"): ("logging_steps", "log_interval", "log_every", "log_every_n_steps", "log_freq"),
}  # fmt: skip

ANSWERS = {name: answer for answer, names in _ANSWERS.items() for name in names}


def to_markdown() -> str:
    """The section of docs/configuration.md on names of other tools."""
    rows = [f"| {', '.join(names)} | {answer} |" for answer, names in _ANSWERS.items()]
    return "\n".join(
        [
            "## Names of other tools",
            "",
            "[coming_from.md](coming_from.md) is for people who know nanoGPT, the Hugging Face Trainer, litgpt or torchtitan. "
            "A key of another tool is an error that says this:",
            "",
            "| there | here |",
            "|---|---|",
            *rows,
        ]
    )


def answer_to(path: str) -> str | None:
    """What a name of another tool, or the dotted path of one, means here; None for a name that none of them has."""
    section, _, name = path.lower().replace("-", "_").rpartition(".")
    return ANSWERS.get(f"{section.rpartition('.')[2]}.{name}") or ANSWERS.get(name)


_VALUES = {
    "run.resume": {
        **dict.fromkeys(
            ("latest", "last", "True", "true", "yes"),
            "a run goes on from its newest checkpoint by auto, the default, or by required",
        ),
        **dict.fromkeys(
            ("False", "false", "no", "none", "None"), "never refuses a run that has checkpoints; a new run has another run.name"
        ),
        **{word: f"it is written {word.lower()}" for word in ("Auto", "AUTO", "Never", "NEVER", "Required", "REQUIRED")},
    },
    "run.device": {
        **dict.fromkeys(("gpu", "GPU"), "a GPU is written cuda"),
        "cuda:0": "the launcher gives each rank its GPU; CUDA_VISIBLE_DEVICES=0 in the environment chooses one",
        "mps": "Apple's GPUs are not supported; write cpu",
    },
    "optim.clip": dict.fromkeys(("none", "None", "False"), "0 does not clip"),
    "precision.compute": {
        **dict.fromkeys(("fp16", "float16", "half"), _FP16),
        **dict.fromkeys(("bfloat16", "bf16-mixed"), "bfloat16 is written bf16"),
        "bf16-true": "write bf16, and precision.master=bf16",
        **dict.fromkeys(("float32", "32", "32-true"), "float32 is written fp32"),
        "fp8": "matrix products in fp8 are precision.fp8=tensorwise, with precision.compute=bf16",
    },
    "parallel.strategy": {
        **dict.fromkeys(("fsdp2", "zero3", "zero", "deepspeed", "fully_shard"), _SHARDED),
        "zero2": "write fsdp, and parallel.reshard_after_forward=never",
        "hsdp": "HSDP is strategy fsdp with parallel.replicate and parallel.shard above 1",
    },
    "parallel.compile": {"True": "true is written blocks", "False": "false is written none"},
    "parallel.reshard_after_forward": {"True": "true is written always", "False": "false is written never"},
    "optim.name": dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "AdamW"), "AdamW is written adamw")
    | {"Lion": "it is written lion", "Muon": "it is written muon"}
    | dict.fromkeys(("AdamWScheduleFree", "schedule_free", "schedulefree"), "it is written schedule_free_adamw"),
    "schedule.name": {
        **dict.fromkeys(("cosine_with_warmup", "cosine_with_min_lr"), "write cosine, and schedule.warmup_steps"),
        "constant_with_warmup": "write constant, and schedule.warmup_steps",
        "warmup_stable_decay": "it is written wsd",
    },
}


def value_advice(key: str, value: object) -> str:
    """What a value that other tools take means for a key here, to be added to a message; empty for others."""
    advice = _VALUES.get(key, {}).get(str(value))
    return f"; {advice}" if advice else ""


_SECTIONS = {
    "run": "the name of a run is run.name",
    "model": _SHAPE,
    "data": "prepared data is listed in data.sources: [{path: DIR}]",
    "optim": "the optimizer is optim.name",
    "schedule": "the schedule is schedule.name",
    "parallel": "the layout is parallel.strategy",
    "precision": "the format is precision.compute",
}


def section_advice(path: str) -> str:
    """Which key of a section is meant by a word in the section's place, to be added to a message; empty for sections that have no such key."""
    return f"; {_SECTIONS[path]}" if path in _SECTIONS else ""
