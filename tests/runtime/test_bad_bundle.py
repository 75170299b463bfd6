"""Damaged bundles and unfit requests: eagle-run says one line, exits with 2 and leaves no file.

Every case runs the command itself on a copy of an exported bundle, with a trace file asked for: a request that is
refused must not even make that one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime.bundle.manifest import MANIFEST_NAME
from eagle_runtime.commands.cli import main
from patience import PATIENCE_S
from systems import posix_only

pytestmark = posix_only  # pipes, limits of addresses, and files of terabytes that take no room

IDS = ["--prompt-ids", "5,6,7"]
RUN = [sys.executable, "-m", "eagle_runtime.commands.cli"]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
TRACE = "trace.jsonl"


@pytest.fixture
def bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an EAGLE-3 bundle without a tokenizer: vocabulary 256, context 2048, 10 children per node."""
    return Path(shutil.copytree(bundle_of("eagle3"), tmp_path / "bundle"))


def run(argv: Sequence[str]) -> object:
    """The command's exit status."""
    try:
        return main(argv)
    except SystemExit as stop:  # argparse's way out
        return stop.code


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refusal(bundle: Path, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that eagle-run says, having left every file as it was."""
    before = contents(bundle.parent)
    trace = [] if "--trace" in argv else ["--trace", str(bundle.parent / TRACE)]
    status = run([str(bundle), *argv, *trace])
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("eagle-run: ") and err.index("\n") == len(err) - 1, err
    assert contents(bundle.parent) == before
    return err


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest after `change` worked on it."""
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    change(data)
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))


def seal(bundle: Path, name: str) -> None:
    """Note a damaged file's own hash, as if it had been exported like that."""
    digest = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    edit(bundle, lambda manifest: manifest["files"].update({name: digest}))


def list_as(name: str) -> Callable[[Path], None]:
    """The tokenizer's config under another path."""
    return lambda bundle: edit(
        bundle, lambda manifest: manifest["files"].update({name: manifest["files"].pop("tokenizer_config.json")})
    )


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda bundle: os.truncate(bundle / name, size)


def set_graph(part: str, ends: str, tensor: str, **spec: Any) -> Callable[[Path], None]:
    """Change what the manifest says of one input or output."""
    return lambda bundle: edit(bundle, lambda manifest: manifest[part]["graph"][ends][tensor].update(spec))


def link_outside(bundle: Path) -> None:
    shutil.move(bundle / "tokenizer_config.json", bundle.parent / "elsewhere.json")
    (bundle / "tokenizer_config.json").symlink_to(bundle.parent / "elsewhere.json")


def put(name: str, content: str = "{}") -> Callable[[Path], None]:
    """A file that the manifest does not know."""

    def damage(bundle: Path) -> None:
        (bundle / name).write_text(content)

    return damage


def pipe(name: str) -> Callable[[Path], None]:
    """In the place of a file, if it is there; whoever opens it waits for a writer that never comes."""

    def damage(bundle: Path) -> None:
        (bundle / name).unlink(missing_ok=True)
        os.mkfifo(bundle / name)

    return damage


def link_to(name: str, place: str) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        (bundle / name).unlink(missing_ok=True)
        (bundle / name).symlink_to(place)

    return damage


def grow(name: str, size: int) -> Callable[[Path], None]:
    """Append zeros that take no blocks on the disk to a file, which is created if it does not exist."""

    def damage(bundle: Path) -> None:
        (bundle / name).touch()
        os.truncate(bundle / name, size)

    return damage


def list_anew(name: str) -> Callable[[Path], None]:
    """Under a hash that nothing has: the file is refused before it is read, or the test would notice."""
    return lambda bundle: edit(bundle, lambda manifest: manifest["files"].update({name: "0" * 64}))


def swap_graphs(bundle: Path) -> None:
    """Each file is whole and listed, but in the other's place."""
    target, draft = bundle / "target", bundle / "draft"
    target.rename(bundle / "aside")
    draft.rename(target)
    (bundle / "aside").rename(draft)
    for name in ("target/model.onnx", "target/model.onnx.data", "draft/model.onnx", "draft/model.onnx.data"):
        seal(bundle, name)


DAMAGE: list[tuple[str, Sequence[Callable[[Path], object]], Sequence[str]]] = [
    ("no folder", [shutil.rmtree], ["bundle is not a folder"]),
    (
        "a file",
        [shutil.rmtree, lambda b: b.write_text("x")],
        ["bundle is not a folder", "make one of a model: eagle-export "],
    ),
    (
        "a model",
        [lambda b: (b / MANIFEST_NAME).rename(b / "config.json")],
        [f"bundle/{MANIFEST_NAME} is missing", "make one of a model: eagle-export "],
    ),
    ("empty folder", [shutil.rmtree, lambda b: b.mkdir()], [f"bundle/{MANIFEST_NAME} is missing"]),
    ("manifest cut short", [truncate(MANIFEST_NAME, 300)], [f"bundle/{MANIFEST_NAME}", "JSON"]),
    ("manifest not text", [lambda b: (b / MANIFEST_NAME).write_bytes(b"\xff\x00")], [MANIFEST_NAME, "JSON"]),
    ("manifest a list", [lambda b: (b / MANIFEST_NAME).write_text("[]")], [MANIFEST_NAME, "JSON object"]),
    ("version", [lambda b: edit(b, lambda m: m.update(schema_version=10))], [MANIFEST_NAME, "schema_version is 10"]),
    ("unknown key", [lambda b: edit(b, lambda m: m["head"].update(beam=3))], [MANIFEST_NAME, "head", "'beam'"]),
    ("missing key", [lambda b: edit(b, lambda m: m["target"].pop("context"))], [MANIFEST_NAME, "target", "'context'"]),
    ("wrong type", [lambda b: edit(b, lambda m: m["head"].update(taps="2"))], [MANIFEST_NAME, "head: taps", "'2'"]),
    ("other sizes", [lambda b: edit(b, lambda m: m["target"].update(vocab_size=300))], [MANIFEST_NAME, "logits"]),
    ("other kind", [lambda b: edit(b, lambda m: m["head"].update(kind="block"))], [MANIFEST_NAME, "block is absent"]),
    ("tree", [lambda b: edit(b, lambda m: m["tree_defaults"].update(total_token=-1))], ["total_token is -1"]),
    ("file gone", [lambda b: (b / "draft/model.onnx.data").unlink()], ["bundle/draft/model.onnx.data is missing"]),
    ("graph cut short", [truncate("target/model.onnx", 1000)], ["bundle/target/model.onnx", "SHA-256"]),
    ("weights cut short", [truncate("draft/model.onnx.data", 1000)], ["bundle/draft/model.onnx.data", "SHA-256"]),
    (
        "hash",
        [lambda b: edit(b, lambda m: m["files"].update({"target/model.onnx.data": "0" * 64}))],
        ["bundle/target/model.onnx.data", "SHA-256"],
    ),
    ("path up", [list_as("../tokenizer_config.json")], [MANIFEST_NAME, "'../tokenizer_config.json'", "leaves"]),
    ("absolute path", [list_as("/etc/hostname")], [MANIFEST_NAME, "'/etc/hostname'", "leaves"]),
    ("link outside", [link_outside], [MANIFEST_NAME, "'tokenizer_config.json'", "leaves"]),
    ("swapped graphs", [swap_graphs], ["bundle/target/model.onnx", "inputs or outputs"]),
    (
        "input of another type",
        [set_graph("target", "inputs", "tree_mask", dtype="float16")],
        ["bundle/target/model.onnx", "inputs or outputs"],
    ),
    (
        "output of no type",
        [set_graph("head", "outputs", "log_probs", dtype="?")],
        ["bundle/draft/model.onnx", "inputs or outputs"],
    ),
    (
        "sealed graph cut short",
        [truncate("target/model.onnx", 1000), lambda b: seal(b, "target/model.onnx")],
        ["bundle/target/model.onnx is not an ONNX graph (it is cut short)"],
    ),
    (
        "sealed empty graph",
        [truncate("draft/model.onnx", 0), lambda b: seal(b, "draft/model.onnx")],
        ["onnxruntime cannot load", "bundle/draft/model.onnx"],
    ),
    (
        "sealed weights cut short",
        [truncate("target/model.onnx.data", 1000), lambda b: seal(b, "target/model.onnx.data")],
        ["onnxruntime cannot load", "bundle/target/model.onnx"],
    ),
    (
        "sealed tokenizer damaged",
        [lambda b: (b / "tokenizer.json").write_text("{"), lambda b: seal(b, "tokenizer.json")],
        ["bundle/tokenizer.json"],
    ),
]

FOREIGN = [
    ("unlisted template", [put("chat_template.jinja", "{{ messages }}")], ["bundle/chat_template.jinja is not listed"]),
    ("unlisted tokenizer", [put("tokenizer.json")], ["bundle/tokenizer.json is not listed in eagle_config.json"]),
    (
        "config no longer listed",
        [lambda b: edit(b, lambda m: m["files"].pop("tokenizer_config.json"))],
        ["bundle/tokenizer_config.json is not listed"],
    ),
    ("unlisted link", [link_to("tokenizer.json", "/nowhere")], ["bundle/tokenizer.json is not listed"]),
    ("manifest a pipe", [pipe(MANIFEST_NAME)], [f"bundle/{MANIFEST_NAME} is not a regular file"]),
    ("manifest a device", [link_to(MANIFEST_NAME, "/dev/zero")], [f"bundle/{MANIFEST_NAME} is not a regular file"]),
    ("manifest of a gigabyte", [grow(MANIFEST_NAME, 1 << 30)], [f"bundle/{MANIFEST_NAME} is larger than the 16 MB"]),
    ("tokenizer a pipe", [pipe("tokenizer.json"), list_anew("tokenizer.json")], ["bundle/tokenizer.json", "regular"]),
    ("unlisted pipe", [pipe("tokenizer.json")], ["bundle/tokenizer.json is not listed"]),
    ("graph a pipe", [pipe("target/model.onnx")], ["bundle/target/model.onnx", "not a regular file"]),
    ("weights a pipe", [pipe("draft/model.onnx.data")], ["bundle/draft/model.onnx.data", "not a regular file"]),
    (
        "tokenizer of a terabyte",
        [grow("tokenizer.json", 1 << 40), list_anew("tokenizer.json"), grow("tokenizer.json", 1 << 41)],
        ["bundle/tokenizer.json is larger than the 1048576 MB"],
    ),
]

WILD = [  # (place in the manifest, number, what is said)
    (
        "tree_defaults",
        {"total_token": 10**9, "depth": 10**9},
        "tree_defaults: total_token is 1000000000, but must be 2",
    ),
    ("tree_defaults", {"total_token": 1025}, "tree_defaults: total_token is 1025, but must be 2 to 1024"),
    ("tree_defaults", {"depth": 64}, "tree_defaults: depth is 64, but must be 0 to 63"),
    ("tree_defaults", {"depth": -1}, "tree_defaults: depth is -1"),
    ("tree_defaults", {"draft_top_k": 0}, "tree_defaults: draft_top_k is 0"),
    ("tree_defaults", {"draft_top_k": 10**12}, "tree_defaults: draft_top_k is 1000000000000"),
    ("target", {"context": 10**15}, "target: context is 1000000000000000, but must be 1 to 1073741824"),
    ("target", {"context": 0}, "target: context is 0"),
    ("target", {"eos_token_ids": [1, -1]}, "target: eos_token_ids is -1"),
    ("head", {"draft_vocab_size": 10**18}, "draft: draft_vocab_size is 1000000000000000000"),
    ("head", {"taps": [10**18]}, "draft: taps is 1000000000000000000"),
]

REQUESTS: list[tuple[list[str], str]] = [
    ([*IDS, "--prompt-ids", "5,256"], "prompt id 256 at position 1 is outside the vocabulary of 256"),
    (["--prompt-ids=-1,5"], "prompt id -1 at position 0"),
    (["--prompt-ids", "9" * 30], "outside the vocabulary of 256"),
    (["--prompt-ids", ""], "--prompt-ids"),
    (["--prompt-ids", "1,,2"], "'1,,2'"),
    (
        ["--prompt-ids", ",".join(["5"] * 2048)],
        "the prompt has 2048 tokens, but the context holds 2048 with the output, and this model serves no more",
    ),
    ([*IDS, "--context", "3"], "holds 3 with the output; shorten it or load with a larger context (this model serves"),
    (["--prompt", "hello"], "bundle has no tokenizer.json"),
    (["--prompt", ""], "bundle has no tokenizer.json"),
    ([], "--prompt"),
    ([*IDS, "--prompt", "hello"], "--prompt"),
    ([*IDS, "--context", "2049"], "context is 2049, but this model serves 2 to 2048"),
    ([*IDS, "--context", "1"], "context is 1"),
    ([*IDS, "--context", "-1"], "context is -1"),
    ([*IDS, "--max-new-tokens", "0"], "max_new_tokens is 0"),
    ([*IDS, "--draft-top-k", "65"], "65 children per node, but the bundle's head computes 44"),
    ([*IDS, "--draft-top-k", "0"], "draft_top_k is 0"),
    ([*IDS, "--total-token", "1"], "total_token is 1"),
    ([*IDS, "--total-token", "-7"], "total_token is -7"),
    ([*IDS, "--tree", "chain", "--total-token", "0"], "total_token is 0"),
    ([*IDS, "--depth", "-1"], "depth is -1"),
    ([*IDS, "--depth", "1000000"], "depth is 1000000, but must be between 0 and 63"),
    ([*IDS, "--depth", "60"], "600 rows, but the head has room for 512"),
    ([*IDS, "--tree", "bush"], "'bush'"),
    ([*IDS, "--method", "magic"], "'magic'"),
    ([*IDS, "--temperature", "-1"], "temperature is -1.0"),
    ([*IDS, "--temperature", "nan"], "temperature is nan"),
    ([*IDS, "--temperature", "inf"], "temperature is inf"),
    ([*IDS, "--temperature", "warm"], "'warm'"),
    ([*IDS, "--top-p", "0"], "top_p is 0.0"),
    ([*IDS, "--top-p", "1.5"], "top_p is 1.5"),
    ([*IDS, "--top-p", "nan"], "top_p is nan"),
    ([*IDS, "--top-k", "-1"], "top_k is -1"),
    ([*IDS, "--min-p", "2"], "min_p is 2.0"),
    ([*IDS, "--repetition-penalty", "0"], "repetition_penalty is 0.0"),
    ([*IDS, "--presence-penalty", "nan"], "presence_penalty is nan"),
    ([*IDS, "--frequency-penalty", "inf"], "frequency_penalty is inf"),
    ([*IDS, "--seed", "-1"], "seed is -1"),
    ([*IDS, "--seed", str(2**64)], f"seed is {2**64}"),
    ([*IDS, "--logit-bias", "256=1"], "logit_bias"),
    ([*IDS, "--logit-bias", "5=nan"], "logit_bias of token 5 is nan"),
    ([*IDS, "--logit-bias", "five"], "'five'"),
    ([*IDS, "--stop-token-ids", "x"], "--stop-token-ids"),
    ([*IDS, "--backend", "abacus"], "backend 'abacus' is unknown"),
    ([*IDS, "--threads", "0"], "threads is 0"),
    ([*IDS, "--threads", "-2"], "threads is -2"),
    ([*IDS, "--threads", "1000000"], "threads is 1000000"),
    ([*IDS, "--no-such-option"], "--no-such-option"),
]


def test_the_undamaged_bundle_runs(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the cases below damage is sound, and a request that is served does write its trace."""
    trace = bundle.parent / TRACE
    assert run([str(bundle), *IDS, "--max-new-tokens", "4", "--json", "--trace", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert (len(json.loads(out)["token_ids"]), err) == (4, "")
    assert trace.read_text().count("\n") == json.loads(out)["usage"]["target_passes"]


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in DAMAGE], ids=[case[0] for case in DAMAGE])
def test_a_damaged_bundle(
    bundle: Path,
    damage: Sequence[Callable[[Path], object]],
    says: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for step in damage:
        step(bundle)
    message = refusal(bundle, IDS, capsys)
    for words in says:
        assert words in message.replace(f"{bundle.parent}/", "")


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in FOREIGN], ids=[case[0] for case in FOREIGN])
def test_files_that_are_not_the_bundles(
    bundle: Path, damage: Sequence[Callable[[Path], object]], says: Sequence[str]
) -> None:
    """In a process of its own, with little memory and time: a pipe is waited for without end, and a file may be
    larger than any memory."""
    for step in damage:
        step(bundle)
    message = bounded(bundle, *IDS)
    for words in says:
        assert words in message.replace(f"{bundle.parent}/", "")


@pytest.mark.parametrize(("part", "numbers", "says"), WILD, ids=[case[2].split(",")[0] for case in WILD])
def test_numbers_beyond_any_model(bundle: Path, part: str, numbers: dict[str, Any], says: str) -> None:
    edit(bundle, lambda manifest: manifest[part].update(numbers))
    assert says in bounded(bundle, *IDS)


def test_a_context_beyond_the_memory(bundle: Path) -> None:
    """The model's own may be any; what a load asks for must fit, and is not asked for otherwise."""
    edit(bundle, lambda manifest: manifest["target"].update(context=1 << 30))
    message = bounded(bundle, *IDS, "--context", str(1 << 30))
    assert "a context of 1073741824 tokens takes" in message and "of memory and swap" in message
    assert run([str(bundle), *IDS, "--max-new-tokens", "2"]) == 0  # 4096 of them


def bounded(bundle: Path, *argv: str) -> str:
    """The one line that eagle-run says in a process that may take 16 GB of addresses and a minute."""
    import resource

    def restrain() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))

    done = subprocess.run(
        [*RUN, str(bundle), *argv], capture_output=True, text=True, timeout=PATIENCE_S, check=False, preexec_fn=restrain
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr[-500:]
    return done.stderr


@pytest.mark.parametrize(("argv", "says"), REQUESTS, ids=[" ".join(argv)[:50] or "no prompt" for argv, _ in REQUESTS])
def test_an_unfit_request(bundle: Path, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(bundle, argv, capsys)


def test_prompt_files(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing, a folder, not UTF-8."""
    (bundle.parent / "latin1.txt").write_bytes("na\xefve".encode("latin-1"))
    for name, says in (("absent.txt", "No such file"), ("bundle", "Is a directory"), ("latin1.txt", "utf-8")):
        path = str(bundle.parent / name)
        message = refusal(bundle, ["--prompt-file", path], capsys)
        assert message.count(path) == 1 and says in message and "give another file" in message


def test_an_empty_prompt(bundle: Path, golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(golden / "byte_tokenizer.json", bundle / "tokenizer.json")
    seal(bundle, "tokenizer.json")
    (bundle.parent / "empty.txt").write_text("")
    assert "the prompt is empty" in refusal(bundle, ["--prompt", ""], capsys)
    assert "the prompt is empty" in refusal(bundle, ["--prompt-file", str(bundle.parent / "empty.txt")], capsys)


def test_trace_files(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In no folder, a folder itself, an empty name."""
    for path in (bundle.parent / "absent" / TRACE, bundle, ""):
        message = refusal(bundle, [*IDS, "--trace", str(path)], capsys)
        assert f"trace file {path} cannot be written" in message


@pytest.mark.parametrize("extreme", [["--temperature", "1e-320"], ["--repetition-penalty", "1e-320"]])
def test_scores_that_overflow(bundle: Path, extreme: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers that are fit each for itself, and leave nothing to draw from."""
    status = run([str(bundle), *IDS, "--json", "--temperature", "1", *extreme])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("eagle-run: no token is left to draw at position ") and err.count("\n") == 1


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_no_token_is_left(bundle: Path, temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    banned = [word for token in range(256) for word in ("--logit-bias", f"{token}=-inf")]
    status = run([str(bundle), *IDS, "--temperature", temperature, *banned])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert "no token is left to draw at position 3" in err and err.count("\n") == 1


@pytest.mark.parametrize("tokens", ["4", "200"])
def test_a_full_disk_under_the_trace(bundle: Path, tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Few lines fail when the file is closed, many when they are written."""
    status = run([str(bundle), *IDS, "--json", "--ignore-eos", "--max-new-tokens", tokens, "--trace", "/dev/full"])
    err = capsys.readouterr().err
    assert (status, err) == (2, "eagle-run: trace file /dev/full cannot be written (No space left on device)\n")


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_full_disk_under_the_output(bundle: Path, form: list[str]) -> None:
    """The interpreter flushes once more when it ends, and must not complain a second time."""
    command = [*RUN, str(bundle), *IDS, "--max-new-tokens", "4", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED, check=False)
    assert (done.returncode, done.stderr) == (2, "eagle-run: the output failed (No space left on device)\n")


def test_closed_streams(bundle: Path) -> None:
    """Of standard error nothing is said; an answer that nobody gets is an error; a closed input is an empty one."""

    def closed(number: int, *options: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-c", f'exec "$@" {number}>&-', "bash", *RUN, str(bundle), *options]
        return subprocess.run(shell, capture_output=True, text=True, env=BUFFERED, check=False, timeout=PATIENCE_S)

    asked = [*IDS, "--max-new-tokens", "4"]
    silent = closed(2, *asked)
    assert silent.returncode == 0 and silent.stdout.strip() and silent.stderr == ""
    lost = closed(1, *asked)
    assert (lost.returncode, lost.stderr) == (2, "eagle-run: the output is closed; give it a place, such as > FILE\n")
    empty = closed(0, "--prompt-file", "-")
    assert (empty.returncode, empty.stderr.count("\n")) == (2, 1), empty.stderr
    assert closed(0, "--worker").returncode == 0


def test_a_reader_that_leaves(bundle: Path) -> None:
    """As `| head` does: no error, no words."""
    source, sink = os.pipe()
    os.close(source)
    command = [*RUN, str(bundle), *IDS, "--json"]
    done = subprocess.run(command, stdout=sink, stderr=subprocess.PIPE, text=True, env=BUFFERED, check=False)
    os.close(sink)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_itself_ends_with_status_2(bundle: Path) -> None:
    os.truncate(bundle / "target" / "model.onnx", 1000)
    done = subprocess.run([*RUN, str(bundle), *IDS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"eagle-run: {bundle / 'target' / 'model.onnx'} does not match its SHA-256")
    assert done.stderr.count("\n") == 1
