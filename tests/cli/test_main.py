"""The command as a process: start-up, streams, exit codes, signals, encodings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from weightcast.cli.main import COMMANDS
from weightcast.manifest.commit import commit, create_stream, new_token, put_layout
from weightcast.manifest.store import open_store
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import FORMAT, ObjectRef, Totals, VersionManifest
from weightcast.schemas.names import snapshot_folder, snapshot_manifest_key

from .. import sample
from .conftest import Outcome, command, finish, spawn

Cli = Callable[..., Outcome]

HEAVY = ("torch", "numba", "pyarrow", "pydantic", "s3fs", "rich")


def _imported(*lines: Sequence[object]) -> set[str]:
    """Which of the heavy packages some command lines import, run one after the other in a fresh process."""
    code = (
        "import json, sys; from weightcast.cli.main import run; codes = [run(a) for a in json.loads(sys.argv[1])];"
        f"sys.stderr.write(' '.join(m for m in {HEAVY!r} if m in sys.modules)); sys.exit(max(codes))"
    )
    arguments = json.dumps([[str(a) for a in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", code, arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stderr.split())


def test_help_imports_nothing_heavy() -> None:
    assert _imported(["--help"], ["--version"], ["log", "--help"], ["publish", "--help"]) == set()


def test_queries_import_neither_torch_nor_kernels(root: Path) -> None:
    assert not _imported(["log", root], ["status", root], ["show", root, 1]) & {
        "torch",
        "numba",
        "s3fs",
        "rich",
    }


def test_reading_never_imports_torch(copy: Path, tmp_path: Path) -> None:
    lines = [
        ["show", copy, 1, "--tensors"],
        ["verify", copy, "--deep"],
        ["diff", copy, 0, 1],
        ["pull", copy, tmp_path / "pulled"],
        ["snapshot", copy],
        ["subscribe", copy, "--into", tmp_path / "model", "--once"],
        ["prune", copy, "--keep", 1, "--grace", 0],
    ]
    assert not _imported(*lines) & {"torch"}


def test_help_is_fast() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert finish(spawn("--help")).code == 0
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


def test_help_lists_every_command(cli: Cli) -> None:
    outcome = cli("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert all(f"  {name} " in outcome.out for name in COMMANDS)
    for name in COMMANDS.keys() - {"demo", "bench"}:
        assert cli(name, "--help").code == 0


def test_version(cli: Cli) -> None:
    from importlib.metadata import version

    assert cli("--version").out == f"weightcast {version('weightcast')}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ""),
        (["log"], "ROOT"),
        (["show", "s"], "VERSION"),
        (["diff", "s", "1"], "B"),
        (["pull", "s"], "DIR"),
        (["publish"], "ROOT"),
        (["publish", "s"], "CHECKPOINT_DIR"),
        (["publish", "s", "c", "--watch", "w"], "--watch"),
        (["publish", "s", "c", "--marker", "done"], "--marker"),
        (["publish", "s", "--watch", "w", "--step", "3"], "--step"),
        (["publish", "s", "--watch", "w", "--json"], "--json"),
        (["publish", "s", "c", "--cast", "x"], "--cast"),
        (["publish", "s", "c", "--metadata", "=1"], "--metadata"),
        (["subscribe", "s"], "--into"),
        (["subscribe", "s", "--into", "d", "--once", "--http", ":1"], "--http"),
        (["log", "s", "--limit", "0"], "--limit"),
        (["log", "s", "--nonsense"], "--nonsense"),
        (["log", "s", "--addressing", "x"], "--addressing"),
        (["nonsense"], "nonsense"),
    ],
)
def test_b230_missing_and_clashing_options_are_named_before_any_work(
    arguments: list[str], named: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert named in (outcome.err + outcome.out)
    assert list(tmp_path.iterdir()) == []
    if arguments:
        assert outcome.out == "" or "--json" in arguments
        assert outcome.err.startswith("weightcast: error: ")


@pytest.mark.parametrize("root", ["", "s3://", "s3:///x", "nonsense://x/y", "az://c/x"])
@pytest.mark.parametrize("name", ["publish", "log"])
def test_b154_a_bad_root_is_one_line_that_names_it(
    name: str, root: str, cli: Cli, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)  # as if it were not installed
    outcome = cli(name, root, *([checkpoints / "checkpoint-0"] if name == "publish" else []))
    lines = outcome.err.splitlines()
    assert outcome.code == 2
    assert lines[0].startswith("weightcast: error: ROOT")
    assert [line.startswith("weightcast: hint: ") for line in lines[1:]] == [True]
    if root.startswith("az"):
        assert "adlfs" in lines[0]


def test_errors_are_one_line_with_the_kinds_exit_code(tmp_path: Path, copy: Path, cli: Cli) -> None:
    assert cli("log", tmp_path / "nothing").code == 10
    assert cli("show", copy, 99).code == 10
    sample.flip(sample.shard_path(copy, 1))
    assert cli("show", copy, 1, "--tensors").code == 13
    sample.manifest_path(copy, 2).write_bytes(b"{")
    outcome = cli("log", copy)
    assert (outcome.code, outcome.out) == (12, "")
    assert outcome.err.count("weightcast: error: ") == 1
    assert "Traceback" not in outcome.err


def test_bugs_are_one_line_too_and_a_traceback_on_request(
    copy: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("first\nsecond \x1b[31m")

    monkeypatch.setattr("weightcast.manifest.stream.StreamReader.open", broken)
    plain = cli("log", copy)
    assert plain.code == 1
    assert plain.err.splitlines()[0] == r"weightcast: error: RuntimeError: first\nsecond \x1b[31m"
    assert "Traceback" not in plain.err
    assert cli("log", copy, "--json").json["error"]["kind"] == "failure"
    assert "Traceback" in cli("--debug", "log", copy).err
    assert "Traceback" in cli("log", copy, "--debug").err
    monkeypatch.setenv("WEIGHTCAST_DEBUG", "1")
    assert "Traceback" in cli("log", copy).err


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream with 100,000 tensors, some of them with names that are no fun."""
    folder = tmp_path_factory.mktemp("wide") / "stream"
    names = [f"layers.{i:06d}.weight" for i in range(100_000)] + ["é.重み", "line\nbreak", "esc\x1b[2J"]
    layout = Layout.of(TensorSpec(name, "BF16", (1,)) for name in names)
    reader = create_stream(open_store(str(folder)), single_writer=True)
    key = snapshot_manifest_key(snapshot_folder(0, new_token()))
    manifest = VersionManifest(
        format=FORMAT,
        stream=reader.stream.stream,
        version=0,
        reset=True,
        snapshot=ObjectRef(key=key, size=1, sha256="0" * 64),
        layout=put_layout(reader.store, layout),
        digest_after="0" * 32,
        totals=Totals(elements=layout.elements, changed=0, bytes=0, dense_bytes=layout.nbytes),
        writer="\x1b[1mwriter",
        run=new_token(),
        token=new_token(),
        time="now",
        metadata={"é": "\x1b]0;x\x07"},
    )
    commit(reader.store, manifest)
    return folder


def test_b231_output_cut_by_head_ends_quietly(wide: Path) -> None:
    process = spawn("show", wide, 0, "--tensors")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "version   0\n"
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == ""


def test_b226_names_are_escaped_for_any_terminal(wide: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    outcome = finish(spawn("show", wide, 0, "--tensors", env=ascii_only))
    assert (outcome.code, outcome.err) == (0, "")
    names = {line.split("\t")[0] for line in outcome.out.splitlines()}
    assert {r"\xe9.\u91cd\u307f", r"line\nbreak", r"esc\x1b[2J"} <= names
    assert outcome.out.isascii()
    assert not any(ord(c) < 32 for c in outcome.out.replace("\n", "").replace("\t", ""))
    document = finish(spawn("show", wide, 0, "--tensors", "--json", env=ascii_only)).json
    assert {"é.重み", "line\nbreak", "esc\x1b[2J"} <= {t["name"] for t in document["tensors"]}
    assert document["metadata"] == {"é": "\x1b]0;x\x07"}


def test_a_terminal_gets_a_table(root: Path) -> None:
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*command(), "log", str(root)], stdout=child, env=os.environ | {"COLUMNS": "120"}
    )
    os.close(child)
    assert process.wait(60) == 0
    out = os.read(parent, 65536).decode()
    os.close(parent)
    assert "\t" not in out
    assert "trainer-a" in out
    assert len(out.splitlines()) == 1 + sample.VERSIONS


def _wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_b231_a_follower_stops_within_5_s(number: int, code: int, copy: Path, tmp_path: Path) -> None:
    process = spawn("subscribe", copy, "--into", tmp_path / "model", "--json")
    while json.loads(_wait_for_line(process))["version"] < 4:
        pass
    start = time.monotonic()
    process.send_signal(number)
    outcome = finish(process)
    assert time.monotonic() - start < 10
    assert (outcome.code, "Traceback" in outcome.err) == (code, False)


def test_cut_through_lists_what_is_not_committed(copy: Path, tmp_path: Path) -> None:
    """And says so, once, if it cannot: the folder of the next version leads nowhere."""
    loop = copy / "data" / f"{5:012d}"
    loop.symlink_to(loop)
    with spawn("subscribe", copy, "--into", tmp_path / "model", "--cut-through", "--json") as process:
        try:
            assert process.stderr is not None
            assert any("cannot list what comes next" in line for line in process.stderr)
        finally:
            process.terminate()


_SLOW = """
import sys, time
from weightcast.manifest.store.local import LocalBackend
from weightcast.cli.main import main
import weightcast.manifest.commit as commit
def put_shard(*_):
    print("uploading", flush=True)
    time.sleep(600)
import weightcast.publisher.shards as shards
shards.put_shard = put_shard
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_b231_stopping_a_publish_commits_nothing(
    number: int, code: int, copy: Path, checkpoints: Path, tmp_path: Path
) -> None:
    arguments = ["publish", str(copy), str(checkpoints / "checkpoint-30"), "--drop", "extra.bias"]
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert _wait_for_line(process) == "uploading\n"
    start = time.monotonic()
    process.send_signal(number)
    outcome = finish(process)
    assert time.monotonic() - start < 10
    assert (outcome.code, outcome.out) == (code, "")
    assert "Traceback" not in outcome.err
    assert sample.reader_of(copy).head() == 4
