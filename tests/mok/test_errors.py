from __future__ import annotations

import pickle

import pytest

from mok import errors

CLASSES = [
    c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.MokError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_error_names_rule_value_and_remedy(cls):
    error = cls("H must be a multiple of 64", 100, "pad H to 128")
    assert isinstance(error, RuntimeError)
    assert (error.rule, error.value, error.remedy) == (
        "H must be a multiple of 64",
        100,
        "pad H to 128",
    )
    assert str(error) == "H must be a multiple of 64; found 100. pad H to 128"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_errors_survive_pickling(cls):
    # Multi-process runs send them from worker to parent.
    error = pickle.loads(pickle.dumps(cls("rule", (1, 2), "remedy")))
    assert (type(error), error.rule, error.value, error.remedy) == (cls, "rule", (1, 2), "remedy")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ShapeError, ValueError),
        (errors.DtypeError, TypeError),
        (errors.RouteError, ValueError),
        (errors.MissingDependencyError, ImportError),
        (errors.MokTimeoutError, TimeoutError),
    ],
)
def test_builtin_parents(cls, builtin):
    assert issubclass(cls, builtin)


def test_value_and_remedy_are_optional():
    assert str(errors.MokError("a rule")) == f"a rule. {errors.MokError.REMEDY}"
