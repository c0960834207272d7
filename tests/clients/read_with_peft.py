"""Run by another Python, with peft and trl: a step of LoRA on exports. Tasks come as JSON on standard input, answers leave as JSON lines."""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].float()


def tuned(task: dict) -> dict:
    """One step of LoRA on every linear layer; saved, loaded again, and merged into the weights."""
    base = AutoModelForCausalLM.from_pretrained(
        task["directory"], local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    torch.save(logits(base, task["ids"]), task["logits"])
    output = Path(task["output"])
    trainer = SFTTrainer(
        base,
        SFTConfig(
            output_dir=str(output), max_steps=1, per_device_train_batch_size=2, learning_rate=1e-2, max_length=32, report_to=[], save_strategy="no",
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, logging_strategy="no", warmup_steps=0,
        ),
        train_dataset=Dataset.from_list([{"text": text} for text in task["texts"]]),
        processing_class=AutoTokenizer.from_pretrained(task["directory"], local_files_only=True),
        # PEFT itself refuses the output projections of Nemotron-H's Mamba 2.
        peft_config=LoraConfig(
            r=4, target_modules="all-linear", exclude_modules=["out_proj"] if base.config.model_type == "nemotron_h" else None, init_lora_weights=True
        ),
    )  # fmt: skip
    loss = trainer.train().training_loss
    after = logits(trainer.model, task["ids"])
    trainer.save_model(str(output / "adapter"))
    loaded = AutoPeftModelForCausalLM.from_pretrained(
        output / "adapter", local_files_only=True, attn_implementation="eager", dtype=torch.float32
    )
    again = logits(loaded, task["ids"])
    merged = loaded.merge_and_unload()
    merged.save_pretrained(output / "merged")
    joined = logits(merged, task["ids"])
    torch.save(joined, output / "merged.pt")
    before = torch.load(task["logits"])
    return {
        "loss": loss,
        "changed": float((after - before).abs().max()),
        "loaded": float((again - after).abs().max()),
        "merged": float((joined - after).abs().max()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for task in json.load(sys.stdin):
        try:
            answer = tuned(task)
        except Exception as error:  # is an answer as well
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("answer:" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
