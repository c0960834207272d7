"""Run by another Python, of any transformers: what it makes of exports. Tasks come as JSON on standard input, answers leave as JSON lines."""

import json
import sys
import warnings

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def logits_of(task: dict) -> dict:
    model = AutoModelForCausalLM.from_pretrained(task["directory"], local_files_only=True, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save(model(torch.tensor([task["ids"]])).logits[0].float(), task["logits"])
    return {}


def texts_of(task: dict) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(task["directory"], local_files_only=True)
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in task["texts"]]
    roles = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length]
    return {"ids": ids, "decoded": [tokenizer.decode(one) for one in ids], "roles": roles}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(json.dumps({"version": transformers.__version__, "knows": list(CONFIG_MAPPING.keys())}), flush=True)
    for task in json.load(sys.stdin):
        try:
            answer = logits_of(task) if "ids" in task else texts_of(task)
        except Exception as error:  # is an answer as well
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
