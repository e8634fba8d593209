"""One trial, one minimum: train a candidate on all the data, measure and record it."""

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from relflat_sk._random import draw_seed
from relflat_sk.minima._table import Minimum
from relflat_sk.search._measure import AUTO, read_objectives
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._storage import check_store
from relflat_sk.search._sweep import OWNER, pruning, this_process
from relflat_sk.search._task import STOPPED, Task, train

SIGNS = {"minimize": 1.0, "maximize": -1.0}  # of an objective, by the direction of its study


class MinimaObjective:
    """Train one candidate per trial, and measure its minimum: for `optuna.Study.optimize`.

    Each trial clones the estimator, sets the parameters that the trial draws and trains on all
    of X. The trial's ``user_attrs`` then hold
    every measure, `train_loss`, `test_loss`, `generalization_gap` and `converged`, and in the
    dict `details` the other values of the table of minima, such as scores, `seconds` and
    `reason`; see `rank_minima`.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes. Each trial trains a clone.
    X : array-like of shape (n, n_features)
        Training data.
    y : array-like of shape (n,) or (n, n_outputs)
        Labels or values.
    space : dict of str to list, distribution of Optuna, or callable
        The values to try, by parameter name: a list of choices, a distribution, or a function
        of the trial; or one function of the trial that returns a dict of parameters. Names that
        begin with ``data__`` vary the training data:
        ``data__train_size`` (number of samples, or their share), ``data__random_labels`` (share
        of the labels that are shuffled), ``data__confusion_size`` (number of further samples,
        with shuffled labels, that are trained on but not measured on) and
        ``data__random_state``. ``"lr_scaling": ["linear"]`` scales learning rates in proportion to
        the batch size, ``"sqrt"`` to its square root, relative to the estimator's own batch size;
        the scaled rates are recorded as ``param_scaled_...``.
    measures : sequence of str, callable or FlatnessScorer, default=("relative_flatness",)
        Names of measures, functions or scorers, as in `FlatMinimaSearch`. Each is an objective of
        the study; ``"train_loss"`` can be another.
    direction : {"minimize", "maximize"}, default="minimize"
        The direction of the study. With "maximize" the objective is minus the measure.
    X_test : array-like of shape (n_test, n_features), optional
        Held-out data. Losses and scores on it are recorded, and never used to choose.
    y_test : array-like of shape (n_test,) or (n_test, n_outputs), optional
        Labels or values of the held-out data; None for a Dataset that has them inside.
    artifact_store : str, path or optuna artifact store, optional
        Where the weights of every minimum are saved; a path is a folder. Each file is a
        `state_dict` that ``torch.load(..., weights_only=True)`` reads. The user attribute
        `artifact_id` of a trial identifies its file.
    goal : "auto", float or None, default="auto"
        What nets train to that have no `StopAtLoss` or `StopAtGradientNorm` of their own, see
        `FlatMinimaSearch`.
    random_state : int, RandomState or None, default=None
        Seeds every `random_state` of the estimator that is None, and torch while a candidate
        trains. Each combination of parameters always has the same seed of its own. If None, each
        trial has a seed of its own from torch's random state. Trials record these seeds.
    n_threads : int or None, default=1
        CPU threads that train and measure a candidate; None for torch's own number.
    fit_params : dict, optional
        Arguments of the estimator's `fit`, such as ``{"sample_weight": weights}``. Measures use the
        weights.

    Raises
    ------
    TypeError
        If `estimator`, `space` or `artifact_store` is of the wrong kind.
    ValueError
        If an argument is not valid, or a name in the space is not a parameter.

    See Also
    --------
    FlatMinimaSearch : Runs such trials and predicts with the minima.
    rank_minima : Rank the trials of a study.

    Notes
    -----
    A network that diverged, or is no better than a constant prediction, fails its trial without
    an exception. Exceptions during training are recorded and raised: pass ``catch=(Exception,)``
    to ``study.optimize`` if the study should go on. With Optuna 4, ``study.best_trial`` may be a
    network that did not converge; `rank_minima` ranks those last.

    Each network trains on all of X: skorch's default `train_split` is dropped, another one and the
    `early_stopping` of scikit-learn's estimators are refused.

    ``study.enqueue_trial`` takes choices as they are in the space, or their labels; of objects that
    a database cannot store, only the labels, such as ``"[StopAtLoss(0.3)]"``.

    Processes and machines share a study if each calls ``study.optimize`` with the same storage.

    The jobs of ``study.optimize(objective, n_jobs=2)`` are threads and take turns.

    Examples
    --------
    >>> import optuna
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> X, y = load_iris(return_X_y=True)
    >>> objective = MinimaObjective(
    ...     LogisticRegression(max_iter=1000), X, y, {"C": [0.01, 1.0]}
    ... )
    >>> grid = optuna.samplers.GridSampler({"C": [0.01, 1.0]}, seed=0)
    >>> study = optuna.create_study(sampler=grid)
    >>> study.optimize(objective)
    >>> study.best_params
    {'C': 0.01}
    """

    def __init__(  # noqa: PLR0913
        self,
        estimator: Any,
        X: Any,
        y: Any,
        space: Any,
        *,
        measures: Any = ("relative_flatness",),
        direction: str = "minimize",
        X_test: Any = None,
        y_test: Any = None,
        artifact_store: Any = None,
        goal: Any = AUTO,
        random_state: Any = None,
        n_threads: int | None = 1,
        fit_params: Mapping[str, Any] | None = None,
    ) -> None:
        if direction not in SIGNS:
            raise ValueError(f"direction must be one of {list(SIGNS)}, got {direction!r}.")
        measuring = read_objectives(measures)
        task = Task(estimator, X, y, X_test, y_test, measuring, goal, n_threads, fit_params)
        seed = None if random_state is None else draw_seed(random_state)
        self.recipe = Recipe(task, space, artifact_store, seed)
        self.direction = direction
        self._checked: set[str] = set()  # names of studies

    def __call__(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        """Train and measure one candidate."""
        recipe, space = self.recipe, self.recipe.space
        study = getattr(trial, "study", None)
        if study is not None and study.study_name not in self._checked:
            recipe.check_study(study, direction=self.direction, current=trial.number)
            check_store(recipe.store)
            self._checked.add(study.study_name)
        trial.set_user_attr(OWNER, this_process())
        minimum, params = Minimum(), dict[str, Any]()
        try:
            params = space.suggest(trial)
        except Exception as error:
            minimum.fail(error)
            minimum.write(trial)
            raise
        minimum, trained = train(recipe.task, params, recipe.seed_of(trial), pruning(trial))
        recipe.record(trial, params, minimum, trained)
        if minimum.error is not None:
            raise minimum.error
        if minimum.reason == STOPPED:
            raise optuna.TrialPruned
        values = tuple(SIGNS[self.direction] * value for value in minimum.values)
        return values[0] if len(values) == 1 else values

    def get_parameters(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a trial drew, in place of the labels that its study stores.

        Parameters
        ----------
        trial : optuna.trial.FrozenTrial
            A trial of the study, such as ``study.best_trial``.

        Returns
        -------
        dict
            For the estimator's `set_params`; ``data__`` and ``lr_scaling`` are the search's own.

        Examples
        --------
        >>> import optuna
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.neural_network import MLPClassifier
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> X, y = load_iris(return_X_y=True)
        >>> net = MLPClassifier(max_iter=2000)
        >>> objective = MinimaObjective(net, X, y, {"hidden_layer_sizes": [(4,), (8, 8)]})
        >>> study = optuna.create_study()
        >>> study.enqueue_trial({"hidden_layer_sizes": (8, 8)})
        >>> study.optimize(objective, n_trials=1)
        >>> study.best_params, objective.get_parameters(study.best_trial)
        ({'hidden_layer_sizes': '(8, 8)'}, {'hidden_layer_sizes': (8, 8)})
        """
        return self.recipe.space.values(trial)

    def get_estimator(self, trial: FrozenTrial) -> Any:
        """Return the estimator of a finished trial, fitted.

        Parameters
        ----------
        trial : optuna.trial.FrozenTrial
            A trial that was trained to its end, such as ``study.best_trial``.

        Returns
        -------
        estimator
            Restored from its saved weights (`artifact_store`), or trained again with its seed.

        Raises
        ------
        ValueError
            If the trial has no network, or training again leads to another training loss.
        """
        return self.recipe.estimator_of(trial, trial.number)
