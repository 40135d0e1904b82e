"""The chain of trust: each rule broken in turn, by a publisher whose documents can be edited and replayed."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from weightcast.manifest.chain import TrustedChain
from weightcast.manifest.store import open_store
from weightcast.schemas.errors import Unsupported, Untrusted
from weightcast.schemas.manifest import MAX_MANIFEST_BYTES
from weightcast.schemas.names import version_key

from .author import Author, Tensors

START = Tensors.of(w=("BF16", [1, 2, 3, 4]))


def write(versions: int = 4) -> tuple[Author, list[bytes]]:
    """A stream, and the bytes of its manifests."""
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    author.reset(START)
    for v in range(1, versions):
        author.publish(author.tensors[-1].changed("w", (0, 100 + v)))
    documents = [author.reader.manifest_bytes(v) for v in range(versions)]
    return author, [d for d in documents if d is not None]


@pytest.fixture(scope="module")
def stream() -> tuple[Author, list[bytes]]:
    return write()


def at(stream: tuple[Author, list[bytes]], version: int) -> TrustedChain:
    author, documents = stream
    chain = author.reader.chain()
    chain.anchor(documents[version], version)
    return chain


def edited(data: bytes, **fields: Any) -> bytes:
    """The document with fields replaced, or removed (...)."""
    document = {**json.loads(data), **fields}
    return json.dumps({k: v for k, v in document.items() if v is not ...}).encode()


def test_follows_a_sound_chain(stream: tuple[Author, list[bytes]]) -> None:
    author, documents = stream
    chain = at(stream, 0)
    for version in range(1, 4):
        position = chain.extend(documents[version])
        assert position == author.positions[version]
        assert position.sha256 == hashlib.sha256(documents[version]).hexdigest()
        assert position.as_parent.version == version
    assert chain.at == author.positions[3]


def test_anchors_anywhere_and_checks_what_is_remembered(stream: tuple[Author, list[bytes]]) -> None:
    author, documents = stream
    chain = author.reader.chain()
    assert chain.anchor(documents[2], 2, sha256=author.positions[2].sha256).version == 2
    with pytest.raises(Untrusted, match="history was rewritten"):
        chain.anchor(documents[3], 3, sha256="0" * 64)
    assert chain.at == author.positions[2]


def test_extending_without_an_anchor_is_refused(stream: tuple[Author, list[bytes]]) -> None:
    with pytest.raises(Untrusted, match="no anchor"):
        stream[0].reader.chain().extend(stream[1][0])


def refuse(chain: TrustedChain, data: bytes, match: str, kind: type[Untrusted] = Untrusted) -> None:
    """Assert that a chain refuses a document and stays where it was."""
    before = chain.at
    with pytest.raises(kind, match=match):
        chain.extend(data)
    assert chain.at is before


def test_rollback_and_freeze(stream: tuple[Author, list[bytes]]) -> None:
    for replayed in (0, 1, 2):
        refuse(at(stream, 2), stream[1][replayed], f"holds the manifest of version {replayed}")


def test_a_version_too_far(stream: tuple[Author, list[bytes]]) -> None:
    refuse(at(stream, 1), stream[1][3], "holds the manifest of version 3")


def test_b113_mix_and_match_of_two_streams(stream: tuple[Author, list[bytes]]) -> None:
    """B113: two runs of equal names, shapes and even bits; the next version of the other one."""
    other, documents = write()
    refuse(at(stream, 2), documents[3], f"belongs to stream {other.reader.stream.stream}")
    # The same, by somebody who rewrote the stream id: the hash chain still differs.
    forged = edited(documents[3], stream=stream[0].reader.stream.stream)
    refuse(at(stream, 2), forged, "follows a manifest with SHA-256")


def test_wrong_parent(stream: tuple[Author, list[bytes]]) -> None:
    parent = {"version": 2, "sha256": "0" * 64}
    refuse(at(stream, 2), edited(stream[1][3], parent=parent), "0000 here|version 2 here has")
    refuse(
        at(stream, 2), edited(stream[1][3], parent={"version": 1, "sha256": "0" * 64}), "parent of version 3"
    )
    refuse(at(stream, 2), edited(stream[1][3], parent=...), "no parent")


def test_wrong_digest(stream: tuple[Author, list[bytes]]) -> None:
    refuse(at(stream, 2), edited(stream[1][3], digest_before="0" * 32), "starts from state 0000")
    refuse(at(stream, 2), edited(stream[1][3], digest_before="x" * 32), "not a digest")


def test_a_changed_manifest_breaks_the_one_after_it(stream: tuple[Author, list[bytes]]) -> None:
    chain = at(stream, 1)
    chain.extend(edited(stream[1][2], metadata={"note": "altered"}))
    refuse(chain, stream[1][3], "follows a manifest with SHA-256")


def test_unknown_format_or_feature_is_named(stream: tuple[Author, list[bytes]]) -> None:
    refuse(at(stream, 2), edited(stream[1][3], format=2), "needs format 2", Unsupported)
    refuse(at(stream, 2), edited(stream[1][3], features=["colour"]), "colour", Unsupported)
    for odd in ([[]], [{}], [1], [None], ["x" * 10_000] * 100):  # not even text, or no end of it
        refuse(at(stream, 2), edited(stream[1][3], features=odd), "needs features", Unsupported)
    refuse(
        at(stream, 2),
        edited(stream[1][3], format=2, shape_of_things=1, parent=...),
        "needs format 2",
        Unsupported,
    )
    refuse(
        at(stream, 2),
        edited(stream[1][3], format=2, files={"key": "../x", "size": 1, "sha256": "0" * 64}),
        "format 2",
        Unsupported,
    )


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "unknown key": lambda d: edited(d, colour=1),
    "unknown key inside": lambda d: edited(d, totals={**json.loads(d)["totals"], "x": 1}),
    "duplicate key": lambda d: d[:-1] + b',"step":1,"step":2}',
    "duplicate key inside": lambda d: edited(d, metadata=...)[:-1] + b',"metadata":{"a":1,"a":2}}',
    "NaN": lambda d: edited(d, metadata=...)[:-1] + b',"metadata":{"a":NaN}}',
    "infinity": lambda d: edited(d, metadata=...)[:-1] + b',"metadata":{"a":1e999}}',
    "5,000 digits": lambda d: edited(d, step=...)[:-1] + b',"step":' + b"9" * 5000 + b"}",
    "5,000 digits in metadata": lambda d: (
        edited(d, metadata=...)[:-1] + b',"metadata":{"a":' + b"9" * 5000 + b"}}"
    ),
    "step beyond 64 bits": lambda d: edited(d, step=1 << 63),
    "100,000 brackets": lambda d: (
        edited(d, metadata=...)[:-1] + b',"metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    ),
    "brackets alone": lambda d: b"[" * 100_000,
    "a string for a number": lambda d: edited(d, version="3"),
    "a float for a number": lambda d: edited(d, version=3.0),
    "a bool for a number": lambda d: edited(d, step=True),
    "negative count": lambda d: edited(d, totals={**json.loads(d)["totals"], "elements": -1}),
    "wrong total of bytes": lambda d: edited(d, totals={**json.loads(d)["totals"], "bytes": 1}),
    "wrong total of changes": lambda d: edited(d, totals={**json.loads(d)["totals"], "changed": 4}),
    "another kind": lambda d: edited(d, kind="snapshot"),
    "reset with shards": lambda d: edited(d, reset=True),
    "snapshot without reset": lambda d: edited(
        d, snapshot={"key": f"snapshots/{3:012d}/manifest.json", "size": 1, "sha256": "0" * 64}
    ),
    "too much metadata": lambda d: edited(d, metadata={"a": "x" * 70_000}),
    "not UTF-8": lambda d: edited(d, writer=...)[:-1] + b',"writer":"\xff"}',
    "UTF-16": lambda d: d.decode().encode("utf-16"),
    "empty": lambda d: b"",
    "cut": lambda d: d[:-1],
    "null": lambda d: b"null",
    "two documents": lambda d: d + d,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents(stream: tuple[Author, list[bytes]], name: str) -> None:
    refuse(at(stream, 2), HOSTILE[name](stream[1][3]), "not a valid VersionManifest")


def test_oversize(stream: tuple[Author, list[bytes]]) -> None:
    spaces = stream[1][3] + b" " * (MAX_MANIFEST_BYTES + 1 - len(stream[1][3]))
    refuse(at(stream, 2), spaces, "at most 8388608")
    assert at(stream, 2).extend(spaces[:-1]).version == 3


def shard(data: bytes, **fields: Any) -> bytes:
    """The document with its only shard edited."""
    shards = [{**json.loads(data)["shards"][0], **fields}]
    totals = {**json.loads(data)["totals"], "bytes": shards[0]["size"], "changed": shards[0]["changed"]}
    return edited(data, shards=shards, totals=totals)


@pytest.mark.parametrize(
    "key",
    [
        "http://127.0.0.1:1/x",
        "s3://other/x",
        "file:///etc/hosts",
        "simplecache::file:///etc/hosts",
        "/etc/hosts",
        "../x",
        "data/000000000003/../x.arrow",
        "data/000000000003/a/b.arrow",
        "data\\000000000003\\x.arrow",
        "data/000000000003/%2e%2e.arrow",
        "data/000000000003/x.arrow\n",
        "data/000000000003/x\u0000.arrow",
        "C:x",
        "\\\\host\\s\\x",
        "data/000000000002/x.arrow",
        "data/000000000003/x.pt",
        "data/٠٠٠٠٠٠٠٠٠٠٠3/x.arrow",
        "",
        "data/000000000003/" + "x" * 600 + ".arrow",
    ],
)
def test_b164_b172_shard_keys(stream: tuple[Author, list[bytes]], key: str) -> None:
    """B164, B172: traversal, absolute paths, URLs, and other versions' data."""
    refuse(at(stream, 2), shard(stream[1][3], key=key), "plain relative path|not the key of|does not belong")


def test_b167_impossible_shards(stream: tuple[Author, list[bytes]]) -> None:
    refuse(at(stream, 2), shard(stream[1][3], changed=10**15), "10{15} changes in 4 elements")
    refuse(at(stream, 2), shard(stream[1][3], size=(1 << 30) + 1), "at most 1073741824 are read")
    refuse(at(stream, 2), shard(stream[1][3], size=-1), "shards.0.size")
    twice = json.loads(stream[1][3])["shards"] * 2
    totals = {**json.loads(stream[1][3])["totals"], "bytes": 2 * twice[0]["size"], "changed": 2}
    refuse(at(stream, 2), edited(stream[1][3], shards=twice, totals=totals), "two shards have the same key")


def test_a_reset_names_a_snapshot_of_its_own_version(stream: tuple[Author, list[bytes]]) -> None:
    document = json.loads(stream[1][3])
    totals = {**document["totals"], "bytes": 0, "changed": 0}
    for key in (f"snapshots/{2:012d}/manifest.json", f"snapshots/{3:012d}-x/manifest.json", version_key(3)):
        ref = {"key": key, "size": 1, "sha256": "0" * 64}
        refuse(
            at(stream, 2),
            edited(stream[1][3], reset=True, shards=[], totals=totals, snapshot=ref),
            "not a snapshot of version 3",
        )
