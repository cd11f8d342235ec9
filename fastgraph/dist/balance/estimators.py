"""Regressors from the features of parts to seconds, and the choice of one of them.

Needs scikit-learn.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

try:
    from sklearn.base import BaseEstimator, RegressorMixin, clone
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
    from sklearn.linear_model import LinearRegression, RidgeCV
    from sklearn.model_selection import GroupKFold
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "models of performance need scikit-learn: pip install 'fastgraph[dist]'", name="sklearn"
    ) from error

Array = np.ndarray[Any, np.dtype[Any]]  # of any shape, of numbers


class Regressor(Protocol):
    """As scikit-learn has it, which says no types."""

    def fit(self, features: Array, seconds: Array) -> Regressor:
        """Learn from samples."""

    def predict(self, features: Array) -> Array:
        """Seconds."""


SIZES = ("rows", "columns", "entries")
"""Sizes that work is proportional to: dense products, reads of columns, sums of entries."""

FEWEST = 4
"""Samples to choose a regressor by."""

_FOLDS = 5
_ALPHAS = tuple(10.0**k for k in range(-3, 4))
_AS_ACCURATE = 1.1
"""A regressor whose error is at most so many times the least one may be chosen for its speed."""

_LEAST_SECONDS = 1e-7


class Proportional(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A constant and multiples of sizes, none below 0, with the least relative errors.

    Args:
        columns: the places of the sizes among the features.
    """

    def __init__(self, columns: Sequence[int] = (0, 1, 2)) -> None:
        self.columns = columns

    def fit(self, features: Array, seconds: Array) -> Proportional:
        """Minimise the sum of squared relative errors."""
        scaled = self._sizes(features) / seconds[:, None]
        self.linear_ = LinearRegression(fit_intercept=False, positive=True)
        self.linear_.fit(scaled, np.ones(len(seconds)))
        return self

    def predict(self, features: Array) -> Array:
        """Seconds."""
        found: Array = np.maximum(self._sizes(features) @ self.linear_.coef_, _LEAST_SECONDS)
        return found

    def _sizes(self, features: Array) -> Array:
        ones = np.ones((len(features), 1))
        return np.hstack([ones, np.asarray(features)[:, list(self.columns)]])


class Corrected(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor for a value proportional to sizes, times a correction learnt from all features.

    Trees and ridges alone do not know that twice the work takes twice the time, which is asked of
    them where parts are larger than samples.
    """

    def __init__(self, columns: Sequence[int] = (0, 1, 2)) -> None:
        self.columns = columns

    def fit(self, features: Array, seconds: Array) -> Corrected:
        """Fit one after the other."""
        self.base_ = Proportional(self.columns).fit(features, seconds)
        self.rest_ = _of_logarithms(RidgeCV(_ALPHAS))
        self.rest_.fit(features, np.log(seconds / self.base_.predict(features)))
        return self

    def predict(self, features: Array) -> Array:
        """Seconds."""
        found: Array = self.base_.predict(features) * np.exp(self.rest_.predict(features))
        return found


def _of_logarithms(regressor: Regressor) -> Regressor:
    """A regressor of features whose sizes matter by their ratios; some are below 0."""
    made: Regressor = make_pipeline(FunctionTransformer(np.arcsinh), StandardScaler(), regressor)
    return made


def _of_ratios(regressor: Regressor) -> Regressor:
    """The same, of seconds by their ratios."""
    made: Regressor = TransformedTargetRegressor(
        _of_logarithms(regressor), func=np.log, inverse_func=np.exp, check_inverse=False
    )
    return made


def candidates(names: Sequence[str]) -> dict[str, Regressor]:
    """All regressors, for features of these names."""
    columns = [list(names).index(size) for size in SIZES]
    return {
        "proportional": Proportional(columns),
        "corrected": Corrected(columns),
        "ridge": _of_ratios(RidgeCV(_ALPHAS)),
        "nearest": _of_ratios(KNeighborsRegressor(2, weights="distance")),
        "trees": _of_ratios(ExtraTreesRegressor(100, random_state=0)),
        "boosting": _of_ratios(GradientBoostingRegressor(random_state=0)),
    }


@dataclass(frozen=True)
class Chosen:
    """A regressor that is fitted.

    Attributes:
        name: of the candidate.
        error: its mean absolute percentage error in cross-validation, as a fraction.
        errors: those of all candidates.
        predict: from features ``[parts, features]`` to seconds ``[parts]``.
    """

    name: str
    error: float
    errors: dict[str, float]
    predict: Callable[[Array], Array]


def choose(names: Sequence[str], features: Array, seconds: Array, groups: Array) -> Chosen:
    """The fastest of the regressors that predict nearly as well as the best, fitted to everything.

    Args:
        names: of the features.
        features: float64 ``[samples, features]``.
        seconds: float64 ``[samples]``, above 0.
        groups: ``[samples]``; samples of a group are left out together, so that nothing is
            predicted from what was measured at the same time.

    Raises:
        ValueError: there are fewer than :data:`FEWEST` groups.
    """
    count = len(np.unique(groups))
    if count < FEWEST:
        raise ValueError(f"a model of performance needs at least {FEWEST} samples, got {count}")
    seconds = np.maximum(seconds, _LEAST_SECONDS)
    folds = list(GroupKFold(min(_FOLDS, count)).split(features, seconds, groups))
    found = {}
    for name, candidate in candidates(names).items():
        errors = [_error(candidate, features, seconds, *fold) for fold in folds]
        fitted = _fitted(candidate, features, seconds)
        found[name] = float(np.mean(np.concatenate(errors))), _cost(fitted, features[:1]), fitted
    best = min(error for error, _, _ in found.values())
    good = {name: f for name, f in found.items() if f[0] <= _AS_ACCURATE * best}
    name = min(good, key=lambda name: good[name][1])
    error, _, fitted = good[name]
    return Chosen(name, error, {n: f[0] for n, f in found.items()}, fitted.predict)


def _fitted(candidate: Regressor, features: Array, seconds: Array) -> Regressor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of features that are the same in all samples
        fitted: Regressor = clone(candidate).fit(features, seconds)
    return fitted


def _error(
    candidate: Regressor, features: Array, seconds: Array, train: Array, test: Array
) -> Array:
    fitted = _fitted(candidate, features[train], seconds[train])
    predicted = fitted.predict(features[test])
    found: Array = np.abs(predicted - seconds[test]) / seconds[test]
    return found


def _cost(fitted: Regressor, features: Array) -> float:
    """Seconds for a prediction."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        fitted.predict(features)
        times.append(time.perf_counter() - started)
    return min(times)


def multiples(sizes: Array, values: Array) -> Array:
    """Multiples of sizes that are nearest to values, none below 0."""
    found: Array = LinearRegression(fit_intercept=False, positive=True).fit(sizes, values).coef_
    return found
