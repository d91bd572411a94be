"""The transformer, its optimizer, and one step of both; whole on one device, or sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cute_kernels.nn import HyperConnectionConfig, MHCTransformer, TransformerConfig
from cute_kernels.nn.graph import CapturedStep
from cute_kernels.runtime.checks import expect
from cute_kernels.train.data import VOCABULARY
from cute_kernels.train.distributed import World
from cute_kernels.train.options import Options

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices
LARGEST_NORM = 1.0  # of the gradient; a longer one is shortened to it


def config_of(options: Options, backend: str | None = None) -> TransformerConfig:
    """The model's config; backend "reference": plain torch on GPUs, too."""
    connections = None
    if options.hyper_connections:
        connections = HyperConnectionConfig(
            options.hidden, num_streams=options.hyper_connections, recompute=options.recompute
        )
    shares = options.experts_per_token if options.experts else 1  # a token's experts have the weights of one MLP
    return TransformerConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.heads,
        # As many weights as an MLP of 4 hidden without gate
        ffn_hidden_size=8 * -(-64 * -(-8 * options.hidden // (3 * 64)) // (8 * shares)),
        max_sequence_length=options.sequence,
        dropout_p=options.dropout,
        hyper_connections=connections,
        num_experts=options.experts or None,
        experts_per_token=options.experts_per_token,
        balance=options.balance,
        z_loss=options.z_loss,
        backend=backend,
        attention_backend="torch" if options.torch_attention else None,
    )


class Learner:
    """A model of fp32 parameters (it computes in bf16) and its AdamW.

    Its first weights depend on the seed alone: every rank makes all of them, on the CPU, and keeps its share. Ranks
    exchange fp32 weights and gradients: each computes what one process would with its rows.
    """

    def __init__(self, options: Options, ranks: World, backend: str | None = None) -> None:
        expect(
            not (options.graph and (ranks.sharded or ranks.device.type != "cuda")),
            "train",
            "--graph",
            "be left out, or the run be one process on a GPU, without torchrun",
            f"{ranks.size} ranks of torchrun on {ranks.device.type}" if ranks.sharded else ranks.device.type,
        )
        torch.manual_seed(options.seed)
        self.model = MHCTransformer(config_of(options, backend))
        if options.compile:
            for layer in self.model.layers:
                layer.compile(fullgraph=True)
        if ranks.sharded:
            mesh = init_device_mesh(ranks.device.type, (ranks.size,))
            for module in (*self.model.layers, self.model):  # each goes to the device when it is sharded
                # A block of recompute reads its layers' weights again before they would be gathered again.
                fully_shard(module, mesh=mesh, reshard_after_forward=not options.recompute)
        else:
            self.model.to(ranks.device)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        on_gpu = ranks.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            # A tensor can change in a captured graph; captured or not, AdamW then has the same fp32 rate.
            lr=torch.zeros((), device=ranks.device) if on_gpu and not ranks.sharded else options.lr,
            betas=BETAS,
            fused=on_gpu,
            capturable=options.graph,
        )
        self._captures = options.graph
        self._captured: CapturedStep | None = None

    def step(self, tokens: Tensor, targets: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """(loss of this rank's rows, norm of the gradient of all) before the step at this learning rate."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._captures and self._captured is None:
            self._captured = CapturedStep(self._learn, (tokens, targets), self.model, self.optimizer)
        return (self._captured or self._learn)(tokens, targets)

    def test(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss of this rank's rows."""
        self.model.eval()
        with torch.no_grad():
            loss = self.model.loss(tokens, targets)
        self.model.train()
        return loss

    def _learn(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss(tokens, targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        return loss.detach(), norm.full_tensor() if isinstance(norm, DTensor) else norm
