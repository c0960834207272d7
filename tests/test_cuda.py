"""What needs a GPU: `bash tests/run.sh --cuda` on a host that has one. Not run in continuous integration."""

import pytest
import torch
from running import gradients, largest_gradient_difference, largest_relative_difference, losses, train

from pretrain.observe.metrics import read_metrics

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = "run.device=cuda"
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def test_a_gpu_computes_what_the_cpu_computes_from_the_same_initial_weights(pool, config_file):
    options = ("log.gradients_at=[1]", "run.steps=10", "optim.lr=3e-4")
    cpu = train(pool, 1, config_file, "run.name=cpu", "run.device=cpu", *options)
    gpu = train(pool, 1, config_file, "run.name=gpu", CUDA, *options)
    assert largest_gradient_difference(gradients(gpu), gradients(cpu)) <= 1e-5
    assert largest_relative_difference(losses(gpu), losses(cpu)) <= 1e-5


def test_a_gpu_resumes_what_the_cpu_saved(pool, config_file):
    cpu = train(pool, 1, config_file, "run.name=cpu", "run.device=cpu", "run.steps=10")
    gpu = train(pool, 1, config_file, "run.name=gpu", CUDA, "run.steps=20", f"run.resume={cpu}")
    whole = train(pool, 1, config_file, "run.name=whole", CUDA, "run.steps=20")
    assert len(losses(gpu)) == 10 and largest_relative_difference(losses(gpu)[-1:], losses(whole)[-1:]) < 0.05


@pytest.mark.parametrize("options", [("parallel.compile=true",), ("parallel.activation_checkpointing=full",), ()])
def test_bf16_trains_and_reports_mfu_where_the_peak_is_known(pool, config_file, options):
    run = train(pool, 1, config_file, CUDA, "precision.compute=bf16", *options)
    records = read_metrics(run)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    if torch.cuda.get_device_name() == "NVIDIA H200":
        assert 0 < records[-1]["mfu"] < 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_nccl_computes_what_one_gpu_computes(pool, config_file, strategy):
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    options = ("log.gradients_at=[1]", "run.steps=10", CUDA)
    one = train(pool, 1, config_file, "run.name=one", *options)
    two = train(pool, 2, config_file, "run.name=two", f"parallel.strategy={strategy}", *options)
    assert largest_gradient_difference(gradients(two), gradients(one)) <= 5e-6


def test_fsdp_on_one_gpu_with_nccl_equals_the_single_process(pool, config_file):
    options = ("log.gradients_at=[1]", "run.steps=10", CUDA)
    one = train(pool, 1, config_file, "run.name=one", *options)
    sharded = train(pool, 1, config_file, "run.name=sharded", "parallel.strategy=fsdp", "parallel.shard=1", *options)
    assert largest_gradient_difference(gradients(sharded), gradients(one)) <= 5e-6
