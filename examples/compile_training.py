"""A training loop under torch.compile that has the bits of the same loop in eager mode, and of any other batch's rows.

    python examples/compile_training.py

On an NVIDIA GPU with the kernels of this library; on a CPU with torch's own, where it shows what the backend does and
not how fast. Nothing is downloaded. The model is plain torch: no line of it knows this library.
"""

import contextlib
import time

import torch
import torch.nn.functional as F
from torch import nn

import cute_kernels.invariance.compiled  # noqa: F401  (not needed where the package is installed by pip)
from cute_kernels import batch_invariant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, WIDTH, HEADS, STEPS = 256, 128, 2, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(VOCABULARY, WIDTH), Layer()
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.layer(self.embedding(tokens))))

    def loss(self, tokens):
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(compiled):
    """The losses of a few steps, and the weights after them."""
    torch.manual_seed(0)
    model = Model().to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = torch.compile(model.loss, backend="cute_kernels", dynamic=False) if compiled else model.loss
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (4, 65), device=DEVICE)
        # A compiled function needs no block; eager code does, and the optimizer adds nothing up
        with contextlib.nullcontext() if compiled else batch_invariant("strict"):
            loss = loss_of(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main() -> tuple[int, int]:
    """How many weights differ after training, and how many logits of a row alone from those of it among others."""
    start = time.perf_counter()
    eager_losses, eager_model = train(False)
    compiled_losses, compiled_model = train(True)
    for step, (eager, compiled) in enumerate(zip(eager_losses, compiled_losses, strict=True)):
        print(f"step {step}: loss {eager:.6f} eager, {compiled:.6f} compiled")
    pairs = zip(eager_model.parameters(), compiled_model.parameters(), strict=True)
    of_weights = sum(int((a != b).sum()) for a, b in pairs)
    print("weights that differ after training:", of_weights)

    forward = torch.compile(compiled_model, backend="cute_kernels", dynamic=False)
    tokens = torch.randint(VOCABULARY, (8, 32), device=DEVICE)
    with torch.no_grad():
        alone, among = forward(tokens[:1]), forward(tokens)[:1]
    of_logits = int((alone != among).sum())
    print("logits that differ alone and among 8:", of_logits)
    print(f"{time.perf_counter() - start:.0f} s on {DEVICE}")
    return of_weights, of_logits


if __name__ == "__main__":
    main()
