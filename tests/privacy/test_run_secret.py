"""The secret of a run: drawn, kept in one file for its owner, and refused when it is damaged."""

from __future__ import annotations

import dataclasses
import stat
from pathlib import Path

import pytest

from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.privacy import run_secret
from securecluster.runtime.settings import Settings, check_values


def test_secrets_have_128_bits_and_never_repeat() -> None:
    drawn = {run_secret.drawn() for _ in range(1000)}
    assert len(drawn) == 1000
    assert {len(secret) for secret in drawn} == {16}
    # each bit is set about half of the time
    for bit in range(128):
        ones = sum(int.from_bytes(secret, "big") >> bit & 1 for secret in drawn)
        assert 400 < ones < 600


def test_a_secret_comes_back_from_a_file_for_its_owner(tmp_path: Path) -> None:
    assert run_secret.read(tmp_path) is None
    secret = run_secret.drawn()
    run_secret.write(tmp_path, secret)
    assert run_secret.read(tmp_path) == secret
    assert [path.name for path in tmp_path.iterdir()] == ["secret.key"]
    assert stat.S_IMODE((tmp_path / "secret.key").stat().st_mode) == 0o600
    # in a folder that is not marked as ours it may be anybody's
    with pytest.raises(RunFolderError, match="cannot remove"):
        run_secret.write(tmp_path, None)
    (tmp_path / ".securecluster").touch()
    run_secret.write(tmp_path, None)
    assert run_secret.read(tmp_path) is None


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_can_read_is_read_with_a_warning(mode: int, tmp_path: Path) -> None:
    secret = run_secret.drawn()
    run_secret.write(tmp_path, secret)
    (tmp_path / "secret.key").chmod(mode)
    with pytest.warns(SecureClusterWarning, match=r"chmod 600 .*secret\.key"):
        assert run_secret.read(tmp_path) == secret


@pytest.mark.parametrize("length", [0, 5, 16, 23, 25])
def test_a_file_of_another_length_is_refused(length: int, tmp_path: Path) -> None:
    run_secret.write(tmp_path, bytes(range(16)))
    path = tmp_path / "secret.key"
    path.write_bytes((path.read_bytes() + b"x")[:length])
    with pytest.raises(RunFolderError, match=r"secret\.key is damaged: restore it"):
        run_secret.read(tmp_path)


@pytest.mark.parametrize("position", range(24))
def test_one_wrong_byte_is_found(position: int, tmp_path: Path) -> None:
    run_secret.write(tmp_path, bytes(range(16)))
    path = tmp_path / "secret.key"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunFolderError, match="damaged"):
        run_secret.read(tmp_path)


def test_streams_of_secrets_differ_and_repeat() -> None:
    one, other = bytes(16), bytes(15) + b"\x01"
    key = run_secret.randomness(one).key("client", 0, "noise")
    assert key == run_secret.randomness(one).key("client", 0, "noise")
    assert key != run_secret.randomness(other).key("client", 0, "noise")


def test_keys_follow_from_the_seed_only_where_a_user_says_so(own_secrets: None) -> None:
    assert Settings().keys_from_seed is False
    with pytest.raises(UsageError, match="keys_from_seed = 'no' is a choice"):
        check_values(dataclasses.replace(Settings(), keys_from_seed="no"))  # type: ignore[arg-type]
