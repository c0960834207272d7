"""Every key of the schema does something: another value makes another plan, or is refused, or a test that is named here sees what it does."""

from __future__ import annotations

import functools
import itertools
import re
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from running import write_config

from pretrain.config.keys import Leaf, leaves
from pretrain.config.load import load_config
from pretrain.config.schema import Config
from pretrain.data.sources import consumed_after
from pretrain.errors import ConfigError, UserError
from pretrain.models import build_network
from pretrain.optim.optimizer import OptimizerSet
from pretrain.optim.schedule import learning_rate
from pretrain.parallel.initialise import initialise
from pretrain.train.plan import make_plan

TESTS = Path(__file__).parents[1]
KEYS = {leaf.path: leaf for leaf in leaves(Config, None)}

BASE = ["model.family=custom"]
SPANS = [
    "model.kv_heads=null",
    "model={family: t5, dim: 32, layers: 2, heads: 4, head_dim: 8, ffn_dim: 64}",
    "data={sequence_length: 40, objective: span_corruption, span_corruption: {mean_span_length: 2.0, sentinels: 4}}",
]
YARN = [*BASE, "model.rope={scaling: yarn, factor: 4, original_length: 16}", "model.head_dim=32"]
LLAMA3 = [*BASE, "model.rope={scaling: llama3, factor: 2, original_length: 16}"]
LATENT = [*BASE, "model.latent={kv_rank: 8, query_rank: 8, rope_dim: 4, plain_dim: 4, value_dim: 8}", "model.kv_heads=null"]
EXPERTS = [*BASE, "model.experts={count: 8, active: 2, correction: true, correction_rate: 0.001, balance_loss: 1}"]
FP8 = [*BASE, "precision.compute=bf16", "model.dim=64", "model.ffn_dim=64"]
RAMPED = [*BASE, "schedule.warmup_steps=4", "batch.micro_sequences=2", "batch.ramp=[{until_tokens: 512, sequences: 8}, {until_tokens: 4096, sequences: 32}]"]
WINDOW = [*BASE, "model.attention.window=4", "model.rope={scaling: linear, factor: 2}"]

# What a key acts beside, by its path or the beginning of it; the first that fits. A value is tried after these.
BESIDE = {
    "model.rope.factor": [*BASE, "model.rope.scaling=linear"],
    "model.rope.original_length": [*BASE, "model.rope={scaling: dynamic, factor: 2}"],
    "model.rope.low_frequency": LLAMA3, "model.rope.high_frequency": LLAMA3,
    "model.rope.beta": YARN, "model.rope.attention_factor": YARN, "model.rope.mscale": YARN, "model.rope.truncate": YARN,
    "model.rope.local_theta": WINDOW, "model.rope.scale_local": WINDOW, "model.attention.window_pattern": WINDOW,
    "model.latent": LATENT, "model.linear_attention.pattern": BASE, "model.linear_attention": [*BASE, "model.linear_attention.pattern=[true,false]"],
    "model.experts.shared_gate": [*EXPERTS, "model.experts.shared=1"], "model.experts.active_groups": [*EXPERTS, "model.experts.groups=4"], "model.experts": EXPERTS,
    "model.relative": SPANS, "model.encoder": SPANS, "model.init": SPANS, "data.span_corruption": SPANS,
    "parallel.replicate": [*BASE, "parallel.strategy=fsdp"], "parallel.shard": [*BASE, "parallel.strategy=fsdp"],
    "loss.predict_ahead_weight": [*BASE, "model.predict_ahead=1"],
    "schedule.warmup_by_tokens": RAMPED, "schedule.decay_by_tokens": RAMPED,
    "schedule.decay": [*BASE, "schedule.name=wsd"], "schedule.warmup_tokens": [*BASE, "schedule.warmup_steps=0"],
    "run.tokens": [*BASE, "run.steps=1000"], "optim.muon": [*BASE, "optim.name=muon"], "optim.adafactor": [*BASE, "optim.name=adafactor"],
    "data.shuffle_shards": [*BASE, "data.shuffle=shards"], "precision.fp8": [*FP8, "precision.fp8=rowwise"],
    "precision.master": FP8, "precision.keep_casts": FP8,
}  # fmt: skip
# Values for keys of which the next one of the type would not do.
VALUES: dict[str, list[Any]] = {
    "precision.fp8": ["tensorwise"], "precision.fp8_modules": ["['*.mlp.*']"], "model.heads": [2], "model.sublayers": ["[both,mlp]"], "model.vocab_size": [300], "model.encoder.vocab_size": [300], "model.max_sequence_length": [64],
    "model.rope.pattern": ["[true,false]"], "model.attention.bias": ["[query]"], "model.attention.window_pattern": ["[true,false]"], "model.linear_attention.pattern": ["[true,false]", "[false,true]"],
    "model.experts.dense_layers": ["[0]"], "model.encoder.layers": [1, 3], "batch.sequences": [32], "batch.micro_sequences": [2],
    "batch.ramp": ["[{until_tokens: 1024, sequences: 8}]"], "batch.lengths": ["[{until_tokens: 1024, length: 8}]"], "optim.betas": ["[0.5,0.95]"], "parallel.shard": [2, 4],
    "parallel.replicate": [2, 4], "data.span_corruption.first_sentinel": [260], "data.span_corruption.sentinels": [5],
    "model.relative.max_distance": [64], "model.rope.fraction": [0.5], "run.tokens": [9999], "schedule.warmup_tokens": [2500], "schedule.decay_tokens": [2500],
}  # fmt: skip
# What no plan shows, and the test that sees it: another record, file, error or kernel, or the same result by other means.
A_RUN, CUDA = "train/test_data_of_a_run.py", "test_cuda.py::test_a_gpu_resumes_what_the_cpu_saved"
PAIRS, CONTINUED, BAD = "train/test_pair_runs.py", "train/test_continuation.py", "train/test_bad_steps.py"
REVERSED = f"{PAIRS}::test_a_small_model_learns_to_reverse_digits_exactly_and_the_tools_agree"
TRACKERS = "observe/test_trackers.py"
TEXT, CACHE = "data/test_prepared_text.py", "data/shards/test_shard_cache.py"
SHARED = "parallel/test_shared_models.py::test_ranks_that_share_a_model_compute_what_one_process_computes"
STAGES = "parallel/test_pipeline.py::test_stages_compute_what_one_process_computes"
OPTIONS = "parallel/test_layout.py::test_options_of_ddp_reach_torch"
SEEN = {
    "run.name": "train/test_starting_point.py::test_check_says_what_the_run_would_do",
    "run.dir": "train/test_starting_point.py::test_check_says_what_the_run_would_do",
    "run.resume": "checkpoint/test_damage.py::test_resume_never_refuses_a_used_directory_and_required_an_empty_one",
    "run.init_from": "huggingface/test_import_into_layouts.py::test_an_imported_model_starts_a_run_under_any_layout_bit_equal",
    "run.accept_changes": "checkpoint/test_choosing.py::test_a_run_goes_back_to_an_older_checkpoint_and_keeps_what_it_left",
    "run.deterministic": "train/test_resume.py::test_the_same_layout_resumes_in_every_bit_when_deterministic",
    "run.threads": "train/test_processor.py::test_the_threads_of_a_process_are_said_and_set",
    "run.affinity": "train/test_processor.py::test_each_process_of_a_run_is_kept_on_cores_of_its_own",
    "run.device": "test_cuda.py::test_a_gpu_computes_what_the_cpu_computes_from_the_same_initial_weights",
    "model.hf_config": "train/test_hf_runs.py::test_masks_of_documents_are_refused",
    "model.experts.correction": "models/test_experts.py::test_a_correction_changes_who_is_chosen_and_not_the_weights_and_is_not_trained",
    "model.experts.correction_rate": "models/test_experts.py::test_corrections_even_out_a_router_that_prefers_one_expert",
    "model.attention_backend": "models/test_document_mask.py::test_auto_takes_flex_on_cuda_and_sdpa_elsewhere",
    "model.encoder.vocab_size": f"{PAIRS}::test_what_does_not_fit_is_refused_in_one_line",
    "model.encoder.share_embedding": f"{PAIRS}::test_what_does_not_fit_is_refused_in_one_line",
    "data.sources.0.path": f"{A_RUN}::test_sources_that_cannot_be_told_apart_are_refused",
    "data.sources.0.name": f"{A_RUN}::test_sources_that_cannot_be_told_apart_are_refused",
    "data.sources.0.weight": f"{A_RUN}::test_achieved_shares_are_within_half_a_percent_after_a_few_blocks",
    "data.sources.0.tokens": f"{A_RUN}::test_budgets_of_tokens_are_shares_and_the_end_of_the_data",
    "data.sources.0.loss_weight": "train/test_loss_weights.py::test_the_gradient_is_the_weighted_sum_of_the_sources_gradients",
    "validation.prompts": "train/test_observing.py::test_the_model_continues_prompts_as_generation_does",
    "validation.prompt_tokens": "train/test_observing.py::test_the_model_continues_prompts_as_generation_does",
    "log.layers_every_steps": "train/test_layer_statistics.py::test_norms_are_those_of_the_gradients_and_weights_that_the_run_wrote",
    "log.device_hour_price": "train/test_observing.py::test_device_hours_add_up_over_starts_and_steps_that_were_lost_do_not_count",
    "data.sources.0.max_epochs": f"{A_RUN}::test_a_source_too_small_for_its_weight_is_repeated_as_often_as_it_may_and_then_left",
    "data.stages.0.until_tokens": f"{A_RUN}::test_stages_that_contradict_themselves_are_refused",
    "data.stages.0.weights": f"{A_RUN}::test_weights_and_sources_change_in_a_run_under_way_when_the_past_stays_as_it_was",
    "data.validation.0.path": "train/test_equivalence.py::test_validation_reports_the_cross_entropy_alone",
    "data.validation.0.name": f"{A_RUN}::test_sources_that_cannot_be_told_apart_are_refused",
    "data.span_corruption.first_sentinel": "train/test_span_runs.py::test_a_t5_of_the_hub_goes_on_with_its_own_tokenizer_and_sentinels",
    "data.workers": f"{A_RUN}::test_resumed_on_other_numbers_of_ranks_a_run_sees_the_samples_of_a_straight_one",
    "data.verify": "train/test_bad_input.py::test_sizes_alone_are_checked_on_request",
    "data.text.input": f"{A_RUN}::test_text_is_prepared_once_and_read_like_any_prepared_data",
    "data.text.dataset": f"{TEXT}::test_what_is_said_of_a_dataset_reaches_its_library",
    "data.text.dataset_config": f"{TEXT}::test_what_is_said_of_a_dataset_reaches_its_library",
    "data.text.revision": f"{TEXT}::test_what_is_said_of_a_dataset_reaches_its_library",
    "data.text.split": f"{TEXT}::test_what_is_said_of_a_dataset_reaches_its_library",
    "data.text.tokenizer": f"{A_RUN}::test_text_that_changed_is_refused_at_the_resume",
    "data.text.text_field": f"{TEXT}::test_what_is_said_of_a_dataset_reaches_its_library",
    "data.text.documents": f"{A_RUN}::test_text_is_prepared_once_and_read_like_any_prepared_data",
    "data.pairs": REVERSED,
    "data.objective": "train/test_span_runs.py::test_another_objective_makes_another_run",
    "data.cache.dir": f"{CACHE}::test_a_folder_that_cannot_be_made_is_an_error_that_names_the_key",
    "data.cache.limit_gb": f"{CACHE}::test_a_file_larger_than_the_limit_names_both_sizes_and_the_key",
    "batch.ramp.0.until_tokens": f"{A_RUN}::test_a_ramp_keeps_the_order_of_the_samples_and_takes_its_sizes",
    "batch.lengths.0.until_tokens": "train/test_schedules.py::test_a_run_in_a_stage_of_shorter_sequences_goes_on_as_if_never_interrupted",
    "batch.lengths.0.length": "train/test_schedules.py::test_a_run_in_a_stage_of_shorter_sequences_goes_on_as_if_never_interrupted",
    "batch.ramp.0.sequences": f"{A_RUN}::test_a_ramp_keeps_the_order_of_the_samples_and_takes_its_sizes",
    "batch.tokens": f"{PAIRS}::test_another_batch_size_another_seed_or_other_pairs_make_another_run",
    "batch.micro_tokens": f"{PAIRS}::test_a_layout_computes_what_one_process_computes",
    "loss.chunk_mb": "models/test_losses.py::test_fused_losses_and_gradients_are_those_of_cross_entropy",
    "optim.clip": "optim/test_clip.py::test_gradients_and_norm_are_those_of_torch",
    "optim.skip_nonfinite": f"{BAD}::test_one_step_more_than_may_be_skipped_ends_the_run_which_can_then_go_on_with_more",
    "optim.ema_decay": "optim/test_ema.py::test_the_mean_follows_its_formula_and_lends_its_values",
    **{f"optim.groups.0.{name}": "optim/test_muon.py::test_the_first_group_that_matches_a_name_gives_its_rate_and_decay" for name in ("pattern", "lr_scale", "weight_decay")},
    **{f"optim.groups.0.{name}": "optim/test_muon_groups.py::test_each_projection_of_transformers_takes_the_step_that_torchs_muon_takes_with_it_alone" for name in ("optimizer", "fused_rows")},
    **{f"schedule.stages.0.{name}": "optim/test_schedule.py::test_stages_follow_each_other" for name in ("steps", "ratio", "shape")},
    "schedule.stages.0.by_tokens": "optim/test_schedule.py::test_a_schedule_in_tokens_is_a_function_of_tokens_under_a_ramp",
    "schedule.stages.0.tokens": "optim/test_schedule.py::test_numbers_of_tokens_are_the_first_steps_that_reach_them",
    "parallel.tensor": SHARED, "parallel.context": SHARED, "parallel.context_method": SHARED, "parallel.pipeline": STAGES, "parallel.pipeline_schedule": STAGES, "parallel.pipeline_chunks": STAGES,
    "parallel.expert": "train/test_experts_in_layouts.py::test_a_layout_computes_what_one_process_computes",
    "parallel.grad_sync": "train/test_equivalence.py::test_a_layout_computes_what_one_process_computes",
    "parallel.reshard_after_forward": "train/test_equivalence.py::test_a_layout_computes_what_one_process_computes",
    "parallel.offload": f"{CONTINUED}::test_offloaded_state_computes_the_same",
    "parallel.activation_offload": "models/test_activation_offload.py::test_of_recomputed_blocks_the_inputs_travel_and_nothing_else",
    "parallel.activation_checkpointing": "models/test_recomputation.py::test_the_work_is_what_the_mode_says",
    "parallel.checkpoint_every_block": "models/test_recomputation.py::test_the_work_is_what_the_mode_says",
    "parallel.activation_memory_budget": "models/test_recomputation.py::test_a_compiler_stores_what_its_budget_allows",
    "parallel.compile": f"{CONTINUED}::test_what_is_compiled_computes_the_same_and_is_counted",
    "parallel.backend": "train/test_bad_input.py::test_a_library_for_gpus_is_refused_without_them",
    "parallel.timeout_seconds": "distributed/test_lost_ranks.py::test_a_rank_that_hangs_is_named_with_what_it_does_and_ends_too",
    "parallel.join_seconds": "distributed/test_joining.py::test_a_process_that_never_comes_is_named_while_the_others_wait_and_in_the_end",
    **{f"log.wandb.{name}": f"{TRACKERS}::test_a_run_of_weights_and_biases_goes_on_after_a_restart" for name in ("project", "entity", "group", "tags", "offline")},
    **{f"log.mlflow.{name}": f"{TRACKERS}::test_a_run_of_mlflow_goes_on_after_a_restart" for name in ("experiment", "uri")},
    **{f"log.trackio.{name}": f"{TRACKERS}::test_trackio_is_asked_for_the_run_of_the_start_before" for name in ("project", "space")},
    **{f"log.prometheus.{name}": f"{TRACKERS}::test_prometheus_reads_the_last_line_from_a_file_and_from_an_address" for name in ("file", "port")},
    "log.memory_history": f"{BAD}::test_a_history_of_a_gpu_s_memory_is_refused_on_a_cpu",
    "run.lock": "train/test_run_lock.py::test_a_file_system_without_flock_gets_the_other_way_and_says_so",
    "parallel.ddp.bucket_mb": OPTIONS, "parallel.ddp.gradient_as_bucket_view": OPTIONS,
    "parallel.cuda_graph": "test_cuda.py::test_all_micro_steps_but_the_first_three_are_launched_at_once",
    "precision.tf32": "test_cuda.py::test_tf32_makes_products_less_exact",
    "precision.keep_casts": "models/test_weight_copies.py::test_a_run_has_the_same_weights_and_says_how_it_casts",
    "precision.gradients": "optim/test_stored_formats.py::test_runs_learn_as_with_fp32_and_layouts_agree",
    "run.attention_kernel": "train/test_attention_kernel.py::test_one_kernel_is_left_and_auto_gives_all_back",
    "precision.compute": "parallel/test_masks_in_layouts.py::test_bf16_gives_masked_gradients_that_are_equal_under_ddp_and_fsdp",
    "precision.reduce": "train/test_equivalence.py::test_gradients_reduced_in_bf16_are_close_and_not_equal",
    "validation.every_steps": "train/test_equivalence.py::test_validation_loss_is_the_same_number_at_any_world_size_and_changes_nothing",
    "validation.sequences": "train/test_equivalence.py::test_validation_loss_is_the_same_number_at_any_world_size_and_changes_nothing",
    **{
        f"validation.translation.{name}": f"{PAIRS}::test_translations_are_the_same_at_any_world_size"
        for name in ("every_steps", "sequences", "beam")
    },
    "validation.translation.samples": REVERSED,
    "validation.translation.length_penalty": "models/test_translate.py::test_a_wide_beam_finds_the_best_of_all_sequences",
    "validation.translation.max_ratio": "models/test_translate.py::test_no_translation_is_longer_than_the_limit_and_ranks_are_waited_for",
    "validation.translation.max_extra": "models/test_translate.py::test_no_translation_is_longer_than_the_limit_and_ranks_are_waited_for",
    "validation.translation.lowercase": "observe/test_translation.py::test_scores_ignore_case_when_asked",
    "checkpoint.every_steps": f"{CONTINUED}::test_a_sharded_run_that_validates_where_it_saves_can_be_resumed",
    "checkpoint.every_seconds": "train/test_interruptions.py::test_a_checkpoint_is_saved_when_its_time_has_come",
    "checkpoint.asynchronous": "train/test_asynchronous_saves.py::test_what_is_saved_is_the_step_it_was_begun_at_while_others_are_taken",
    "checkpoint.keep_last": "checkpoint/test_damage.py::test_retention_keeps_the_newest_and_the_milestones",
    "checkpoint.keep_every_steps": "checkpoint/test_damage.py::test_retention_keeps_the_newest_and_the_milestones",
    "checkpoint.upload": "train/test_uploads.py::test_each_checkpoint_is_copied_and_kept_like_the_runs_own",
    "checkpoint.export_check": "huggingface/test_export_check.py::test_a_failure_ends_the_run_in_one_line_whether_it_is_long_or_over_by_then",
    "log.every_steps": "train/test_inspecting_runs.py::test_steps_that_were_not_logged_are_said_not_to_be",
    "log.tensorboard": "train/test_observing.py::test_every_number_of_the_record_is_logged_when_its_description_says_so",
    "log.gradients_at": "train/test_equivalence.py::test_a_layout_computes_what_one_process_computes",
    "log.profile": "train/test_profile.py::test_a_profiled_step_leaves_traces_and_a_page_and_computes_the_same",
}  # fmt: skip


@functools.cache
def signature(config_file: Path, *overrides: str) -> dict[str, Any]:
    """What a run would be made of, without its configuration."""
    config, _ = load_config(config_file, list(overrides))
    torch.manual_seed(0)
    plan = make_plan(config, 4, torch.device("cpu"))
    own, taken, batches = plan.config, 0, []
    loader = plan.data.loader(0, plan.layout.data_size)
    for batch in itertools.islice(loader.batches(0), 3):
        inputs = batch.micro(0, own.batch.micro_sequences, torch.device("cpu"))
        batches.append((batch.digest, batch.sequences, {name: value.tolist() for name, value in inputs.items()}))
        taken += batch.sequences
    return {
        "layout": plan.layout,
        "notes": plan.notes,
        "batches": batches,
        "micro_steps": batch.micro_steps(own.batch.micro_sequences),
        "identity": plan.identity(taken),
        "export": own.model.family,
        "longest": own.model.max_sequence_length,
        "validation": [(source.name, len(source)) for source in plan.data.validation],
        "rates": [learning_rate(own.schedule, own.optim.lr, own.run.steps, step, consumed_after(own)) for step in range(1, own.run.steps + 1)],
        "network": network_signature(own, inputs),
    }


def network_signature(config: Config, inputs: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = build_network(config.model, config.loss)
    model.to_empty(device="cpu")
    initialise(model, config.run.seed)
    optimizers = OptimizerSet(model, config.optim).optimizers
    losses = model.train()(**inputs)
    losses.sum().backward()
    groups = [
        (
            type(own).__name__,
            getattr(own, "momentum", None),
            getattr(own, "polynomials", None),
            getattr(own, "betas", None),
            getattr(own, "eps", None),
            getattr(own, "options", None),
        )
        + ({name: value for name, value in group.items() if name != "params"},)
        for own in optimizers
        for group in own.param_groups
    ]
    gradients = {name: None if p.grad is None else float(p.grad.double().norm()) for name, p in model.named_parameters()}
    return losses.tolist(), gradients, groups


def values_of(leaf: Leaf) -> list[Any]:
    """Values of a key's type that are not its default."""
    values = VALUES.get(leaf.path) or _values(_hint(leaf.path), leaf.value)
    return [value for value in values if value != leaf.value]


def _hint(path: str) -> Any:
    hint: Any = Config
    for name in path.split("."):
        hint = typing.get_args(hint)[0] if name == "0" else typing.get_type_hints(hint)[name]
    return hint


def _values(hint: Any, default: Any) -> list[Any]:
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if typing.get_origin(hint) is typing.Literal:
        return [kind for kind in kinds if kind != default]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _values(kinds[0], default)
    if hint is bool:
        return [value for value in (True, False) if value != default]
    if hint is int:
        return [4, 2, 8, 3] if default is None else [default * 2, default + 1]
    if hint is float:
        return [0.5, 2.0] if default is None else [default * 0.5, default * 2, 0.25]
    raise AssertionError(f"give VALUES for a key of type {hint}")


def written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def what_another_value_does(config_file: Path, path: str) -> str:
    """`differs` where a value makes another plan, `refused` where all are refused, `nothing` where there are plans that are all alike."""
    beside = next((beside for start, beside in BESIDE.items() if path.startswith(start)), BASE)
    usual, found = signature(config_file, *beside), "refused"
    for value in values_of(KEYS[path]):
        try:
            if signature(config_file, *beside, f"{path}={written(value)}") != usual:
                return "differs"
        except UserError:
            continue
        found = "nothing"
    return found


@pytest.fixture(scope="module")
def base_file(tmp_path_factory, prepared) -> Path:
    return write_config(tmp_path_factory.mktemp("every-key"), prepared)


@pytest.mark.parametrize("path", sorted(set(KEYS) - set(SEEN)))
def test_another_value_makes_another_plan(base_file, path):
    """Line 5 of the review of the house: 10 of 21 settings were accepted and ignored."""
    assert what_another_value_does(base_file, path) == "differs"


def test_what_no_plan_shows_is_seen_by_a_test_that_exists():
    missing = []
    for path, test in SEEN.items():
        file, _, name = test.partition("::")
        if path not in KEYS or not re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE):
            missing.append(f"{path}: {test}")
    assert not missing


def test_every_number_has_an_upper_limit_and_one_beyond_it_is_refused_at_its_key():
    """T-D13: model.dim=1e12, model.vocab_size=1e13, parallel.timeout_seconds=1e20 and parallel.ddp.bucket_mb=1e300 were tracebacks."""
    without = []
    for path, leaf in KEYS.items():
        if _is_number(_hint(path)) and ".0." not in path:
            try:
                load_config(None, [f"{path}=[1e300]" if typing.get_origin(_hint(path)) is list else f"{path}=1e300"])
                without.append(path)
            except ConfigError as error:
                assert leaf.path in str(error) and "\n" not in str(error)
    assert not without


def _is_number(hint: Any) -> bool:
    kinds = set(typing.get_args(hint)) or {hint}
    return bool(kinds & {int, float}) and typing.get_origin(hint) not in (tuple, typing.Literal)
