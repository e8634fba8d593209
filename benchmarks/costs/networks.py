"""Passes and seconds of flatness at layers of networks of torchvision, timm and transformers.

python -m benchmarks.costs.networks                    # about an hour on one core
python -m benchmarks.costs.networks --only gpt2,swin   # some of them
python -m benchmarks.costs.networks --quick            # a smoke run without verdict

The networks are small members of their families. They are built from configurations, without
weights of others, and trained on handwritten digits or on the text of a Python module.

A pass is a call of `torch.autograd.grad` on each batch. The calls are counted from outside of the
library, with its checks of the first batch. Seconds are processor time.
"""

import argparse
import importlib
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks._harness.peers import MissingPeer
from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import FlatnessWarning, relative_flatness
from relflat_sk._network.layers import weight_layers

CRITERION = nn.CrossEntropyLoss()
RTOL, MAX_PASSES = 0.1, 50
N_CLASSES, SIDE, LENGTH, N_CHARACTERS = 10, 32, 32, 128
Data = tuple[Tensor, Tensor]


# -- data ----------------------------------------------------------------------------------


def images(n: int) -> Data:
    """Enlarge handwritten digits: (n, 3, 32, 32)."""
    digits = load_digits()
    X = torch.tensor(digits.data[:n]).float().reshape(-1, 1, 8, 8) / 8 - 1
    X = nn.functional.interpolate(X, size=SIDE, mode="bilinear").expand(-1, 3, -1, -1)
    return X.contiguous(), torch.tensor(digits.target[:n])


def pixels(n: int) -> Data:
    """Give handwritten digits as sequences of 64 pixels, each one of 17 tokens."""
    digits = load_digits()
    return torch.tensor(digits.data[:n]).long(), torch.tensor(digits.target[:n])


def text(n: int) -> Data:
    """Cut a module's source into sequences of characters, with the next ones as labels."""
    source = torch.tensor(list(inspect.getsource(argparse).encode())).clamp_max(N_CHARACTERS - 1)
    most = (len(source) - 1) // LENGTH
    rows = torch.arange(n)[:, None] % most * LENGTH + torch.arange(LENGTH)
    return source[rows], source[rows + 1]


# -- networks ------------------------------------------------------------------------------


class Logits(nn.Module):
    """A model of transformers that returns its logits, with the classes of tokens on axis 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits."""
        logits: Tensor = self.model(x).logits
        return logits.transpose(1, 2) if logits.ndim == 3 else logits


def _load(package: str) -> Any:
    """Import a library of networks."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        raise MissingPeer(
            f"{package} cannot be imported ({error}): pip install -e '.[networks]'"
        ) from error


def _vision(make: Callable[[Any], nn.Module], package: str = "torchvision") -> Callable[..., Any]:
    return lambda: (make(_load(package)), images)


def _convnext(tv: Any) -> nn.Module:
    blocks = [(24, 48, 1), (48, 96, 1), (96, 192, 2), (192, None, 1)]
    settings = [tv.models.convnext.CNBlockConfig(*block) for block in blocks]
    return tv.models.ConvNeXt(settings, num_classes=N_CLASSES)


def _swin(tv: Any) -> nn.Module:
    return tv.models.SwinTransformer(
        [2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=N_CLASSES, stochastic_depth_prob=0.0
    )


def _vit(tv: Any) -> nn.Module:
    return tv.models.VisionTransformer(SIDE, 4, 2, 4, 64, 128, num_classes=N_CLASSES)


def _timm(name: str, **options: Any) -> Callable[..., Any]:
    return _vision(lambda timm: timm.create_model(name, num_classes=N_CLASSES, **options), "timm")


def _nfnet(timm: Any) -> nn.Module:
    config = timm.models.nfnet.NfCfg(
        (1, 1, 1, 1), (32, 64, 96, 128), group_size=8, bottle_ratio=0.25
    )
    return timm.models.nfnet.NormFreeNet(config, num_classes=N_CLASSES)


def _mixer(timm: Any) -> nn.Module:
    return timm.models.mlp_mixer.MlpMixer(
        num_classes=N_CLASSES, img_size=SIDE, patch_size=4, num_blocks=2, embed_dim=64
    )


def _weight_norm(timm: Any) -> nn.Module:
    mixer = _mixer(timm)
    for part in list(mixer.blocks.modules()):  # the head starts at 0, which has no direction
        if isinstance(part, nn.Linear):
            nn.utils.parametrizations.weight_norm(part)
    return mixer


_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_HEADS = {"num_key_value_heads": 2}  # grouped-query attention


def _model(kind: str, data: Callable[[int], Data], **options: Any) -> Callable[..., Any]:
    def make() -> tuple[nn.Module, Callable[[int], Data]]:
        transformers = _load("transformers")
        configuration = transformers.AutoConfig.for_model(kind, **options)
        heads = {pixels: "AutoModelForSequenceClassification", text: "AutoModelForCausalLM"}
        return Logits(getattr(transformers, heads[data]).from_config(configuration)), data

    return make


_PIXELS = {"vocab_size": 17, "num_labels": N_CLASSES, "max_position_embeddings": 64}
_TEXT = {"vocab_size": N_CHARACTERS, "bos_token_id": None, "eos_token_id": None,
         "pad_token_id": None}  # fmt: skip
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Callable[[int], Data]]]] = {
    "resnet18": _vision(lambda tv: tv.models.resnet18(num_classes=N_CLASSES)),
    "mobilenet_v3_small": _vision(lambda tv: tv.models.mobilenet_v3_small(num_classes=N_CLASSES)),
    "efficientnet_b0": _vision(lambda tv: tv.models.efficientnet_b0(num_classes=N_CLASSES)),
    "shufflenet_v2": _vision(lambda tv: tv.models.shufflenet_v2_x0_5(num_classes=N_CLASSES)),
    "regnet_y": _vision(lambda tv: tv.models.regnet_y_400mf(num_classes=N_CLASSES)),
    "convnext": _vision(_convnext),
    "swin": _vision(_swin),
    "vit": _vision(_vit),
    "nfnet": _vision(_nfnet, "timm"),
    "mixer": _vision(_mixer, "timm"),
    "weight_norm": _vision(_weight_norm, "timm"),
    "levit": _timm("levit_128s", img_size=SIDE),
    "deit": _timm(
        "deit_tiny_patch16_224", img_size=SIDE, patch_size=4, depth=2, embed_dim=48, num_heads=3
    ),
    "convnextv2": _timm("convnextv2_atto", depths=(1, 1, 2, 1), dims=(20, 40, 80, 160)),
    "bert": _model("bert", pixels, **_SIZE, **_PIXELS, intermediate_size=128),
    "distilbert": _model(
        "distilbert", pixels, **_PIXELS, dim=64, n_layers=2, n_heads=4, hidden_dim=128
    ),
    "gpt2": _model("gpt2", text, **_TEXT, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4),
    "llama": _model("llama", text, **_SIZE, **_HEADS, **_TEXT, intermediate_size=172),
    "qwen2": _model(
        "qwen2", text, **_SIZE, **_HEADS, **_TEXT, intermediate_size=172, tie_word_embeddings=True
    ),
    "mistral": _model(
        "mistral", text, **_SIZE, **_HEADS, **_TEXT, intermediate_size=172, sliding_window=8
    ),
    "gpt_neox": _model("gpt_neox", text, **_SIZE, **_TEXT, intermediate_size=128),
}  # fmt: skip


def train(model: nn.Module, X: Tensor, y: Tensor, n_steps: int) -> float:
    """Take some steps of AdamW, in batches of 32; return the mean loss."""
    torch.manual_seed(0)
    for part in model.modules():  # running means that follow so few steps
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.momentum = 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model.train()
    for _ in range(n_steps):
        rows = torch.randint(len(X), (32,))
        optimizer.zero_grad()
        CRITERION(model(X[rows]), y[rows]).backward()
        optimizer.step()
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = [
            CRITERION(model(x), t) * len(x) for x, t in zip(X.split(64), y.split(64), strict=True)
        ]
    return float(sum(parts)) / len(X)


# -- measuring -----------------------------------------------------------------------------


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Count the calls of `torch.autograd.grad`."""
    calls, grad = [0], torch.autograd.grad

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return grad(*args, **kwargs)

    torch.autograd.grad = counting
    try:
        yield calls
    finally:
        torch.autograd.grad = grad


def measure_layers(model: nn.Module, X: Tensor, y: Tensor, batch_size: int) -> Iterator[list[Any]]:
    """Measure flatness at the first layer, one in the middle, and the last but one."""
    n_layers = len(weight_layers(model))
    for layer in (0, n_layers // 2, -2):
        start = time.process_time()
        with counted_passes() as calls, warnings.catch_warnings():
            warnings.simplefilter("ignore", FlatnessWarning)
            try:
                value, stderr = relative_flatness(
                    model, X, y, layer=layer, criterion=CRITERION, batch_size=batch_size,
                    rtol=RTOL, max_passes=MAX_PASSES, random_state=0, return_stderr=True,
                )  # fmt: skip
            except ValueError as error:
                yield [layer, "", "", "", "", str(error)[:80]]
                continue
        n_passes = calls[0] / -(-len(X) // batch_size)
        seconds = time.process_time() - start
        share = abs(stderr / value) if stderr else 0.0
        yield [layer, f"{value:.3g}", share, n_passes, f"{seconds:.1f}", ""]


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--only", default=",".join(NETWORKS), help="names, with commas")
    parser.add_argument("--n-samples", type=int, help="samples (default: 512)")
    parser.add_argument("--steps", type=int, help="steps of training (default: 150)")
    arguments = parser.parse_args()
    n = arguments.n_samples or (64 if arguments.quick else 512)
    n_steps = arguments.steps or (3 if arguments.quick else 150)
    batch_size = 32 if arguments.quick else 64
    print(f"trained {n_steps} steps and measured on {n} samples in batches of {batch_size},")
    print(f"rtol={RTOL:g}, max_passes={MAX_PASSES}")
    print(environment())
    rows = [["network", "loss", "layer", "kappa", "stderr / kappa", "passes", "seconds", "refused"]]
    reached = tried = 0
    for name in arguments.only.split(","):
        torch.manual_seed(0)
        model, data = NETWORKS[name]()
        X, y = data(n)
        loss = train(model, X, y, n_steps)
        for layer, value, share, n_passes, *rest in measure_layers(model, X, y, batch_size):
            tried += 1
            reached += share != "" and share <= RTOL
            cells = ["", ""] if share == "" else [f"{share:.1%}", f"{n_passes:.1f}"]
            rows.append([name, f"{loss:.3f}", str(layer), value, *cells, *rest])
            print(*rows[-1], flush=True)
    print(f"\n{table(rows)}")
    share = Budget(
        f"share of layers with a standard error of {RTOL:.0%}", reached / tried, 0.9, at_least=True
    )
    return verdict([share], judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
