"""Exponential moving average of the parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    """Moving average of all parameters in float32, from the initial weights.

    Update t (1, 2, ...) uses min(decay, (1 + t) / (10 + t)): with a constant 0.9999 a run of 20,000 steps would keep 13.5 % of its
    start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(module.named_parameters())
        self.average = {name: p.detach().clone().float() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Take in the parameters after optimizer update number `updates`."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(
            list(self.average.values()), [p.detach().float() for p in self.parameters.values()], 1 - decay
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put back a saved average."""
        for name, value in self.average.items():
            value.copy_(tensors[name])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While inside, the module's parameters are the average."""
        with torch.no_grad():
            own = {name: p.detach().clone() for name, p in self.parameters.items()}
            for name, p in self.parameters.items():
                p.copy_(self.average[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    p.copy_(own[name])
