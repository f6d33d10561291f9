"""Keystores: never overwritten, never readable by others, one sentence for each mistake."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import eth_keyfile
import pytest
from eth_account import Account

from prime_chain import keystore
from prime_chain.keystore import (
    create_keystore,
    keystore_address,
    load_keystore,
    open_keystore,
    read_password,
    save_keystore,
)
from prime_core.errors import UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_keystore(tmp_path / "key.json", "right", light=True)
    return tmp_path / "key.json"


def test_a_new_key_is_loaded_back_with_its_password(tmp_path: Path) -> None:
    made = create_keystore(tmp_path / "a", "correct horse", light=True)
    assert load_keystore(tmp_path / "a", "correct horse").address == made
    assert keystore_address(tmp_path / "a") == made
    assert create_keystore(tmp_path / "b", "correct horse", light=True) != made


def test_other_wallets_open_our_file_and_we_open_theirs(path: Path, tmp_path: Path) -> None:
    body = json.loads(path.read_text())
    ours = load_keystore(path, "right").address
    assert Account.from_key(Account.decrypt(body, "right")).address == ours
    for kdf, rounds in (("scrypt", 1 << 10), ("pbkdf2", 1000)):
        theirs = eth_keyfile.create_keyfile_json(b"\x07" * 32, b"right", 3, kdf, rounds)
        theirs_path = tmp_path / kdf
        theirs_path.write_text(json.dumps(theirs))
        assert load_keystore(theirs_path, "right").address == Account.from_key(b"\x07" * 32).address
        with pytest.raises(UserError, match="password does not open"):
            load_keystore(theirs_path, "wrong")


def test_the_default_key_derivation_is_the_strong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keystore, "_derived", lambda kdf, parameters, password: bytes(32))
    create_keystore(tmp_path / "a", "pw")
    parameters = json.loads((tmp_path / "a").read_text())["crypto"]["kdfparams"]
    assert (parameters["n"], parameters["r"], parameters["p"]) == (1 << 18, 8, 1)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("cipher", "aes-256-cbc"), ("kdf", "argon2"), ("mac", "zz"), ("mac", 7),
        ("ciphertext", None), ("cipherparams", []), ("kdfparams", {"n": 3, "r": 8, "p": 1}),
        ("kdfparams", {"n": 1024, "r": 8, "p": 1, "dklen": 16, "salt": "00"}),
    ],
)  # fmt: skip
def test_a_keystore_in_another_form_is_one_sentence(path: Path, where: str, value: object) -> None:
    body = json.loads(path.read_text())
    body["crypto"][where] = value
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match="is not a usable keystore"):
        load_keystore(path, "right")


def test_the_file_is_for_its_owner_alone(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_a_file_is_never_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(UserError, match="never overwritten"):
        create_keystore(path, "right", light=True)
    assert path.read_bytes() == before


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # the check was passed in time
    path.write_text("theirs")
    with pytest.raises(UserError, match="never overwritten"):
        create_keystore(path, "pw", light=True)
    assert path.read_text() == "theirs"


def test_a_wrong_password_is_one_sentence(path: Path) -> None:
    with pytest.raises(UserError, match="password does not open"):
        load_keystore(path, "wrong")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_keystore(tmp_path / "none", "pw")
    assert f"prime-node wallet new --out {tmp_path / 'none'}" in caught.value.hint


def test_a_path_that_cannot_be_looked_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("k" * 300)
    with pytest.raises(UserError, match="cannot be read") as caught:
        load_keystore(long, "pw")
    assert "restore a backup" in caught.value.hint
    with pytest.raises(UserError, match="cannot be written"):
        create_keystore(long, "pw", light=True)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("stat", "open"):  # as in a folder that may not be searched; root always may
        monkeypatch.setattr(Path, name, forbidden)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        load_keystore(tmp_path / "key", "pw")


def test_a_keystore_is_opened_from_a_pipe(path: Path, tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("right")
    reader, writer = os.pipe()
    os.write(writer, path.read_bytes())
    os.close(writer)
    try:
        found = open_keystore(Path(f"/dev/fd/{reader}"), tmp_path / "pw")
    finally:
        os.close(reader)
    assert found.address == keystore_address(path)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"version": 4}', '{"version": 3}',
        '{"version": 3, "crypto": {"kdfparams": {"n": "x"}}}',
        '{"version": 3, "crypto": {"kdfparams": {}}}',
        '{"version": 3, "crypto": []}',
        "\xff", "[" * 100_000, "x" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_keystore_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(
        UserError, match=r"is not a usable keystore|is not a valid keystore|is empty"
    ):
        load_keystore(path, "pw")


@pytest.mark.parametrize("change", [{"n": 1 << 24}, {"r": 1 << 20}, {"p": 1000}])
def test_a_key_derivation_that_would_eat_the_machine_is_refused(
    path: Path, change: dict[str, int]
) -> None:
    body = json.loads(path.read_text())
    body["crypto"]["kdfparams"].update(change)
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match="key derivation"):
        load_keystore(path, "right")


def test_a_keystore_that_names_another_address_is_refused(path: Path) -> None:
    body = json.loads(path.read_text())
    body["address"] = "00" * 20
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match="holds the key of"):
        load_keystore(path, "right")


def test_an_existing_key_can_be_stored(tmp_path: Path) -> None:
    key = bytes(31) + b"\x05"
    save_keystore(tmp_path / "a", key, "pw", light=True)
    assert load_keystore(tmp_path / "a", "pw").address == Account.from_key(key).address


def test_an_empty_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="empty password"):
        create_keystore(tmp_path / "a", "", light=True)


def test_no_key_shows_in_text(path: Path) -> None:
    signer = load_keystore(path, "right")
    key = bytes(signer.account.key).hex()
    assert key not in repr(signer) + str(signer) + str(vars(signer))


def test_a_password_file_loses_one_newline_only(tmp_path: Path) -> None:
    file = tmp_path / "pw"
    file.write_bytes(b" spaces stay \r\n")
    assert read_password(file) == " spaces stay "
    file.write_bytes(b"two\n\n")
    assert read_password(file) == "two\n"


def test_a_password_is_read_from_a_descriptor(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"secret\n")
    os.close(writer)
    assert read_password(password_fd=reader) == "secret"


@pytest.mark.parametrize(
    ("content", "why"), [(b"\n", "empty"), (b"\xff\n", "not UTF-8"), (b"x" * 5000, "exceeds")]
)
def test_an_unusable_password_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "pw"
    file.write_bytes(content)
    with pytest.raises(UserError, match=why):
        read_password(file)


def test_a_missing_password_file_or_descriptor_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no password file"):
        read_password(tmp_path / "none")
    with pytest.raises(UserError, match="descriptor 987"):
        read_password(password_fd=987)
    with pytest.raises(UserError, match="not both"):
        read_password(tmp_path / "none", 3)


def test_without_terminal_or_file_it_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(UserError) as caught:
        read_password()
    assert "--password-file" in caught.value.hint


def test_a_typed_password_is_asked_twice_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", "two", "same", "same"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(keystore.getpass, "getpass", lambda prompt: next(typed))
    with pytest.raises(UserError, match="differ"):
        read_password(confirm=True)
    assert read_password(confirm=True) == "same"
