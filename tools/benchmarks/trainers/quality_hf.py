"""transformers' Trainer on the record's text, with one of its models."""

import logging
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from benchmarks.trainers.clock import Clock  # noqa: E402
from benchmarks.trainers.quality_task import QualityTask  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

task = QualityTask.given()
setting, clock = task.setting, Clock(task.result)
logging.disable(logging.WARNING)
torch.manual_seed(task.seed)


def as_inputs(window: torch.Tensor) -> dict:
    # Without `shift_labels` the model would shift the labels itself, and compute a position more than other programs for as many targets.
    targets = window[..., 1:].contiguous()  # its loss takes views
    return {"input_ids": window[..., :-1], "labels": targets, "shift_labels": targets}


class Windows(torch.utils.data.Dataset):
    """The windows of the text, one after the other, as people cut it for the Trainer, which shuffles them: each comes once in an epoch."""

    def __len__(self) -> int:
        return task.windows("train")

    def __getitem__(self, index: int) -> dict:
        return as_inputs(torch.from_numpy(task.window("train", index)))


class Stamp(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        task.stamp(clock, state.global_step)


dropout = setting.get("dropout", 0.0)
sizes = {"vocab_size": task.vocabulary, "use_cache": False, "tie_word_embeddings": setting.get("tied", True)}
if setting.get("model", "gpt2") == "gpt2":
    network = GPT2LMHeadModel(
        GPT2Config(
            n_positions=setting["length"], n_embd=setting["dim"], n_layer=setting["layers"], n_head=setting["heads"],
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **sizes,
        )
    )  # fmt: skip
else:
    network = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=setting["dim"], num_hidden_layers=setting["layers"], num_attention_heads=setting["heads"],
            intermediate_size=setting["ffn_dim"], max_position_embeddings=setting["length"], attention_dropout=dropout, **sizes,
        )
    )  # fmt: skip
arguments = TrainingArguments(
    output_dir=f"{task.result}.out", per_device_train_batch_size=setting["micro"], gradient_accumulation_steps=setting["accumulation"],
    max_steps=task.steps, learning_rate=setting["lr"], weight_decay=setting["weight_decay"], adam_beta2=setting["beta2"], max_grad_norm=1.0,
    optim="adamw_torch_fused", lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": setting["min_ratio"]},
    warmup_steps=max(1, round(setting["warmup"] * task.steps)), bf16=setting["format"] == "bf16", torch_compile=setting["compile"], use_cpu=task.device == "cpu",
    dataloader_num_workers=setting.get("workers", 0), dataloader_persistent_workers="workers" in setting, remove_unused_columns=False,
    save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, seed=task.seed,
)  # fmt: skip
Trainer(model=network, args=arguments, train_dataset=Windows(), callbacks=[Stamp()]).train()
network.eval()
with torch.no_grad(), torch.autocast(task.device, dtype=torch.bfloat16, enabled=setting["format"] == "bf16"):
    windows = [torch.from_numpy(window).to(task.device) for window in task.validation()]
    task.report(clock, [(float(network(**as_inputs(window)).loss), len(window)) for window in windows])
task.end()
