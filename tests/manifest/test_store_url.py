"""What a user may type as a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weightcast.manifest.store import open_store
from weightcast.manifest.store.url import parse_location
from weightcast.schemas.errors import UsageError


@pytest.mark.parametrize(
    ("given", "url", "path"),
    [
        ("s3://b/run", "s3://b/run", "b/run"),
        ("s3://b/run/", "s3://b/run", "b/run"),
        ("s3://b//run//", "s3://b/run", "b/run"),
        ("S3://b/Run", "s3://b/Run", "b/Run"),
        ("s3a://b", "s3://b", "b"),
        ("gcs://b/x", "gs://b/x", "b/x"),
        ("abfs://c/x", "az://c/x", "c/x"),
        ("abfss://c@account.dfs.core.windows.net/x", "az://c/x", "c/x"),
        ("memory://a//b/", "memory://a/b", "/a/b"),
        ("memory:///a/b", "memory://a/b", "/a/b"),
        ("/srv//run/", "file:///srv/run", "/srv/run"),
        ("file:///srv/run/", "file:///srv/run", "/srv/run"),
        ("file://localhost/srv/run", "file:///srv/run", "/srv/run"),
        ("//srv/run[1]/what?", "file:///srv/run[1]/what?", "/srv/run[1]/what?"),
    ],
)
def test_b150_urls_are_normalised(given: str, url: str, path: str) -> None:
    location = parse_location(given)
    assert (location.url, location.path) == (url, path)


def test_folders_relative_to_here_and_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_location("runs/a").path == f"{tmp_path}/runs/a"
    assert parse_location("../a").path == f"{tmp_path.parent}/a"
    assert parse_location("~/a").path == "/home/someone/a"
    assert open_store(tmp_path / "x").url == f"file://{tmp_path}/x"


def test_an_azure_account_in_the_url_is_kept() -> None:
    assert parse_location("abfs://c@acct.dfs.core.windows.net/x").account == "acct"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("gs:///x", "names no bucket"),
        ("memory://", "names no place"),
        ("file://", "not absolute"),
        ("file://relative/x", "not absolute"),
        ("/", "root folder"),
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("http://host/x", "unknown scheme 'http'"),
        ("s3:bucket/x", "two slashes"),
        ("s3://b/../c", "'..'"),
        ("s3://b/x?versionId=1", "object version"),
        ("simplecache::s3://b/x", "chain"),
        ("s3://b/x::file:///y", "chain"),
        ("s3://b/x\n", "control characters"),
    ],
)
def test_b154_unusable_urls_are_refused_in_one_line_that_names_the_option(url: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, option="--to")
    assert caught.value.message.startswith("--to ")
    assert says in caught.value.message
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("url", "module", "says"),
    [
        ("gs://b/x", "gcsfs", "weightcast[gcs]"),
        ("az://c/x", "adlfs", "weightcast[azure]"),
        ("s3://b/x", "s3fs", "weightcast"),
    ],
)
def test_b154_a_missing_plugin_is_named(url: str, module: str, says: str) -> None:
    """In a process of its own, where the plugin cannot be imported."""
    program = f"""
import sys
sys.modules[{module!r}] = None
from weightcast.manifest.store import open_store
from weightcast.schemas.errors import UsageError
try:
    open_store({url!r}, option="--to")
except UsageError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"--to {url} needs the package {module}, which is not installed")
    assert f"pip install '{says}'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["C:\\store\\run", "C:/store/run", "file:///C:/store/run", "\\\\host\\share", "s3://b/a\\b"]
)
def test_b161_windows_paths_are_refused_in_one_line(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


def test_b161_keys_do_not_follow_the_platforms_path_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The separator of keys is `/` whatever `os.sep` is."""
    store = open_store("memory://b161")
    monkeypatch.setattr(os, "sep", "\\")
    monkeypatch.setattr(os, "altsep", "/")
    store.put("versions/1.json", b"1")
    assert [e.key for e in store.list("versions/")] == ["versions/1.json"]
    store.delete("versions/1.json")


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="credentials") as caught:
        open_store("s3://AKIAKEY:geheim@bucket/x")
    assert "geheim" not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)
