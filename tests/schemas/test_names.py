"""Names and keys: what comes from a store never becomes a path unchecked."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.schemas.errors import Untrusted, UsageError
from weightcast.schemas.names import (
    check_file_name,
    check_key,
    check_sha256,
    check_tensor_name,
    check_token,
    file_key,
    is_probe_key,
    is_reader_key,
    is_shard_key,
    layout_key,
    parse_data_key,
    parse_snapshot_file_key,
    parse_snapshot_manifest_key,
    parse_version_key,
    shard_key,
    snapshot_folder,
    snapshot_manifest_key,
    version_key,
)

TOKEN, SHA = "0123456789abcdef" * 2, "0123456789abcdef" * 4
BAD_KEYS = [
    "",
    "/",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/..",
    "a/./b",
    ".",
    "..",
    ".hidden",
    "a//b",
    "a/",
    "C:x",
    "C:\\x",
    "\\\\host\\s\\x",
    "a\\b",
    "x\x00y",
    "a%2e%2e/b",
    "http://127.0.0.1:1/x",
    "s3://other/x",
    "file:///etc/hosts",
    "simplecache::file:///x",
    "a b",
    "a\n",
    "a\nb",
    "a\t",
    "é",
    "a/重",
    "run[1]",
    "what?",
    "a*",
    "~x",
    "$HOME",
    "-rf",
    "a" * 513,
    "a/" * 256 + "a",
    "x\ud800",
    "a\x7f",
    "a\u202eb",
    "٣",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_b164_b172_keys_that_are_no_plain_paths(key: str) -> None:
    """B164, B172: traversal, absolute paths, drives, URLs, patterns, control characters."""
    with pytest.raises(Untrusted, match="not a plain relative path"):
        check_key(key)


@pytest.mark.parametrize("name", [*BAD_KEYS, "a/b", "n" * 256])
def test_b164_file_names(name: str) -> None:
    if re.fullmatch(r"[a-z]{256,}", name) or name in BAD_KEYS or "/" in name:
        with pytest.raises(Untrusted, match="not a plain name"):
            check_file_name(name)


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", "_x", "n" * 255])
def test_plain_file_names(name: str) -> None:
    assert check_file_name(name) == name


@given(st.text(max_size=40))
def test_a_key_stays_below_its_root(key: str) -> None:
    """Whatever passes stays below the root on any platform, and is not changed by normalising."""
    try:
        check_key(key)
    except Untrusted:
        return
    assert os.path.normpath(os.path.join("/root", key)) == f"/root/{key}"
    assert key.isascii()
    assert not set(key) & set("\\:*?[]%\0\n ")


@pytest.mark.parametrize(
    "name", ["n" * 300, "重" * 200, "a/b/c", "..", "a\nb", "\x1b[0m", "é.重み", "x" * 1024]
)
def test_b035_tensor_names_that_are_carried(name: str) -> None:
    """B035: names are only ever values in tables, so almost anything will do."""
    assert check_tensor_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is empty"),
        ("x\0y", "NUL"),
        ("x" * 1025, "1025 bytes"),
        ("重" * 342, "1026 bytes"),
        ("\ud800", "Unicode"),
        ("__metadata__", "reserved"),
    ],
)
def test_b035_b038_b164_tensor_names_that_are_not(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        check_tensor_name(name)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("bad", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64, "0" * 64 + "\n", "٠" * 64])
def test_hashes_and_tokens(bad: str) -> None:
    with pytest.raises(ValueError, match="not a SHA-256"):
        check_sha256(bad)
    for token in (bad, TOKEN + "\n", TOKEN[1:], TOKEN.upper(), "٠" * 32):
        with pytest.raises(ValueError, match="not a token"):
            check_token(token)
    assert (check_sha256(SHA), check_token(TOKEN)) == (SHA, TOKEN)


versions = st.integers(0, 10**12 - 1)


@given(versions, st.none() | st.just(TOKEN), st.integers(0, 99_999))
def test_keys_parse_to_what_they_were_made_of(version: int, token: str | None, part: int) -> None:
    shard, folder = shard_key(version, "writer-1.a_b", part, TOKEN), snapshot_folder(version, token)
    assert parse_version_key(version_key(version)) == version
    assert parse_data_key(shard) == version
    assert is_shard_key(shard)
    assert parse_snapshot_manifest_key(snapshot_manifest_key(folder)) == (version, token)
    assert parse_snapshot_file_key(f"{folder}/config.json") == (version, token, "config.json")
    for key in (shard, snapshot_manifest_key(folder), version_key(version), layout_key(SHA), file_key(SHA)):
        assert check_key(key) == key


def test_keys_sort_like_versions() -> None:
    assert sorted(map(version_key, [10, 9, 100, 0])) == list(map(version_key, [0, 9, 10, 100]))


@pytest.mark.parametrize(
    "key",
    [
        "versions/1.json",
        "versions/0000000000001.json",
        "versions/000000000001.json.tmp",
        "x/versions/000000000001.json",
        "versions/000000000001.json\n",
        "versions/٠٠٠٠٠٠٠٠٠٠٠١.json",
        "data/000000000001",
        "data/000000000001/x",
        "data/1/x.arrow",
        "snapshots/000000000001",
        "snapshots/000000000001-x/manifest.json",
        "snapshots/000000000001/a/manifest.json",
        f"snapshots/000000000001-{TOKEN}x/manifest.json",
        "probe",
        "readers/x.json",
        f"readers/{TOKEN}.json.bak",
    ],
)
def test_other_keys_are_nothing(key: str) -> None:
    assert parse_version_key(key) is None
    assert parse_data_key(key) is None
    assert not is_shard_key(key)
    assert parse_snapshot_manifest_key(key) is None
    assert parse_snapshot_file_key(key) is None
    assert not is_probe_key(key)
    assert not is_reader_key(key)


def test_hints_and_left_overs() -> None:
    assert is_reader_key(f"readers/{TOKEN}.json")
    assert is_probe_key(f"probe/{TOKEN}")
    assert is_probe_key(f"probe/{TOKEN}/race/1")
    assert not is_probe_key(f"probe/{TOKEN}/../x")
