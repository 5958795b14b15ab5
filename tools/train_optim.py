"""The optimiser of both trainers: Muon for the matrices of the layers, AdamW for everything else.

Owns parameter grouping, update rules and the learning-rate curve. Must not know what the parameters mean beyond
their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

# Names of 2-D tables that Muon must leave alone: rows are looked up or scored one by one, not mixed.
TABLES = ("embed_tokens", "wte", "lm_head")
GATE = "early_exit_gate"
# Quintic iteration that drives all singular values towards one (Keller Jordan's coefficients).
ORTHOGONALISE_STEPS = 5
ORTHOGONALISE_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CLIP_NORM = 1.0


def orthogonalise(batch: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with their singular values pushed to about one; bfloat16 on a GPU."""
    linear_term, cubic, quintic = ORTHOGONALISE_COEFFICIENTS
    x = batch.bfloat16() if batch.is_cuda else batch.float()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ORTHOGONALISE_STEPS):
        gram = x @ x.mT
        x = linear_term * x + (cubic * gram + quintic * (gram @ gram)) @ x
    out: Tensor = x.mT if is_tall else x
    return out.to(batch.dtype)


class Muon:
    """Nesterov momentum with orthogonalised updates, matrices of one shape in one batched call."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, decay: float, momentum: float = 0.95) -> None:
        self.peak_lr = self.lr = lr
        self.decay = decay
        self.momentum = momentum
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self._velocity = {
            shape: torch.stack([torch.zeros_like(m) for m in group]).detach() for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        for shape, group in self._groups.items():
            gradients = torch.stack([_gradient(matrix) for matrix in group])
            velocity = self._velocity[shape].lerp_(gradients, 1 - self.momentum)
            updates = orthogonalise(gradients.lerp(velocity, self.momentum))
            size = self.lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.mul_(1 - self.lr * self.decay).sub_(update, alpha=size)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every matrix takes part in every step"
    return parameter.grad


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, the rest). A tied tensor appears once."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and GATE not in name and not any(table in name for table in TABLES)
        (matrices if is_matrix else rest).append(parameter)
    return matrices, rest


class Optimiser:
    """Both update rules behind one step; the rates follow one scale factor."""

    def __init__(self, model: nn.Module, adam_lr: float, muon_lr: float, muon_decay: float) -> None:
        self._parameters: Sequence[nn.Parameter] = list(model.parameters())
        matrices, rest = split_parameters(model)
        on_gpu = rest[0].is_cuda
        self._adam_lr = adam_lr
        self._adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=on_gpu)
        self._muon = Muon(matrices, muon_lr, muon_decay)

    def set_scale(self, scale: float) -> None:
        """Scale both peak rates."""
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * scale
        self._muon.lr = self._muon.peak_lr * scale

    def step(self, loss: Tensor) -> Tensor:
        """Backward, clip, update, clear. Returns the gradient norm before clipping, a scalar on the device."""
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        self._adam.step()
        self._muon.step()
        for parameter in self._parameters:
            parameter.grad = None
        return norm


def trapezoid(progress: float, warm_share: float, cooldown_share: float, floor: float = 0.02) -> float:
    """Rate scale at a progress of 0..1: up over the warm share, flat, then down to `floor` over the cooldown."""
    if progress < warm_share:
        return max(progress / warm_share, floor)
    if progress < 1 - cooldown_share:
        return 1.0
    return floor + (1 - floor) * max(0.0, (1 - progress) / cooldown_share)


def falling(progress: float, floor: float) -> float:
    """Rate scale that falls linearly from one to `floor`."""
    return max(floor, 1 - progress)
