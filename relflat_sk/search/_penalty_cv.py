"""Choose layer and weight of the flatness penalty by cross-validation."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sklearn.base import clone
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV
from sklearn.utils import get_tags
from sklearn.utils.metadata_routing import get_routing_for_object

from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.fleet._trainer import fleet_training
from relflat_sk.search._average import average
from relflat_sk.training._nets import RelativeFlatnessRegularizedClassifier

_PENALTIES: tuple[dict[str, Any], ...] = (
    {"flatness_weight": 0.0},
    {"flatness_layer": -1, "flatness_weight": 1.0},
    {"flatness_layer": -1, "flatness_weight": 10.0},
    {"flatness_layer": 0, "flatness_weight": 1.0},
    {"flatness_layer": "all", "flatness_weight": 0.1},
    {"flatness_layer": "all", "flatness_weight": 0.3},
    {"flatness_layer": "all", "flatness_weight": 1.0},
    {"flatness_layer": "all", "flatness_weight": 3.0},
)
# the strength of weight decay that torch couples to the learning rate only
_DECAYS: tuple[dict[str, Any], ...] = (
    {"flatness_weight": 0.0, "optimizer__weight_decay": 1.0},
    {"flatness_weight": 0.0, "optimizer__weight_decay": 3.0},
    {"flatness_layer": "all", "flatness_weight": 1.0, "optimizer__weight_decay": 1.0},
)


class RelativeFlatnessPenaltyCV(GridSearchCV):
    """Choose layer and weight of the flatness penalty by cross-validation.

    On small and noisy tables, the penalty moves the accuracy by several points, up or down, and
    which layer and weight suit is a property of the data. This is scikit-learn's `GridSearchCV`
    over settings of the penalty, with weight decay among them. The networks of all settings and
    folds are trained together, see `fleet_training`.

    Parameters
    ----------
    estimator : estimator, optional
        A net of `relflat_sk`, alone, in a `Pipeline` or in another estimator that has its
        parameters. None is ``RelativeFlatnessRegularizedClassifier(verbose=0)``.
    penalties : sequence of dict, optional
        The settings to choose from: parameters of the net, without prefix. None takes no penalty;
        the last layer with the weights 1 and 10; the first with 1; all layers with 0.1, 0.3, 1
        and 3; and, if the optimizer is Adam or AdamW, AdamW's weight decay of 1 and 3 alone, and
        of 1 together with the penalty at all layers.
    cv : int, splitter or iterable, default=5
        The folds, as in `GridSearchCV`.
    scoring : str or callable, optional
        What the folds are judged by; greater is better. None is the net's `score`.
    refit : bool or "mean", default=True
        True trains a network with the best setting on all data. "mean" predicts with the mean of
        the folds' networks at the best setting, which need no further training. False chooses
        only.

    Attributes
    ----------
    best_params_ : dict
        The best setting. If several have the best score, the one with the smallest weights of
        penalty and decay.
    best_score_ : float
        Its mean score over the folds.
    best_estimator_ : estimator
        What predicts, unless `refit` is False. With ``refit="mean"`` a `VotingClassifier` or
        `VotingRegressor` of the folds' networks.
    cv_results_ : dict of str to ndarray
        Scores of each setting and fold, as in `GridSearchCV`.
    best_index_, scorer_, n_splits_, refit_time_, multimetric_ : object
        As in `GridSearchCV`.

    Raises
    ------
    ValueError
        From `fit`, if the estimator has no parameter `flatness_weight`, or more than one, if a
        setting names no parameter of the net, or `refit` is none of the above.

    See Also
    --------
    FlatMinimaSearch : Trains each candidate on all data, and holds nothing out.
    fleet_training : Trains the nets of any other search together.

    Notes
    -----
    Folds choose between settings that differ by a point or more. Smaller differences are within
    the noise of the folds.

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_wine(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(max_epochs=10, verbose=0, random_state=0)
    >>> penalties = [{"flatness_weight": 0}, {"flatness_layer": "all", "flatness_weight": 1}]
    >>> search = RelativeFlatnessPenaltyCV(make_pipeline(StandardScaler(), net), penalties, cv=3)
    >>> search.fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        estimator: Any = None,
        penalties: Sequence[Mapping[str, Any]] | None = None,
        cv: Any = 5,
        scoring: Any = None,
        refit: bool | str = True,
    ) -> None:
        super().__init__(estimator, None, scoring=scoring, refit=refit, cv=cv)
        self.penalties = penalties

    def fit(self, X: Any, y: Any = None, **params: Any) -> "RelativeFlatnessPenaltyCV":
        """Train the networks of all settings and folds, and choose a setting.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Training inputs.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Labels or values.
        **params
            Further arguments of the estimator's `fit`, such as `sample_weight`, as in
            `GridSearchCV`. They are split like X.

        Returns
        -------
        self
            The fitted search.

        Raises
        ------
        ValueError
            If a parameter is not valid, or the estimator does not fit the data.
        """
        if self.refit not in (True, False, "mean"):
            raise ValueError(f"refit must be True, False or 'mean', got {self.refit!r}.")
        search = self._grid_search()
        keep = None
        if self.refit == "mean":
            search.scoring = keep = _KeepEstimators(check_scoring(search.estimator, self.scoring))
        with fleet_training(), warnings.catch_warnings():
            # folds judge every setting, also one whose weight is too large to count
            warnings.filterwarnings("ignore", ".*at its limit", FlatnessWarning)
            search.fit(X, y, **params)
        for name, learned in vars(search).items():
            if name.endswith("_"):
                setattr(self, name, learned)
        if keep is not None:
            self.scorer_ = keep.scorer
            chosen = clone(search.estimator).set_params(**self.best_params_)
            names = set().union(*search.cv_results_["params"])
            folds = enumerate(keep.trained_like(chosen, names))
            self.best_estimator_ = average({f"fold{i}": net for i, net in folds}, y)
        return self

    def _grid_search(self) -> GridSearchCV:
        """Return scikit-learn's search over the settings, from the weakest to the strongest."""
        estimator = self.estimator
        if estimator is None:
            estimator = RelativeFlatnessRegularizedClassifier(verbose=0)
        settings = _settings(estimator, self.penalties)
        return GridSearchCV(
            estimator,
            [{name: [value] for name, value in setting.items()} for setting in settings],
            scoring=self.scoring,
            refit=self.refit is True,
            cv=self.cv,
        )

    def __sklearn_tags__(self) -> Any:
        search = self._grid_search()
        tags = get_tags(search)
        tags.target_tags = get_tags(search.estimator).target_tags  # several outputs
        return tags

    def get_metadata_routing(self) -> Any:
        """Return how metadata are routed, as in `GridSearchCV`.

        Returns
        -------
        MetadataRouter
            Of the estimator, the scorer and the folds.
        """
        return self._grid_search().get_metadata_routing()


def _settings(
    estimator: Any, penalties: Iterable[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return parameters of an estimator for each setting of its net, the weakest first."""
    known = estimator.get_params()
    prefixes = [
        name.removesuffix("flatness_weight")
        for name in known
        if name == "flatness_weight" or name.endswith("__flatness_weight")
    ]
    if len(prefixes) != 1:
        raise ValueError(
            f"the estimator must hold one net with a flatness penalty, and this "
            f"{type(estimator).__name__} has {len(prefixes)} parameters flatness_weight. Pass a "
            "RelativeFlatnessRegularizedNet, or a pipeline that ends in one."
        )
    (prefix,) = prefixes
    if penalties is None:
        penalties = list(_PENALTIES)
        optimizer = known[f"{prefix}optimizer"]
        if optimizer in (torch.optim.Adam, torch.optim.AdamW):
            penalties += [{"optimizer": torch.optim.AdamW} | setting for setting in _DECAYS]
    settings = sorted(map(dict, penalties), key=_strength)
    return [{f"{prefix}{name}": value for name, value in setting.items()} for setting in settings]


def _strength(setting: Mapping[str, Any]) -> tuple[float, float]:
    """Return the weights of penalty and decay, to order settings by."""
    return setting.get("flatness_weight", 0.0), setting.get("optimizer__weight_decay", 0.0)


class _KeepEstimators:
    """A scorer that keeps the estimators it scores, those of the folds."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.estimators: list[Any] = []

    def __call__(self, estimator: Any, *args: Any, **kwargs: Any) -> Any:
        score = self.scorer(estimator, *args, **kwargs)
        self.estimators.append(estimator)
        return score

    def get_metadata_routing(self) -> Any:
        return get_routing_for_object(self.scorer)

    def trained_like(self, chosen: Any, names: Iterable[str]) -> list[Any]:
        """Return the estimators that have these parameters of another one."""
        expected = chosen.get_params()
        return [
            estimator
            for estimator in self.estimators
            if all(estimator.get_params().get(name) == expected.get(name) for name in names)
        ]
