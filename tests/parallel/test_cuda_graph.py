"""`parallel.cuda_graph` is refused where it would do nothing, or where a recorded micro-step would compute something else (tests/test_cuda.py runs it)."""

import pytest
import torch
from running import run_main

from pretrain.config.load import load_config
from pretrain.errors import ConfigError
from pretrain.parallel.cuda_graph import check_cuda_graph
from pretrain.parallel.layout import plan_layout
from pretrain.train.out_of_memory import remedies
from pretrain.train.resolve import resolve

GRAPH = "parallel.cuda_graph=true"
REFUSED = {
    "model.experts.count=4": ("model.family=qwen3_moe", "model.experts={count: 4, active: 2, ffn_dim: 32}"),
    "parallel.activation_offload=true": ("parallel.activation_offload=true",),
    "parallel.activation_checkpointing=full": ("parallel.activation_checkpointing=full",),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_is_refused(config_file, reason):
    config, _ = load_config(config_file, [GRAPH, *REFUSED[reason]])
    with pytest.raises(ConfigError, match=f"parallel.cuda_graph=true cannot record this micro-step: {reason}"):
        check_cuda_graph(resolve(config), "single", torch.device("cuda"))


def test_a_micro_step_of_a_gpu_alone_can_be_recorded(config_file):
    config, _ = load_config(config_file, [GRAPH, "parallel.compile=model", "model.dropout=0.1", "data.document_mask=true"])
    check_cuda_graph(resolve(config), "single", torch.device("cuda"))
    assert "has no effect on a CPU" in run_main(str(config_file), "--check", GRAPH)[1]
    refused = run_main(str(config_file), "--check", GRAPH, "run.device=cpu", "parallel.strategy=fsdp")
    assert "parallel.cuda_graph=true has no effect with parallel.strategy=fsdp; set parallel.strategy=single" in refused[1]


def test_what_is_advised_without_memory_goes_with_the_option_or_ends_it(config_file):
    config = resolve(load_config(config_file, [GRAPH])[0])
    advice = "; ".join(remedies(config, plan_layout(config, 1, 1000, None)))
    assert "set parallel.cuda_graph=false" in advice and "activation_checkpointing=full" not in advice
