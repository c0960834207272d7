"""Tokens per second of the Hugging Face Trainer at the shape of Llama 3.2 1B, in bf16 by autocast: the peer of part 2's 1B rows."""

import argparse
import os
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
         "vocab_size": 128256, "tie_word_embeddings": True}  # fmt: skip
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
WARM_UP, STEPS = 3, 8


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments, **options) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="to try it on a CPU")
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    asked = parser.parse_args()
    tiny = asked.tiny
    length, micro, accumulation = (64 if tiny else 4096), 4, 2
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else SHAPE), max_position_embeddings=length))
    ids = torch.randint(0, 256, ((WARM_UP + STEPS) * micro * accumulation, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation, max_steps=WARM_UP + STEPS, bf16=True,
            torch_compile=asked.compile, optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # else it spreads a batch over all that it sees, and this measures one
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    seconds = (clock.times[-1] - clock.times[WARM_UP - 1]) / STEPS
    memory = f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if torch.cuda.is_available() else ""
    print(f"HF Trainer{', compiled' if asked.compile else ''}: {micro * accumulation * length / seconds:,.0f} tokens/s{memory}", flush=True)
    if asked.compile:
        os._exit(0)  # torch 2.11's compiler waits for its processes here, for up to five minutes


if __name__ == "__main__":
    main()
