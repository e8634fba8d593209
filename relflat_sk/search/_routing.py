"""Route the arguments of a search's `fit` to its estimator, as scikit-learn's searches do."""

from collections.abc import Mapping
from typing import Any

from sklearn import get_config
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing

__all__ = ["RoutingMixin", "route"]


class RoutingMixin:
    """A search whose `fit` passes arguments on to its estimator."""

    estimator: Any

    def get_metadata_routing(self) -> MetadataRouter:
        """Return which arguments of `fit` the estimator asks for.

        Returns
        -------
        sklearn.utils.metadata_routing.MetadataRouter
            For scikit-learn's metadata routing.
        """
        router = MetadataRouter(owner=self).add_self_request(self)
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return router.add(estimator=self.estimator, method_mapping=mapping)


def route(search: Any, fit_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` that are the estimator's."""
    if not get_config()["enable_metadata_routing"]:
        return dict(fit_params)
    return dict(process_routing(search, "fit", **fit_params).estimator.fit)
