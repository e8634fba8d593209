"""Search for flat minima: train every candidate on all the data, rank and average them."""

import copy
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler, NSGAIIISampler, NSGAIISampler, TPESampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from sklearn import get_config
from sklearn.base import BaseEstimator, MetaEstimatorMixin
from sklearn.utils import get_tags
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from skorch.callbacks import Checkpoint
from tqdm import tqdm

from relflat_sk._checks import check_integer, check_kind, check_number, warn
from relflat_sk._random import as_random_state, draw_seed
from relflat_sk.fleet._fleet import fleet_size
from relflat_sk.minima import rank_minima
from relflat_sk.minima._table import Minimum
from relflat_sk.search._measure import Measuring, callbacks_of, read_objectives
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._report import render, render_short
from relflat_sk.search._results import (
    NO_WEIGHTS,
    average,
    candidate_table,
    check_nearest,
    check_table,
    cv_results,
    has_mean,
    is_averaged,
    nearest,
    trial_at,
    warn_if_few_fit,
)
from relflat_sk.search._space import Space
from relflat_sk.search._storage import (
    check_store,
    open_storage,
    quiet_log,
    root_of,
    without_password,
)
from relflat_sk.search._sweep import Candidates, SearchStudy, n_processes, owned, sweep
from relflat_sk.search._task import Task, Trained, nets_of

MEAN = "mean"  # of the predictions of all networks that have learned
NEAREST = "nearest"  # to this mean, on noisy inputs
# attributes of what the search predicts with that the search has as well
_OF_PREDICTOR = ("classes_", "n_features_in_", "feature_names_in_")
_PREDICTORS = ("best_estimator_", "ensemble_")


def check_arguments(search: Any) -> None:
    """Refuse arguments of a search that are not valid, before anything is trained."""
    check_integer("n_trials", search.n_trials, minimum=1, optional=True)
    if search.fleet is not None:
        fleet_size(search.fleet)
    if not isinstance(search.refit, bool | np.bool_) and search.refit not in (MEAN, NEAREST):
        raise ValueError(f"refit must be True, False, 'mean' or 'nearest', got {search.refit!r}.")
    for name, kind in (("sampler", BaseSampler), ("pruner", BasePruner)):
        value = getattr(search, name)
        fits = value is None or isinstance(value, kind)
        check_kind(fits, name, value, f"an optuna {name} or None")
    if search.study_name is not None and search.storage is None:
        raise ValueError(
            f"study_name={search.study_name!r} needs a storage, such as storage='minima.db'."
        )
    if not n_processes(search.n_jobs):
        return
    if search.pruner is not None:
        raise ValueError(f"a pruner needs n_jobs=1, got {search.n_jobs}: workers know no study.")
    checkpoints = [x for net in nets_of(search.estimator) for x in callbacks_of(net, Checkpoint)]
    if any(getattr(checkpoint, "load_best", False) for checkpoint in checkpoints):
        raise ValueError(
            f"Checkpoint(load_best=True) needs n_jobs=1, got {search.n_jobs}: all share its file."
        )


def _plan(search: Any, space: Space, seed: int | None) -> tuple[list[dict[str, Any]] | None, int]:
    """Return the combinations of choices to train, or None for draws, and the number of trials.

    Some of a grid are a random sample of it.
    """
    grid = space.grid() if search.sampler is None else None
    n_trials = len(grid or []) if search.n_trials is None else int(search.n_trials)
    if not n_trials:
        raise ValueError("n_trials is needed with a sampler, and for a space without a grid.")
    if grid is not None and n_trials < len(grid):
        grid = [grid[i] for i in np.random.RandomState(seed).permutation(len(grid))]
    return grid, n_trials if grid is None else min(n_trials, len(grid))


def progress(trials: Iterable[FrozenTrial]) -> str:
    """Count the candidates that are finished, and name the flattest."""
    counts, minima = Counter[str](), []
    for trial in trials:
        minimum = Minimum.from_trial(trial)
        if trial.state == TrialState.COMPLETE and minimum.converged:
            minima.append((trial.values[0], trial.number))
            counts[minimum.ended_by or ""] += 1
        elif trial.state == TrialState.COMPLETE or minimum.failed:
            counts["failed" if minimum.failed else "not converged"] += 1
    best = "flattest {:.4g} (trial {})".format(*min(minima)) if minima else "no minimum yet"
    return ", ".join([best, *(f"{what} {n}" for what, n in sorted(counts.items()))])


def _if_available(method: str) -> Callable[[Any], Any]:
    """Make a method available if what the search predicts with has the method."""

    def is_there(search: Any) -> bool:
        if not search.refit:
            raise AttributeError(f"{method} needs refit='mean' or another, got refit=False.")
        is_fitted = any(hasattr(search, name) for name in _PREDICTORS)
        will_average = not is_fitted and search.refit == MEAN and has_mean(search.estimator)
        if method == "decision_function" and (will_average or hasattr(search, "ensemble_")):
            return False  # a mean has none
        return hasattr(getattr(search, "best_estimator_", search.estimator), method)

    return available_if(is_there)  # type: ignore[no-any-return]


def _draw_by_tpe(seed: int | None) -> TPESampler:
    return TPESampler(seed=seed, n_startup_trials=10)


class FlatMinimaSearch(MetaEstimatorMixin, BaseEstimator):
    """Train every candidate once, on all the data, rank the minima by flatness, and average them.

    `GridSearchCV` fits each candidate k times on parts of the data, and the winner once more on
    all of it. This search fits each candidate once, on all of it, and ranks by a measure of
    flatness on the training data: no data are held out. It is a scikit-learn estimator: it
    predicts with the mean of all networks that have learned, or with one of them, see `refit`.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes. Only minima can be ranked, so it should train
        long enough, see `goal`.
    space : dict of str to list, distribution of Optuna, or callable
        The values to try, by parameter name: a list of choices, a distribution, or a function
        of the trial; or one function of the trial that returns a dict of parameters. Names that
        begin with ``data__`` vary the training data, and ``lr_scaling`` lets learning rates
        follow the batch size, see `MinimaObjective`.
    measure : str, callable, FlatnessScorer or sequence of these, default="relative_flatness"
        The measure to rank by: one of `get_measure_names`, a function of model, X and y, see
        `measure`, or a `FlatnessScorer` with the layer and the arguments of a measure:
        ``FlatnessScorer("hessian_trace", layer=0, measure_params={"batch_size": 256})``. Of
        several, the first ranks and the others are recorded; those of the same layer and
        arguments share passes over the data. With `NSGAIISampler` or `NSGAIIISampler`, each is
        an objective of the study, and ``"train_loss"`` may be one of them; see the column
        `pareto` of `minima_`.
    n_trials : int, optional
        Number of candidates, those of a resumed study included. If None, all combinations of
        choices are trained, and the space must consist of choices.
    sampler : optuna sampler, optional
        Draws the candidates; the search uses a copy. If None, all combinations of choices are
        trained, or `n_trials` of them, chosen at random; of ranges, and of functions that draw, a
        `TPESampler` draws.
    storage : str, path or optuna storage, optional
        Where the study is stored: the URL of a database, or a file, such as ``"minima.db"`` for
        SQLite and ``"minima.log"`` for Optuna's journal; in memory if None.
    study_name : str, optional
        Name of the study in the storage. If there is such a study, it is resumed: candidates that
        are finished or have failed are not trained again, those that were interrupted or killed
        are. A study that another process is training is refused. If None, every call of `fit`
        makes a study.
    pruner : optuna pruner, optional
        Stops hopeless candidates early, by their training loss after each epoch; needs
        ``n_jobs=1``.
    n_jobs : int, optional
        Number of processes that train, here or on a cluster (guide, Scale); None or 1
        trains in the calling process. The calling process alone reads and writes the study.
    n_threads : int or None, default=1
        Number of CPU threads that train and measure each candidate; None for as many as torch
        uses. With one number everywhere, `n_jobs` changes no result. To use several cores, train
        small networks in more processes, and large ones with more threads.
    fleet : int, "auto" or None, default=None
        Number of nets that each process trains at a time, as one stacked model: small networks
        train several times as fast, to the same results up to rounding; see `FleetTrainer`.
        Those of other architectures, batch sizes or numbers of samples are trained beside them,
        and what cannot be stacked one by one. "auto" finds the number by itself. None trains one
        after the other. A sampler that learns from results knows fewer of them.
    artifact_store : str, path or optuna artifact store, optional
        Where the weights of every minimum are saved; a path is a folder. They allow `remeasure`
        without training, and to restore the best estimator of an earlier session.
    goal : "auto", float or None, default="auto"
        What nets train to that have no `StopAtLoss` or `StopAtGradientNorm` of their own: a
        training loss, or "auto", for a classifier a twentieth of the loss of the best constant
        prediction; a regressor trains to its plateau, because its noise decides how far its loss
        can fall. With "auto" or None, a net that has not reached a goal is a minimum if its
        training has come to a plateau: the mean training losses of the last two fifths of its
        epochs, of at least 10, differ by at most 1% of the drop from the best constant prediction's
        loss. Estimators of scikit-learn stop by their own tolerance, and are minima if they did;
        "auto" does not change them, and with a loss they must also have reached it.
    refit : bool, "mean" or "nearest", default="mean"
        What the search predicts with. "mean": `ensemble_`, the mean prediction of all networks
        that have learned, which on most data generalises better than the best of a hold-out
        (guide, Does it help?). A network has learned if it lowers the loss of the best
        constant prediction at least half as far as the best network does; it need not be a
        minimum. The mean takes the time and memory of all networks. Estimators whose predictions
        have no mean predict as with True: classifiers without `predict_proba`, with a threshold
        or several labels of a sample, and what is neither classifier nor regressor. True:
        `best_estimator_`, the flattest minimum; the search holds all networks until it ends. False:
        nothing. "nearest": `best_estimator_`, the network of those in "mean" that predicts most
        like their mean on noisy inputs; see Notes.
    random_state : int, RandomState or None, default=None
        Seeds the sampler, every `random_state` of the estimator that is None, and torch while a
        candidate trains. If None, each candidate has a seed from torch's random state. The study
        holds the seeds.
    verbose : int, default=0
        1 shows a progress bar with the flattest minimum so far, what ended how many trainings (see
        `ended_by`), and how many did not converge or failed; 2 shows Optuna's log as well.

    Attributes
    ----------
    minima_ : pandas.DataFrame
        One row per candidate, flattest minimum first: parameters, measures, `train_loss`,
        `test_loss`, `generalization_gap`, `depth`, scores, `converged`, `comparable`,
        `ended_by`, `seconds`, `reason` and `rank`; see `relflat_sk.minima`.
        With several objectives, `pareto` says whether no other candidate is at least as good in
        all of them and better in one.
    best_estimator_ : estimator
        The flattest minimum, trained on all of X; the deepest candidate if none is a minimum. With
        ``refit="nearest"``, the network that predicts most like the mean.
    ensemble_ : VotingClassifier or VotingRegressor
        All networks that have learned, with ``refit="mean"``, see `refit`; its
        `named_estimators_` are named by their trials. If the space varies the data (``data__``),
        only those with the fewest random labels and the most samples. It has what this search
        trained, what saved weights restore, and `best_estimator_`, which alone is trained again
        if need be. A warning says how many are left out. Members are frozen: to cross-validate,
        pass the search.
    best_params_ : dict
        The parameters of `best_estimator_`; ``data__`` and ``lr_scaling`` are the search's own.
    best_score_ : float
        Minus its measure: greater is flatter, as scikit-learn's scores are. It is nan if
        ``refit="nearest"`` chose a network that cannot be ranked.
    refit_time_ : float
        Seconds that it took to provide what the search predicts with, almost 0 if all of it was
        trained in `fit`.
    best_index_ : int
        Its index in `cv_results_`.
    cv_results_ : dict
        As in scikit-learn's searches, with one fit per candidate. `mean_test_score` is minus the
        measure on the training data, nan for candidates that are not minima.
    study_ : optuna.Study
        The study. It also holds interrupted trials, which the tables leave out.
    classes_ : ndarray of shape (n_classes,)
        Class labels, if the estimator is a classifier.
    n_features_in_ : int
        Number of features in X.
    feature_names_in_ : ndarray of shape (`n_features_in_`,)
        Names of the features, if X was a data frame.

    See Also
    --------
    MinimaObjective : The objective of such a search, for an Optuna study of your own.
    flattest_within : Choose by score and flatness together in a search of scikit-learn.

    Notes
    -----
    A candidate that raises, diverges, runs out of memory or is no better than a constant
    prediction is recorded as failed, with its reason, and not tried again. A candidate that did
    not reach its goal, or whose flatness cannot be compared, is recorded as not converged. Both
    rank behind every minimum. If there is no minimum, the search warns, and the deepest network
    ranks first. With `n_jobs`, a candidate
    whose process is killed is tried once more, while nothing else trains.

    Minima rank together if their depths differ by at most a factor of 3, and all of them if the
    ranking measure is at equal loss or ``"train_loss"`` is another objective. Others rank behind;
    ``rank_minima(search, depth_band=None)`` ranks all together.

    Ctrl-C ends the search with the candidates that are finished. If this process is killed, the
    next call with the same `storage` and `study_name` trains again what was in training. To share
    a study between machines: ``study.optimize(MinimaObjective(...))``.

    With ``refit="nearest"``, 2,000 rows are drawn from X with replacement, and Gaussian noise is
    added, of 0.6 standard deviations of each feature over these rows. Of classifiers, the one is
    chosen that most often predicts the class of the mean; of regressors, the one whose predictions
    have the smallest mean squared difference to it; of equal ones, the first of `minima_`. Neither
    labels nor weights of samples are used. X is an array, a tensor or a data frame of floats, and
    predictions have a mean. The draws are those of ``numpy.random.default_rng(seed)``, rows first;
    with a `random_state`, the seed is the first that it draws,
    ``RandomState(random_state).randint(2**31 - 1)``. Networks of earlier sessions need saved
    weights to be chosen.

    Members of `ensemble_` that are nets of skorch are held without gradients, the state of their
    optimizers and the records of single batches: a network of 10 MB takes 10 MB.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.5, 1.0]})
    >>> search.fit(X, y).best_params_
    {'C': 0.5}

    The table holds all candidates, and the search predicts with the mean of both:

    >>> search.minima_[["param_C", "converged", "rank"]].values.tolist()
    [[0.5, True, 1], [1.0, True, 2]]
    >>> search.predict(X[:3]).tolist()
    [0, 0, 0]
    """

    def __init__(  # noqa: PLR0913
        self,
        estimator: Any,
        space: Any,
        *,
        measure: Any = "relative_flatness",
        n_trials: int | None = None,
        sampler: Any = None,
        storage: Any = None,
        study_name: str | None = None,
        pruner: Any = None,
        n_jobs: int | None = None,
        n_threads: int | None = 1,
        fleet: int | str | None = None,
        artifact_store: Any = None,
        goal: Any = "auto",
        refit: bool | str = MEAN,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.space = space
        self.measure = measure
        self.n_trials = n_trials
        self.sampler = sampler
        self.storage = storage
        self.study_name = study_name
        self.pruner = pruner
        self.n_jobs = n_jobs
        self.n_threads = n_threads
        self.fleet = fleet
        self.artifact_store = artifact_store
        self.goal = goal
        self.refit = refit
        self.random_state = random_state
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any = None,
        X_test: Any = None,
        y_test: Any = None,
        *,
        timeout: float | None = None,
        callbacks: Any = None,
        retry_failed: bool = False,
        **fit_params: Any,
    ) -> Any:
        """Train and rank the candidates.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Training data. Every candidate is trained on all of it.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Labels or values.
        X_test : array-like of shape (n_test, n_features), optional
            Held-out data. Losses and scores on it are recorded in `minima_`, and never used to
            choose.
        y_test : array-like of shape (n_test,) or (n_test, n_outputs), optional
            Labels or values of the held-out data; None for a Dataset that has them inside.
        timeout : float, optional
            Seconds after which no candidate begins; those in training are finished.
        callbacks : list of callable, optional
            Functions of the study and of a finished trial, as in `optuna.Study.optimize`. They
            are called in this process after each candidate; ``study.stop()`` ends the search.
        retry_failed : bool, default=False
            Whether candidates that failed in an earlier session, or were killed twice, are
            trained again. One that fails again replaces its earlier failure in the tables.
        **fit_params
            Passed on to the estimator's `fit`, such as `sample_weight`, or routed to it by
            metadata routing. Losses, scores and measures on the training data use the weights.

        Returns
        -------
        FlatMinimaSearch
            The search. After Ctrl-C, it is fitted to the candidates that were finished.

        Raises
        ------
        ValueError
            If an argument is not valid, X or predictions do not suit `refit`, the study to resume
            was made with something else, or no candidate could be trained; lists the differences or
            reasons.
        TypeError
            If estimator, space, sampler, pruner or artifact store are of the wrong kind.
        RuntimeError
            If storage, artifact store or held-out data fail while candidates train. Finished
            candidates are kept, and no failure is recorded.
        KeyboardInterrupt
            On Ctrl-C before any candidate is finished.
        """
        for name in (*_PREDICTORS, "refit_time_", *_OF_PREDICTOR):
            self.__dict__.pop(name, None)
        self._seed = seed = None
        if self.random_state is not None:  # that of candidates is drawn first
            rng = as_random_state(self.random_state)
            self._seed, seed = draw_seed(rng), draw_seed(rng)
        recipe = self._make_recipe(X, y, X_test, y_test, fit_params)
        check_arguments(self)
        if self.refit == NEAREST:
            check_nearest(self.estimator, X, recipe.task.y)
        check_number("timeout", timeout, optional=True)
        deadline = time.time() + (np.inf if timeout is None else timeout)
        points, n_trials = _plan(self, recipe.space, seed)
        check_store(recipe.store)
        study, storage = self._open_study(len(recipe.task.measuring.ranking), seed)
        view = SearchStudy(study.study_name, storage, study.sampler, study.pruner)

        def sampler_of(number: int) -> BaseSampler:
            # depends on the number alone, so that an interrupted search goes on as it would have
            if self.sampler is not None:
                return view.sampler
            return _draw_by_tpe(None if seed is None else zlib.crc32(b"%d" % number, seed))

        with owned(view) as owner:
            recipe.check_study(study)
            recipe.complete(study, recipe.task.measuring)
            candidates = Candidates(
                view, recipe, owner=owner, points=points, n_trials=n_trials,
                sampler_of=sampler_of, retry_failed=retry_failed, deadline=deadline,
                keeps_trained=bool(self.refit),
            )  # fmt: skip
            interrupted = self._train(candidates, list(callbacks or []))
        self.study_ = study
        self._recipe = recipe
        self._rank(recipe, interrupted)
        if self.refit:
            started = time.perf_counter()
            self._refit(recipe, candidates.trained, interrupted)
            self.refit_time_ = time.perf_counter() - started
        return self

    def _open_study(self, n_objectives: int, seed: int | None) -> tuple[optuna.Study, BaseStorage]:
        """Open the storage, and create or load the study."""
        try:
            storage = open_storage(self.storage)
            with quiet_log():
                study = optuna.create_study(
                    directions=["minimize"] * n_objectives,
                    storage=storage,
                    sampler=copy.deepcopy(self.sampler) or _draw_by_tpe(seed),
                    pruner=self.pruner or NopPruner(),
                    study_name=self.study_name,
                    load_if_exists=self.study_name is not None,
                )
        except (TypeError, ValueError):  # what is wrong with the arguments
            raise
        except Exception as error:
            raise ValueError(
                f"storage={without_password(self.storage)!r} cannot be used: {root_of(error)} "
                "Expected the URL of a database, or a file that ends in .db, .sqlite or .log."
            ) from error
        return study, storage

    def _train(self, candidates: Candidates, callbacks: Sequence[Callable[..., Any]]) -> bool:
        """Train the candidates; return whether Ctrl-C ended it."""
        study, shown = candidates.study, self.verbose > 0
        with tqdm(
            total=candidates.n_candidates, desc="minima", unit="net", disable=not shown
        ) as bar:

            def report(trial: FrozenTrial) -> None:
                if shown:
                    bar.set_postfix_str(progress(study.get_trials(deepcopy=False)), refresh=False)
                bar.update()
                if self.verbose > 1:  # what `Study.optimize` says
                    ended = f"finished with values: {trial.values}"
                    if trial.state != TrialState.COMPLETE:
                        ended = f"ended as {trial.state.name}: {Minimum.from_trial(trial).reason}"
                    text = f"Trial {trial.number} {ended} and parameters: {trial.params}."
                    optuna.logging.get_logger("optuna.study").info(text)
                for callback in callbacks:
                    callback(study, trial)

            return sweep(candidates, n_processes(self.n_jobs), self.fleet, report)

    def _make_recipe(self, X: Any, y: Any, X_test: Any, y_test: Any, fit_params: Any) -> Recipe:
        """Check the arguments, and collect what all candidates share."""
        if get_config()["enable_metadata_routing"]:
            fit_params = process_routing(self, "fit", **fit_params).estimator.fit
        several = isinstance(self.sampler, NSGAIISampler | NSGAIIISampler)
        measuring = read_objectives(self.measure, None if several else 1)
        task = Task(
            self.estimator, X, y, X_test, y_test, measuring, self.goal, self.n_threads, fit_params
        )
        return Recipe(task, self.space, self.artifact_store, self._seed)

    def _recipe_of(self, X: Any, y: Any, fit_params: Any) -> Recipe:
        """Return the recipe of `fit`, made again from the data if the search was unpickled."""
        check_is_fitted(self, "minima_")
        if X is not None:
            return self._make_recipe(X, y, None, None, fit_params)
        if not hasattr(self, "_recipe"):
            raise ValueError("X and y are needed, since a search that was pickled left its data.")
        return self._recipe

    def get_estimator(self, number: int, X: Any = None, y: Any = None, **fit_params: Any) -> Any:
        """Return the estimator of any minimum, fitted.

        Parameters
        ----------
        number : int
            Number of its trial, from the column ``trial`` of `minima_`.
        X : array-like of shape (n, n_features), optional
            The training data that `fit` was given; needed only if the search was unpickled and
            does not hold the network.
        y : array-like of shape (n,) or (n, n_outputs), optional
            The labels or values that `fit` was given.
        **fit_params
            The other arguments that `fit` was given, such as `sample_weight`; with X only.

        Returns
        -------
        estimator
            With the predictions that it had. It is restored from its weights if they were saved
            (`artifact_store`); an estimator of scikit-learn has its `n_iter_`, but its
            `loss_curve_` is that of one step. Otherwise it is trained again with the same seed; the
            same within rounding after a search with a `fleet`.

        Raises
        ------
        ValueError
            If no such trial was trained to its end, or training again leads to another training
            loss, as it may on another machine.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> from relflat_sk import FlatMinimaSearch
        >>> X, y = load_iris(return_X_y=True)
        >>> search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.5, 1.0]})
        >>> search.fit(X, y).get_estimator(1).C
        1.0
        """
        check_is_fitted(self, "minima_")
        best = trial_at(self.minima_, self.best_index_)
        if number == best and hasattr(self, "best_estimator_"):
            return self.best_estimator_
        members = dict(self.ensemble_.estimators) if hasattr(self, "ensemble_") else {}
        if f"trial{number}" in members:
            return members[f"trial{number}"].estimator
        recipe = self._recipe_of(X, y, fit_params)
        trials = {trial.number: trial for trial in self.study_.get_trials(deepcopy=False)}
        recipe.check_study(self.study_)
        return recipe.estimator_of(trials.get(number), number)

    def get_ensemble(
        self, k: int | None = None, X: Any = None, y: Any = None, **fit_params: Any
    ) -> Any:
        """Return candidates as one fitted estimator that averages their predictions.

        Parameters
        ----------
        k : int, optional
            Number of minima, the first of `minima_`. If None, all that `ensemble_` averages, see
            `refit`.
        X : array-like of shape (n, n_features), optional
            The training data that `fit` was given; needed only if the search was unpickled and
            does not hold all of these.
        y : array-like of shape (n,), optional
            The labels or values that `fit` was given.
        **fit_params
            The other arguments that `fit` was given, such as `sample_weight`; with X only.

        Returns
        -------
        VotingClassifier or VotingRegressor
            Of scikit-learn. A classifier averages probabilities, a regressor predictions. Each
            member comes from `ensemble_` or from `get_estimator`, which may train it again.

        Raises
        ------
        ValueError
            If there are not so many trained minima, or their predictions have no mean, see
            `refit`.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> X, y = load_iris(return_X_y=True)
        >>> search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.1, 0.5, 1.0]})
        >>> ensemble = search.fit(X, y).get_ensemble(2)
        >>> ensemble.predict(X[:2])
        array([0, 0])
        """
        check_is_fitted(self, "minima_")
        check_integer("k", k, minimum=1, optional=True)
        numbers = self._first_trials(k)
        members = {f"trial{n}": self.get_estimator(n, X, y, **fit_params) for n in numbers}
        # of an ensemble that was averaged before, the predictions have a mean
        averaged = hasattr(self, "ensemble_")
        return average(members, None if averaged else self._recipe_of(X, y, fit_params).task.y)

    def _first_trials(self, k: int | None) -> list[int]:
        """Return the trials of the first k minima; if None, of those that are averaged."""
        trained = (self.minima_["state"] == "complete").to_numpy(dtype=bool)
        if k is None:
            trials = self.study_.get_trials(deepcopy=False)
            records = [Minimum.from_trial(trials[number]) for number in self.minima_["trial"]]
            kept = is_averaged(self.minima_, records)
        elif k <= trained.sum():
            kept = trained & (trained.cumsum() <= k)
        else:
            raise ValueError(
                f"k={k} minima are asked for, and {trained.sum()} candidates have ended."
            )
        numbers: list[int] = self.minima_.loc[kept, "trial"].tolist()
        return numbers

    def remeasure(
        self,
        measures: Sequence[Any],
        X: Any = None,
        y: Any = None,
        *,
        retrain: bool = False,
        **fit_params: Any,
    ) -> pd.DataFrame:
        """Measure the minima again from their saved weights, without training.

        Parameters
        ----------
        measures : sequence of str, callable or FlatnessScorer
            Names of measures, functions or scorers, as the search takes them. A minimum that has
            a measure already is not measured again.
        X : array-like of shape (n, n_features), optional
            The training data that `fit` was given; needed only if the search was unpickled.
        y : array-like of shape (n,) or (n, n_outputs), optional
            The labels or values that `fit` was given.
        retrain : bool, default=False
            Whether to train minima again, with the same seed, whose weights were not saved or
            whose files are damaged.
        **fit_params
            The other arguments that `fit` was given, such as `sample_weight`; with X only.

        Returns
        -------
        pandas.DataFrame
            `minima_`, with a column for each measure, nan for candidates without weights or with
            damaged ones, which a warning names. The study stores the measures.

        Raises
        ------
        ValueError
            If no weights were saved (the search had no `artifact_store` when it trained), a
            name is not a measure, or estimator or data are not those of the study.
        """
        recipe = self._recipe_of(X, y, fit_params)
        measuring = Measuring(measures)
        recipe.check_study(self.study_, also=measuring)
        trials = self.study_.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if not retrain and not any(recipe.has_weights(trial) for trial in trials):
            raise ValueError(
                "no weights of these minima were saved, so they cannot be measured again. Give the "
                "search an artifact_store, such as a folder, before it trains, or set retrain=True."
            )
        recipe.complete(self.study_, measuring, retrain=retrain)
        table = candidate_table(self.study_, recipe, measuring.names)
        self.minima_ = rank_minima(table, by=recipe.task.measuring.ranking[0])
        return self.minima_

    def report(self, path: Any = None) -> Path | str:
        """Write a report on the search: one HTML page that any browser opens.

        The page holds the goal, the depth of the minima, why candidates were left out, the table of
        minima, which a click sorts, plots, the correlation of every measure with the generalization
        gap (if `fit` was given held-out data), the settings, the estimator's parameters and the
        versions of all libraries. It loads nothing from elsewhere.

        Parameters
        ----------
        path : str or path, optional
            The file to write, such as ``"minima.html"``, in a folder that exists.

        Returns
        -------
        pathlib.Path or str
            The file; without `path`, the page itself, as from pandas' `DataFrame.to_html`.

        Raises
        ------
        OSError
            If the folder of the file does not exist.
        ImportError
            If matplotlib is not installed.
        """
        check_is_fitted(self, "minima_")
        page = render(self)
        if path is None:
            return page
        file = Path(path)
        file.write_text(page, encoding="utf-8")
        return file

    @_if_available("predict")
    def predict(self, X: Any) -> Any:
        """Predict with the mean of networks, or with one; see `refit`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_outputs)
            Predicted labels or values.
        """
        return self._predictor().predict(X)

    @_if_available("predict_proba")
    def predict_proba(self, X: Any) -> Any:
        """Predict class probabilities with the mean of networks, or with one; see `refit`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            In the order of `classes_`.
        """
        return self._predictor().predict_proba(X)

    @_if_available("predict_log_proba")
    def predict_log_proba(self, X: Any) -> Any:
        """Predict natural logarithms of probabilities with the mean of networks, or with one.

        See `refit`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            In the order of `classes_`.
        """
        model = self._predictor()
        if hasattr(model, "predict_log_proba"):
            return model.predict_log_proba(X)
        with np.errstate(divide="ignore"):
            return np.log(model.predict_proba(X))

    @_if_available("decision_function")
    def decision_function(self, X: Any) -> Any:
        """Compute the decision function of the network that predicts; a mean of several has none.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_classes)
            As the estimator returns it.
        """
        return self._predictor().decision_function(X)

    @_if_available("score")
    def score(self, X: Any, y: Any = None, **params: Any) -> float:
        """Score what the search predicts with, see `refit`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.
        y : array-like of shape (n,) or (n, n_outputs), optional
            True labels or values.
        **params
            Such as `sample_weight`, if the estimator's `score` requests them by metadata routing,
            as for scikit-learn's searches.

        Returns
        -------
        float
            Accuracy for classifiers and R2 for regressors; of one network, what the estimator's own
            `score` returns.

        Raises
        ------
        ValueError
            If there are `params` without metadata routing.
        """
        if params and not get_config()["enable_metadata_routing"]:
            raise ValueError(
                f"score was given {sorted(params)}, which takes metadata routing: "
                "sklearn.set_config(enable_metadata_routing=True), and estimator.set_score_request."
            )
        routed = process_routing(self, "score", **params).estimator.score
        return float(self._predictor().score(X, y, **routed))

    def _predictor(self) -> Any:
        """Return what the search predicts with."""
        check_is_fitted(self, _PREDICTORS, all_or_any=any)
        return self.ensemble_ if hasattr(self, "ensemble_") else self.best_estimator_

    def get_metadata_routing(self) -> MetadataRouter:
        """Return which arguments of `fit` and `score` the estimator asks for.

        Returns
        -------
        sklearn.utils.metadata_routing.MetadataRouter
            For scikit-learn's metadata routing.
        """
        router = MetadataRouter(owner=self).add_self_request(self)
        mapping = MethodMapping().add(caller="fit", callee="fit")
        mapping = mapping.add(caller="score", callee="score")
        return router.add(estimator=self.estimator, method_mapping=mapping)

    def __sklearn_tags__(self) -> Any:
        tags = get_tags(self.estimator)
        tags.array_api_support = False  # data are copied, varied and stored as arrays of NumPy
        return tags

    def _rank(self, recipe: Recipe, interrupted: bool) -> None:
        """Set the attributes that describe the candidates; refuse a table without any."""
        table, by = candidate_table(self.study_, recipe), recipe.task.measuring.ranking[0]
        check_table(table, interrupted, None if self.storage is None else self.study_.study_name)
        warn_if_few_fit(table, recipe.task.measuring)
        self.minima_ = rank_minima(table, by=by)
        trials = self.study_.get_trials(deepcopy=False)
        self.cv_results_ = cv_results(table, self.minima_, by, recipe.space, trials)
        self._set_best(int(self.minima_["trial"].iloc[0]))

    def _set_best(self, number: int) -> None:
        """Set the attributes that describe the best candidate, by its trial."""
        self.best_index_ = int(np.sort(self.minima_["trial"]).searchsorted(number))
        self.best_params_ = self.cv_results_["params"][self.best_index_]
        self.best_score_ = float(self.cv_results_["mean_test_score"][self.best_index_])

    def _refit(self, recipe: Recipe, trained: Mapping[int, Trained], interrupted: bool) -> None:
        """Set what the search predicts with.

        Only the best is trained again, if an earlier session trained it, but not after Ctrl-C.
        """
        trials, y = self.study_.get_trials(deepcopy=False), recipe.task.y
        averages = self.refit in (MEAN, NEAREST) and has_mean(self.estimator, y)
        numbers = self._first_trials(None) if averages else []
        members = {}
        for number in numbers:
            estimator, _ = recipe.provide(trials[number], trained.get(number), retrain=False)
            if estimator is not None:
                members[number] = estimator
        if self.refit == NEAREST:
            mean = self._mean_of(members, len(numbers), y)
            if mean is not None:
                self._set_best(nearest(mean, recipe.task.X, recipe.drawn))
        best = trial_at(self.minima_, self.best_index_)
        estimator, problem = members.get(best), ""
        if estimator is None:
            again = not interrupted
            estimator, problem = recipe.provide(trials[best], trained.get(best), retrain=again)
        if best in numbers and estimator is not None:
            members[best] = estimator
        mean = self._mean_of(members, len(numbers), y) if self.refit == MEAN and members else None
        self._set_predictors(best, estimator, problem, mean)

    def _set_predictors(self, best: int, estimator: Any, problem: str, mean: Any) -> None:
        """Set the attributes of what the search predicts with; warn if the best has a problem."""
        if estimator is not None:
            self.best_estimator_ = estimator
        if mean is not None:
            self.ensemble_ = mean
        if estimator is None:
            warn(
                "the interrupted search has no best_estimator_: an earlier session trained trial "
                f"{best}. {problem} Fit again, or call get_estimator({best})."
            )
        elif problem:
            warn(f"best_estimator_ is not the network of the table: {problem}")
        for name in _OF_PREDICTOR:
            model = mean if estimator is None else estimator
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def _mean_of(self, members: Mapping[int, Any], n_wanted: int, y: Any) -> Any:
        """Average networks by their trials; None, and a warning, if there is no mean."""
        try:
            mean = average({f"trial{number}": member for number, member in members.items()}, y)
        except ValueError as error:
            warn(f"the search predicts with the flattest minimum only: {error}")
            return None
        if len(members) < n_wanted:
            what = "mean of" if self.refit == MEAN else "nearest to the mean of"
            warn(
                f"the search predicts with the {what} {len(members)} of {n_wanted} networks: "
                f"{NO_WEIGHTS} get_ensemble() trains them again."
            )
        return mean

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Add the flattest minima to what notebooks show of an estimator."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if "text/html" in bundle and hasattr(self, "minima_"):
            bundle["text/html"] += render_short(self)
        return bundle

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_recipe"}
