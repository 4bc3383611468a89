"""Sentences of the package's warnings are noted; the warnings of others stay warnings."""

from __future__ import annotations

import warnings

import pytest

from securecluster.core.noted_warnings import noted
from securecluster.errors import SecureClusterWarning


def test_warnings_of_others_stay_warnings_where_they_arose() -> None:
    sentences: list[str] = []
    with pytest.warns(RuntimeWarning, match="of numpy") as caught, noted(sentences.append):
        warnings.warn("of the package", SecureClusterWarning, stacklevel=1)
        warnings.warn("of numpy", RuntimeWarning, stacklevel=1)
    assert sentences == ["of the package"]
    (warning,) = caught
    assert warning.filename == __file__
