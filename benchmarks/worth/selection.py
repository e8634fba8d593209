"""Compare ways to choose among candidates: what a choice without held-out data is worth.

On each data set and split, about 60 candidates are trained in each of two spaces:

equal   one architecture, trained to one loss: batch sizes, learning rates and seeds differ
mixed   widths, depths, weight decays, dropouts, epochs, batch sizes and rates differ

Each way of `benchmarks._harness.ways` chooses one of them, or five, whose predictions are averaged.
The regret is the test error of the choice minus that of the best candidate, in points of accuracy,
or of R2. Candidates that diverged, or have hardly learned, are excluded for all ways alike.
"""

import os
import time
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from sklearn.model_selection import KFold, StratifiedKFold

from benchmarks._harness import stacked
from benchmarks._harness.data import cache_folder
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.rivals import RIVALS
from benchmarks._harness.tasks import SPACES, TASKS, Split, candidates, constant_loss
from benchmarks._harness.timing import environment
from benchmarks._harness.ways import FORMS, SHARES, Fits, judge_all, test_errors
from benchmarks.worth import selection_report
from relflat_sk import flatness_report

RESULTS = Path(__file__).parents[1] / "results" / "selection.csv"
KEY = ["data", "space", "split"]
# measures of the library: those of the last layer's curvature, others, and those that take long
MEASURES = {
    "core": (
        "relative_flatness", "normalized_relative_flatness", "trace_flatness", "hessian_trace",
        "neuron_flatness_max", "neuron_flatness_sum", "gradient_norm", "whitened_flatness",
    ),
    "norms": (
        "eigenvalue_flatness", "hessian_max_eigenvalue", "fisher_rao_norm", "l2_norm",
        "frobenius_product", "group_norm_product", "spectral_product", "l1_path_norm",
        "l2_path_norm", "l2_lipschitz_product", "linf_lipschitz_product", "parameter_count",
        "soft_rank", "stable_rank", "spectral_exponent",
    ),
    "dear": (
        "adaptive_sharpness", "expected_sharpness", "keskar_sharpness", "network_flatness",
        "joint_eigenvalue_flatness", "pac_bayes_flatness", "pac_bayes_magnitude_flatness",
    ),
    "heads": (),
}  # fmt: skip
OF_CLASSES = {
    "norms": ("inverse_margin", "log_robustness", "calibration_error", "takeuchi_criterion"),
    "heads": (
        "leave_one_out", "leave_one_out_at_equal_loss", "laplace_evidence", "davies_bouldin",
        "within_scatter", "label_wise_mixup", "gradient_weight_alignment",
    ),
}  # fmt: skip
NOISE = 0.6  # in standard deviations, of the inputs on which candidates are compared
N_NOISY = 2000
# what is trained or measured, with the folds that are held out and their number
FOLDS = {"20%": (0, 1, 5), "5%": (0, 1, 20), "5-fold": (1, 5, 5), "10-fold": (0, 10, 10)}
# parts of the work, the cheap ones first, with a way that tells that a part is done
PARTS = {
    "held out": "5%, log loss",
    "5-fold": "5-fold, log loss, refit",
    "norms": "stable_rank",
    "heads": "davies_bouldin",
    "10-fold": "10-fold, log loss, refit",
    "dear": "keskar_sharpness",
}
# the folds that a part needs
NEEDS = {"held out": ("20%", "5%"), "5-fold": ("20%", "5-fold"), "10-fold": ("10-fold",)}


@dataclass(frozen=True)
class Unit:
    """One split of one data set with the candidates of one space, and its stored networks."""

    data: str
    space: str
    number: int
    images: str | None
    store: Path
    n_candidates: int | None = None

    @cached_property
    def split(self) -> Split:
        """The training and test data."""
        return TASKS[self.data].split(self.number, self.images)

    @cached_property
    def candidates(self) -> list[stacked.Candidate]:
        """The settings of all candidates."""
        goal = TASKS[self.data].goal * constant_loss(self.split.y)
        return candidates(self.space, self.number, goal)[: self.n_candidates]

    def path(self, part: str) -> Path:
        """Return the file of a part of the work."""
        name = f"{self.data}-{self.space}-{self.number}-{part}".replace(" ", "_")
        return self.store / f"{name}.pt"

    def load(self, part: str, compute: Any) -> Any:
        """Return a part of the work from its file, or compute and store it."""
        path = self.path(part)
        if path.exists():
            return torch.load(path, weights_only=False)
        found = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        torch.save(found, partial)
        partial.replace(path)
        return found

    # -- training and measuring -----------------------------------------------------------

    def outcome(self, part: str, nets: list[stacked.Weights] | None = None) -> Any:
        """Return what training gives, of `nets` if these are given.

        Of "all" training data these are the networks; of folds, the sums of held-out losses and
        errors, the number of samples, and the networks of a single fold.
        """

        def compute() -> Any:
            trained = stacked.train(*self.fits(part)) if nets is None else nets
            return trained if part == "all" else self._hold_out(part, trained)

        return self.load(part, compute)

    def fits(self, part: str, device: str = "cpu") -> tuple[list[stacked.Candidate], list[Any]]:
        """Return what is trained for a part of the work: candidates, and the data of each."""
        X, y = self.split.X.to(device), self.split.y.to(device)
        if part == "all":
            return self.candidates, [(X, y)] * len(self.candidates)
        data = [(X[rows], y[rows]) for rows, _ in self.folds(part)]
        return self.candidates * len(data), [part for part in data for _ in self.candidates]

    def folds(self, part: str) -> list[tuple[Any, Any]]:
        """Return the rows to train on and to hold out, of each fold of a part of the work."""
        first, last, n = FOLDS[part]
        y = self.split.y
        kind = KFold if y.is_floating_point() else StratifiedKFold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class with fewer samples than folds
            cv = kind(n, shuffle=True, random_state=self.number).split(self.split.X, y)
            return [tuple(map(torch.as_tensor, rows)) for rows in cv][first:last]

    def _hold_out(self, part: str, nets: list[stacked.Weights]) -> dict[str, Any]:
        """Judge the networks of all folds in turn on what they have not seen."""
        (X, y), k, folds = (self.split.X, self.split.y), len(self.candidates), self.folds(part)
        losses, errors, count = np.zeros(k), np.zeros(k), 0
        for i, (_, rows) in enumerate(folds):
            for j, weights in enumerate(nets[i * k : (i + 1) * k]):
                z = apply(weights, X[rows])
                losses[j] += len(rows) * stacked.mean_losses(z[None], y[rows][None]).item()
                wrong = (z[:, 0] - y[rows]).square() if y.is_floating_point() else (
                    z.argmax(1) != y[rows])  # fmt: skip
                errors[j] += wrong.sum().item()
            count += len(rows)
        return {"losses": losses, "errors": errors, "n": count,
                "nets": nets if len(folds) == 1 else None}  # fmt: skip

    def measures(self, part: str) -> pd.DataFrame:
        """Return the library's measures of all networks, one column each."""

        def compute() -> pd.DataFrame:
            if part == "equal-loss":
                names = [name for name, _ in FORMS.values()]
                tables = {share: self._measure(names, share) for share in SHARES}
                return pd.concat([found.add_suffix(f" at {share:g}")
                                  for share, found in tables.items()], axis=1)  # fmt: skip
            is_regression = self.split.y.is_floating_point()
            return self._measure(
                MEASURES[part] + (() if is_regression else OF_CLASSES.get(part, ()))
            )

        return self.load(f"{part}-measures", compute)

    def _measure(self, names: Sequence[str], at_loss: float | None = None) -> pd.DataFrame:
        rows = []
        for weights in self.outcome("all"):
            report = pd.DataFrame({"measure": names, "value": np.nan})
            if apply(weights, self.split.X).abs().max() < 1e30:  # it has not diverged
                report = flatness_report(
                    stacked.to_module(weights), self.split.X, self.split.y,
                    measures=[RIVALS.get(name, name) for name in names],
                    layers=-1, criterion=stacked.criterion_of(self.split.y), at_loss=at_loss,
                )  # fmt: skip
            rows.append(dict(zip(report["measure"], report["value"], strict=True)))
        return pd.DataFrame(rows)

    # -- judging --------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Judge all ways that the stored parts allow."""
        split, nets = self.split, self.outcome("all")
        z = [apply(weights, split.X) for weights in nets]
        losses = np.array([stacked.mean_losses(one[None], split.y[None]).item() for one in z])
        constant = constant_loss(split.y)
        limit = TASKS[self.data].goal * 1.001 if self.space == "equal" else TASKS[self.data].worst
        of_test = [array(apply(weights, split.X_test)) for weights in nets]
        fits = Fits(
            split.y.numpy(), split.y_test.numpy(), losses, constant,
            outputs=[array(one) for one in z],
            test_outputs=of_test,
            noisy_outputs=[array(apply(weights, self.noisy_inputs())) for weights in nets],
            widths=np.array([weights[-2].shape[0] for weights in nets]),
            converged=(losses <= limit * constant)
            & np.isfinite(test_errors(of_test, split.y_test.numpy())),
            measures=pd.concat(
                [self.measures(part) for part in ("equal-loss", *MEASURES)
                 if self.path(f"{part}-measures").exists()], axis=1),
        )  # fmt: skip
        for part in FOLDS:
            if self.path(part).exists():
                fits.held_out[part] = self._scores(part)
        judged = judge_all(fits, self.number)
        key = dict(zip(KEY, (self.data, self.space, self.number), strict=True))
        key["converged"] = int(fits.converged.sum())
        return [key | {"way": way} | found for way, found in judged.items()]

    def noisy_inputs(self) -> torch.Tensor:
        """Draw training inputs with noise."""
        generator = torch.Generator().manual_seed(self.number)
        rows = torch.randint(len(self.split.X), (N_NOISY,), generator=generator)
        x = self.split.X[rows]
        return x + NOISE * torch.randn(x.shape, generator=generator)

    def _scores(self, part: str) -> Any:
        found = [self.outcome(one) for one in ((part, "20%") if part == "5-fold" else (part,))]
        n = sum(one["n"] for one in found)
        nets = found[0]["nets"]
        return (
            sum(one["losses"] for one in found) / n,
            sum(one["errors"] for one in found) / n,
            nets and [array(apply(weights, self.split.X_test)) for weights in nets],
        )

    def do(self, part: str) -> list[dict[str, Any]]:
        """Do a part of the work, and judge all that is done."""
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of networks that are excluded
            self.measures("equal-loss")
            for one in {"core", part} & MEASURES.keys():
                self.measures(one)
            for one in NEEDS.get(part, ()):
                self.outcome(one)
            return self.rows()


def apply(weights: stacked.Weights, X: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one network."""
    return stacked.outputs([part[None] for part in weights], X[None])[0]


def array(tensor: torch.Tensor) -> Any:
    """Return a tensor as an array in float64."""
    return tensor.double().numpy()


# -- the study ------------------------------------------------------------------------------


def schedule(arguments: Namespace, store: Path) -> Iterator[tuple[Unit, str]]:
    """Yield the work in its order: part by part, and split by split all data sets."""
    few = 12 if arguments.quick else None
    parts = ["held out"] if arguments.quick else arguments.parts
    steps = product(parts, range(arguments.splits), arguments.only, arguments.space)
    for part, number, name, space in steps:
        has_images = arguments.data or not TASKS[name].needs_images
        if has_images and not (part == "heads" and name in selection_report.REGRESSIONS):
            yield Unit(name, space, number, arguments.data, store, few), part


def read(path: Path) -> pd.DataFrame:
    columns = [*KEY, "converged", "way", "error", "regret", "top5", "tau", "cost"]
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)


def store_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the rows of a unit in place of older ones."""
    new, old = pd.DataFrame(rows).round(3), read(path)
    same = (old[KEY].astype(str) == new[KEY].astype(str).iloc[0]).all(axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [part for part in (old[~same], new) if len(part)]
    partial = path.with_suffix(".partial")
    pd.concat(parts).sort_values(KEY, kind="stable").to_csv(partial, index=False)
    partial.replace(path)


def is_done(rows: pd.DataFrame, unit: Unit, part: str) -> bool:
    """Tell whether the rows hold a part of a unit's work."""
    is_own = (rows[KEY] == [unit.data, unit.space, unit.number]).all(axis=1)
    return PARTS[part] in set(rows.loc[is_own, "way"])


def train_together(units: Sequence[Unit], parts: Sequence[str], device: str) -> None:
    """Train the candidates of several splits of one data set in the same steps, and store them.

    A GPU takes as long for the steps of a thousand small networks as for those of a few. Dropout
    draws for all at once: with it, the networks are others than those of splits trained alone.
    """
    torch.set_num_threads(1)
    for part in parts:
        missing = [unit for unit in units if not unit.path(part).exists()]
        if not missing:
            continue
        candidates, data = zip(*(unit.fits(part, device) for unit in missing), strict=True)
        nets = iter(stacked.train([*chain(*candidates)], [*chain(*data)]))
        for unit, own in zip(missing, candidates, strict=True):
            unit.outcome(part, [*islice(nets, len(own))])
        print(f"{units[0].data}, {units[0].space}, {part}: {len(missing)} splits", flush=True)


def study(arguments: Namespace, store: Path) -> None:
    rows = read(arguments.results)
    work = [
        (unit, part)
        for unit, part in schedule(arguments, store)
        if (part == "held out" and unit.path("all").exists() if arguments.again
            else not is_done(rows, unit, part))
    ]  # fmt: skip
    if arguments.device != "cpu" and not arguments.again:
        together = defaultdict(dict)
        for unit, _ in work:
            together[unit.data, unit.space][unit.number] = unit
        parts = dict.fromkeys(chain(["all"], *(NEEDS.get(part, ()) for _, part in work)))
        Parallel(n_jobs=arguments.processes)(
            delayed(train_together)([*units.values()], [*parts], arguments.device)
            for units in together.values()
        )
    jobs = (delayed(timed)(unit, part) for unit, part in work)
    done = Parallel(n_jobs=arguments.processes, return_as="generator")(jobs)
    for (unit, part), (found, seconds) in zip(work, done, strict=True):
        store_rows(arguments.results, found)
        print(f"{unit.data}, {unit.space}, split {unit.number}, {part}: {seconds:.0f} s of "
              f"processor time, {found[0]['converged']} candidates", flush=True)  # fmt: skip


def timed(unit: Unit, part: str) -> tuple[list[dict[str, Any]], float]:
    """Do a part of the work, and count its processor time."""
    start = time.process_time()
    return unit.do(part), time.process_time() - start


def main() -> int:
    arguments = read_options(
        __doc__, only=TASKS, space=dict.fromkeys(SPACES), parts=PARTS, splits=20, processes=1,
        device="cpu", results=RESULTS, store=cache_folder() / "selection", report=False,
        again=False, figure=str, data=IMAGES,
    )  # fmt: skip
    store = arguments.store
    if arguments.quick:
        arguments.only, arguments.splits = ["wine"], 1
        if arguments.results == RESULTS:
            arguments.results = store / "quick" / "selection.csv"
        store /= "quick"
    print(environment())
    if not arguments.report:
        study(arguments, store)
    rows = read(arguments.results)
    rows = rows[rows["data"].isin(arguments.only)]
    selection_report.report(rows, arguments.figure)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
