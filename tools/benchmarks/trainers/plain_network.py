"""GPT-2's network as people write it after nanoGPT's, with the logits of a micro-batch at once. `dropout`: where nanoGPT has it; `bias`: of norms and
projections, which nanoGPT's settings leave out, and GPT-2 has.
"""

import torch
from torch import nn
from torch.nn import functional as F


def dropped(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()  # Dropout(0) takes time


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.dim, self.heads, self.dropout = dim, heads, dropout
        self.drop_1, self.drop_2 = dropped(dropout), dropped(dropout)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, bias=bias), nn.LayerNorm(dim, bias=bias)
        self.qkv, self.projection = nn.Linear(dim, 3 * dim, bias), nn.Linear(dim, dim, bias)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias), nn.Linear(4 * dim, dim, bias)

    def forward(self, x):
        heads = [
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(self.dim, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop_1(self.projection(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop_2(self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")))


class Network(nn.Module):
    def __init__(
        self, dim: int, layers: int, heads: int, vocabulary: int, length: int, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.drop = dropped(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout, bias) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, bias=bias), nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:  # what is added to the residual stream begins smaller
                added = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)

    def forward(self, ids, targets):
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
