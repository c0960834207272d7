"""transformers' Trainer on the task, with its fused AdamW and its GPT-2."""

import logging
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402
from benchmarks.trainers.clock import Clock, Task  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

task = Task.given()
clock = Clock(task.result)
logging.disable(logging.WARNING)


class Windows(torch.utils.data.Dataset):
    """One window per index."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict:
        window = torch.from_numpy(task.windows(index)[0])
        # Without `shift_labels` the model would shift the labels itself, and compute a position more than other programs for as many targets.
        return {"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]}


class Stamp(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        clock.stamp()


model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=task.vocabulary, n_positions=task.length, n_embd=task.dim, n_layer=task.layers, n_head=task.heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )
)  # fmt: skip
arguments = TrainingArguments(
    output_dir=f"{task.result}.out", per_device_train_batch_size=task.micro, gradient_accumulation_steps=task.accumulation,
    max_steps=task.steps, learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, optim="adamw_torch_fused",
    lr_scheduler_type="cosine", warmup_steps=2, bf16=task.format == "bf16", torch_compile=task.compiled, use_cpu=True, save_strategy="no", logging_strategy="no",
    report_to=[], disable_tqdm=True, remove_unused_columns=False, ddp_backend="gloo" if task.ranks > 1 else None, ddp_find_unused_parameters=False,
)  # fmt: skip
found = Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[Stamp()]).train()
clock.write(found.training_loss)
