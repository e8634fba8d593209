"""Stacked steps of optimizers are those of torch's optimizers."""

import pytest
import torch

from relflat_sk.ensemble._updates import OPTIMIZERS

SHAPES = [(4, 3), (4,), (2, 4)]
SETTINGS = {
    torch.optim.SGD: [
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.03, "momentum": 0.5, "weight_decay": 0.1, "dampening": 0.2},
        {"lr": 0.2, "momentum": 0.9, "nesterov": True},
    ],
    torch.optim.Adam: [
        {"lr": 0.1},
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3},
    ],
    torch.optim.AdamW: [{"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.01}, {"lr": 0.01}],
}
SETTINGS[torch.optim.SGD, "plain"] = [{"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.1}]


@pytest.mark.parametrize("case", SETTINGS, ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("late", [{}, {0: 0, 1: 2}], ids=["all", "late"])
def test_steps_are_those_of_torch(case, fused, late):
    """`late` has members by number, with a parameter each that they train later than others."""
    torch.manual_seed(0)
    optimizer = case[0] if isinstance(case, tuple) else case
    members = SETTINGS[case]
    k = len(members)
    parameters = [
        [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]
        for _ in range(k)
    ]
    singles = [optimizer(ps, **one) for ps, one in zip(parameters, members, strict=True)]
    if late:
        for i, single in enumerate(singles):
            for j, parameter in enumerate(parameters[i]):
                parameter.grad = None if late.get(i) == j else torch.randn_like(parameter)
            single.step()
            single.step()
    settings = [single.param_groups[0] for single in singles]
    kind = OPTIMIZERS[optimizer]
    weights = [torch.stack(own).detach() for own in zip(*parameters, strict=True)]
    gradients = [torch.zeros_like(weight) for weight in weights]
    states = {
        name: [
            torch.stack([
                _state(singles[i], parameters[i][j], name, torch.zeros(shape, dtype=torch.float64))
                for i in range(k)
            ])
            for j, shape in enumerate(SHAPES)
        ]
        for name in kind.names(settings[0])
    }
    made = torch.full((k, len(SHAPES)), 2.0 * bool(late))
    for i, j in late.items():
        made[i, j] = 0
    states["step"] = [made]
    for _ in range(3):  # epochs
        update = kind(weights, gradients, states, settings, fused)
        for _ in range(4):
            for gradient in gradients:
                gradient.normal_()
            for i, single in enumerate(singles):
                for parameter, gradient in zip(parameters[i], gradients, strict=True):
                    parameter.grad = gradient[i].clone()
                single.step()
            update.step()
    for j, weight in enumerate(weights):
        for i in range(k):
            torch.testing.assert_close(weight[i], parameters[i][j].detach(), rtol=0, atol=1e-12)


def _state(optimizer, parameter, name, default):
    found = optimizer.state[parameter].get(name)
    return default if found is None else found.clone()
