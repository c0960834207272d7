"""Activations that wait for backward in host memory: the same gradients, and nothing travels but what has to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from family_cases import FAMILIES
from test_recomputation import LLAMA, QUICK, gradients, loss_of, model_of, network_of

from pretrain.config.attention_schema import AttentionConfig
from pretrain.parallel import activation_offload
from pretrain.parallel.activation_offload import StoredTensors, offload_activations

ROWS, LENGTH = 4, 128
WIDE = dataclasses.replace(LLAMA, dim=64)


def offloaded(model, dtype: torch.dtype, options: dict | None) -> torch.nn.Module:
    network = network_of(model, dtype, options)
    offload_activations(network)
    return network


@pytest.fixture
def copied(monkeypatch) -> list[torch.Tensor]:
    """Every tensor that is copied to the host."""
    found, copy = [], StoredTensors._copy
    monkeypatch.setattr(activation_offload, "SMALLEST", 1)
    monkeypatch.setattr(StoredTensors, "_copy", lambda self, tensor: found.append(tensor) or copy(self, tensor))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in sorted({*FAMILIES, "t5"})]
)
def test_gradients_are_the_same_bits(family, dtype, copied):
    expected = gradients(network_of(model_of(family), dtype, None))
    for options in (None, {}, {"selective": True, "every": 2}):
        copied.clear()
        found = gradients(offloaded(model_of(family), dtype, options))
        assert copied and found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), options


def test_of_recomputed_blocks_the_inputs_travel_and_nothing_else(copied):
    loss_of(offloaded(WIDE, torch.float32, {}), ROWS, LENGTH)
    assert [tuple(tensor.shape) for tensor in copied] == [(ROWS, LENGTH, WIDE.dim)] * WIDE.layers


def test_weights_and_what_all_blocks_share_stay(copied):
    network = offloaded(dataclasses.replace(WIDE, attention=AttentionConfig(window=8)), torch.float32, None)
    given = {}
    network.layers["0"].register_forward_pre_hook(lambda _, args: given.update(enumerate(args)))
    loss_of(network, ROWS, LENGTH)
    masks_and_tables = [leaf for value in list(given.values())[1:] for leaf in torch.utils._pytree.tree_leaves(value)]
    stay = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *masks_and_tables) if torch.is_tensor(t)}
    assert len(stay) > len(list(network.parameters()))
    assert copied and not stay & {tensor.untyped_storage().data_ptr() for tensor in copied}
    places = [(t.data_ptr(), t.shape, t.stride()) for t in copied]
    assert len(set(places)) == len(places)  # none travels twice


class Clones:
    """Stands for the copies between a device and its host where there is no GPU."""

    def to_host(self, tensor):
        return tensor.clone()

    def to_device(self, tensors):
        return [tensor.clone() for tensor in tensors]

    record = wait = lambda self, *_: None


def test_a_device_holds_two_blocks_at_a_time_and_gets_the_next_one_early(monkeypatch):
    """The order of copies on a GPU."""
    made, most, early = [], [], []
    begin, unpack = StoredTensors.__init__, StoredTensors.unpack

    def begin_with_clones(self, transfers, *others):
        begin(self, Clones(), *others)
        made.append(self)

    def watched(self, packed):
        found, place = unpack(self, packed), made.index(self)
        if isinstance(packed, int):
            most.append(sum(bool(stored.on_device) for stored in made[: place + 1]))
            early.append(place == 0 or bool(made[place - 1].on_device))
        return found

    monkeypatch.setattr(StoredTensors, "__init__", begin_with_clones)
    monkeypatch.setattr(StoredTensors, "unpack", watched)
    network = offloaded(WIDE, torch.float32, None)
    loss = loss_of(network, ROWS, LENGTH)
    assert [bool(stored.on_device) for stored in made] == [False] * (WIDE.layers - 1) + [True]
    loss.backward()
    expected = network_of(WIDE, torch.float32, None)
    loss_of(expected, ROWS, LENGTH).backward()
    for ours, theirs in zip(network.parameters(), expected.parameters()):
        assert torch.equal(ours.grad, theirs.grad)
    assert set(most) == {1, 2} and all(early)
