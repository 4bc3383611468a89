"""What is set before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from securecluster.core.lazy_torch import ENVIRONMENT, prepare


def test_the_environment_is_set_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    prepare()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == ENVIRONMENT["THP_MEM_ALLOC_ENABLE"]


def test_benchmarks_set_it_before_torch_is_loaded() -> None:
    code = (
        "import sys, os, benchmarks; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    clean = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "PASSIVE"]
