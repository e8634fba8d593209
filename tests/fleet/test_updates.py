"""Stacked steps of optimizers are those of torch's optimizers."""

import pytest
import torch

from relflat_sk.fleet._updates import find_update

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
    made = _begin(singles, parameters, late)
    settings = [single.param_groups[0] for single in singles]
    kind = find_update(singles[0])
    weights = _stack(parameters)
    gradients = [torch.zeros_like(weight) for weight in weights]
    states = {
        name: _stack([
            [_state(single, parameter, name) for parameter in own]
            for single, own in zip(singles, parameters, strict=True)
        ])
        for name in kind.names(settings[0])
    }
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


def _begin(singles, parameters, late):
    """Make two steps, if a parameter is late in any; return how many each has made."""
    made = torch.full((len(singles), len(SHAPES)), 2.0 if late else 0.0)
    for i, j in late.items():
        made[i, j] = 0
    for single, own, steps in zip(singles, parameters, made, strict=True):
        for _ in range(2):
            for parameter, n in zip(own, steps, strict=True):
                parameter.grad = torch.randn_like(parameter) if n else None
            single.step()
    return made


def _state(optimizer, parameter, name):
    found = optimizer.state[parameter].get(name)
    return torch.zeros_like(parameter) if found is None else found


def _stack(tensors):
    return [torch.stack(own).detach().clone() for own in zip(*tensors, strict=True)]
