"""Multi-token prediction: the losses are those of the definition, on one device and on two ranks that share the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.conventions import IGNORED
from pretrain.models.layer_specs import LayerSpec
from pretrain.models.loss import LossOptions
from pretrain.models.multi_token import MultiTokenPrediction, targets_ahead
from pretrain.models.output_head import OutputHead

VOCABULARY, DIM, DEPTHS, WEIGHT = 29, 8, 2, 0.3
DOCUMENTS = [[5, 5, 5, 9, 9, 5, 5, 5, 5, 5], [1] * 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [2, 2, 2, 2, 2, 2, 2, -1, -1, -1]]


class Block(nn.Module):
    """Mixes each position with the mean of the earlier ones of its document: a stand-in for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.past, self.now = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(
        self, x_BTD: Tensor, rope: None, mask_BTT: Tensor, cache: None, counted_BT: None, dropout: None = None
    ) -> tuple[Tensor, None]:
        past_BTD = (mask_BTT / mask_BTT.sum(dim=-1, keepdim=True)) @ x_BTD
        return x_BTD + torch.tanh(self.past(past_BTD) + self.now(x_BTD)), None


SPEC = LayerSpec(mixer="attention", placement="pre", window=0, rope=False, mlp="mlp")


class Trunk(nn.Module):
    """A decoder as the multi-token module meets it."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.output = OutputHead(DIM, VOCABULARY, LossOptions(chunk_bytes=VOCABULARY * 8 * 7), tied=tied)
        self.multi_token = MultiTokenPrediction([Block() for _ in range(DEPTHS)], DIM, SPEC, lambda: nn.RMSNorm(DIM), WEIGHT)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        mask = causal(tokens_BT, documents_BT)
        embedded = x = self.embedding(tokens_BT)
        for layer in self.layers:
            x, _ = layer(x, None, mask, None, None)
        main = self.norm(x)
        depths, _ = self.multi_token(x, embedded, None, mask, None)
        weight = self.embedding.weight if self.output.weight is None else None
        return self.multi_token.losses(self.output, main, depths, targets_BT, documents_BT, weight).objective_B


def causal(tokens_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
    mask = torch.ones(tokens_BT.shape[1], tokens_BT.shape[1]).tril().expand(len(tokens_BT), -1, -1)
    if documents_BT is None:
        return mask
    numbers = F.pad((documents_BT[:, 1:] != documents_BT[:, :-1]).cumsum(dim=1), (1, 0))
    return mask * (numbers[:, :, None] == numbers[:, None, :])


def batch() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (4, 11), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[3, 6:] = IGNORED
    return ids[:, :-1], targets, torch.tensor(DOCUMENTS)


def by_definition(model: Trunk, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
    """Equations 21 to 25 of the paper, a sequence and a depth at a time, with the shared modules called every time."""
    rows = []
    for row in range(len(tokens)):
        here = None if documents is None else documents[row : row + 1]
        mask = causal(tokens[row : row + 1], here)
        hidden = model.embedding(tokens[row : row + 1])
        for layer in model.layers:
            hidden, _ = layer(hidden, None, mask, None, None)
        length = tokens.shape[1]
        output = model.embedding.weight if model.output.weight is None else model.output.weight
        losses = [token_losses(model.norm(hidden) @ output.T, targets[row])]
        for k, depth in enumerate(model.multi_token.depths, start=1):
            kept = length - k  # positions 1 .. T - k, as in the paper
            told = model.embedding(tokens[row : row + 1, k:])
            both = torch.cat((depth.hidden_norm(hidden[:, :kept]), depth.token_norm(told)), dim=-1)
            hidden, _ = depth.block(both @ depth.projection.T, None, mask[:, :kept, :kept], None, None)
            ahead = targets[row, k:].clone()
            for t in range(kept):
                if here is not None and len(set(here[0, t : t + k + 1].tolist())) > 1:
                    ahead[t] = IGNORED
            losses.append(WEIGHT / DEPTHS * token_losses(depth.norm(hidden) @ output.T, ahead))
        rows.append(torch.stack(losses))
    return torch.stack(rows, dim=1)


def token_losses(logits_1TV: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_1TV[0], targets_T, ignore_index=IGNORED, reduction="sum")


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_gradients_are_those_of_the_definition(masked, tied):
    model = Trunk(tied)
    tokens, targets, documents = batch()
    documents = documents if masked else None
    found, expected = model(tokens, targets, documents), by_definition(model, tokens, targets, documents)
    assert found.shape == (1 + DEPTHS, 4) and relative_difference(found, expected) <= 1e-6
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(found.sum(dim=0).sum(), parameters.values())
    right = torch.autograd.grad(expected.sum(), parameters.values())
    for name, one, other in zip(parameters, gradients, right):
        assert relative_difference(one, other) <= 1e-5, name
        assert one.any(), name


def test_the_main_loss_is_untouched_by_the_depths():
    model, (tokens, targets, _) = Trunk(), batch()
    alone = by_definition(model, tokens, targets, None)[0]
    assert relative_difference(model(tokens, targets)[0], alone) <= 1e-6


def test_a_document_tells_another_nothing():
    model, (tokens, targets, documents) = Trunk(), batch()
    changed, changed_targets = tokens.clone(), targets.clone()
    changed[0, 3:5] = (tokens[0, 3:5] + 1) % VOCABULARY  # the document in the middle, between two that carry one label
    changed_targets[0, 2:4] = changed[0, 3:5]
    before = by_position(model, tokens, targets, documents)
    after = by_position(model, changed, changed_targets, documents)
    for k in range(1 + DEPTHS):
        # But for the document itself, and for what has its first token as the target (which the main loss has as well).
        apart = [t for t in range(tokens.shape[1]) if not 2 - k <= t < 5]
        assert torch.equal(before[k, 0, apart], after[k, 0, apart])
    assert not torch.equal(before, after)


def by_position(model: Trunk, tokens: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Losses [1 + depths, B, T], each position's found by ignoring all others."""
    found = []
    for t in range(tokens.shape[1]):
        mask = causal(tokens, documents)
        embedded = x = model.embedding(tokens)
        for layer in model.layers:
            x, _ = layer(x, None, mask, None, None)
        depths, _ = model.multi_token(x, embedded, None, mask, None)
        states = [model.norm(x), *depths]
        ahead = [targets, *(targets_ahead(targets, k, documents) for k in (1, 2))]
        found.append(torch.stack([model.output(s[:, t : t + 1], a[:, t : t + 1]) for s, a in zip(states, ahead)]))
    return torch.stack(found, dim=-1).detach()


def test_targets_ahead_end_with_the_sequence_and_with_a_document():
    targets = torch.tensor([[10, 11, 12, 13, 14]])
    assert targets_ahead(targets, 1).tolist() == [[11, 12, 13, 14, IGNORED]]
    assert targets_ahead(targets, 7).tolist() == [[IGNORED] * 5]
    same_label = torch.tensor([[3, 3, 4, 3, 3]])
    assert targets_ahead(targets, 1, same_label).tolist() == [[11, IGNORED, IGNORED, 14, IGNORED]]
    assert targets_ahead(targets, 3, same_label).tolist() == [[IGNORED] * 5]


def test_sequences_shorter_than_the_depths_lose_the_extra_losses_only():
    model, (tokens, targets, _) = Trunk(), batch()
    losses = model(tokens[:, :1], targets[:, :1])
    losses.sum().backward()
    assert not losses[1:].any() and losses[0, :3].all()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("depths, weight", [(0, 0.3), (1, 0.0)])
def test_no_depth_and_no_weight_are_refused(depths, weight):
    with pytest.raises(ValueError, match="must be positive"):
        MultiTokenPrediction([Block() for _ in range(depths)], DIM, SPEC, lambda: nn.RMSNorm(DIM), weight)


# ---- two ranks ----------------------------------------------------------------------------------------------------------


def whole_gradients(strategy: str, tied: bool) -> list[dict[str, Tensor]]:
    """Gradients of two micro-steps, summed over ranks; the second step finds the weights as the first left them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    model, (tokens, targets, documents) = Trunk(tied), batch()
    rank, size = 0, 1
    if strategy == "fsdp":
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        for unit in [*([] if tied else [model.embedding]), *model.layers, *model.multi_token.depths]:
            fully_shard(unit)
        if not tied:
            fully_shard([model.norm, model.output], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
    here = slice(rank * 4 // size, (rank + 1) * 4 // size)
    steps = []
    for factor in (1.0, 0.25):
        model.zero_grad()
        (model(tokens[here], targets[here], documents[here]).sum() * factor).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        steps.append({name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()})
    return steps


@pytest.mark.parametrize("tied", [False, True])
def test_two_ranks_that_share_the_weights_have_the_gradients_of_one(pool, tied):
    [single] = pool.launch(1, whole_gradients, "single", tied)
    for steps in pool.launch(2, whole_gradients, "fsdp", tied):
        for found, right in zip(steps, single, strict=True):
            assert found.keys() == right.keys()
            assert all(relative_difference(found[name], gradient) <= 5e-6 for name, gradient in right.items())
