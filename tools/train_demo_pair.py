"""Train the demo pair: a small Llama and its EAGLE-1 and EAGLE-3 heads, on the Python standard library's own sources.

    python tools/train_demo_pair.py data -w WORK                 # tokenizer, token files, held-out prompts
    python tools/train_demo_pair.py target -w WORK --minutes 60  # the same command continues an interrupted run
    python tools/train_demo_pair.py heads -w WORK                # both heads, with eagle-train

Every machine with Python has the text, so anyone can repeat the training; the text differs a little from one Python
release to the next. Whole files are held out, chosen by a hash of their path.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_runtime.errors import EagleError
from eagle_train.cli import main as eagle_train

PAIR = Path(__file__).parent / "demo_pair"
EOS = "<|endoftext|>"
HELD_OUT = 3  # percent of the files
PROMPTS, PROMPT_TOKENS = 80, (40, 120)

# Left out of the text: tests, tables of numbers, other people's packages, what a build generated.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
SKIPPED_FOLDERS |= {"pydoc_data", "lib-dynload", "_bundled"}

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=480,
    num_hidden_layers=8,  # EAGLE-3 taps three different layers from 7 on
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)
SEQUENCE, BATCH = 512, 4  # tokens of a row, rows of a step (of all processes together)
MUON_RATE, MOMENTUM, ADAM_RATE = 0.01, 0.95, 3e-3  # the learning rates are those after warm-up
WARM_UP = 0.02  # share of the time
DRAFT_VOCAB = 2048  # tokens that the EAGLE-3 head knows
EVALUATE_S, SAVE_S = 600.0, 240.0  # seconds between held-out losses and between checkpoints

Ids = npt.NDArray[np.uint16]


class TrainError(EagleError):
    """The training cannot start or go on."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train_demo_pair.py", description=(__doc__ or "").splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, text in (
        ("data", "tokenizer, token files, held-out prompts"),
        ("target", "the small Llama"),
        ("heads", "both heads"),
    ):
        stage = stages.add_parser(name, help=text)
        stage.add_argument("-w", "--work", type=Path, required=True, help="folder of tokens, checkpoints and logs")
        stage.add_argument("-o", "--out", type=Path, default=PAIR, help="folder of the pair (default: %(default)s)")
        if name != "data":
            stage.add_argument(
                "--minutes", type=float, default=60, help="training time, all runs together; of each head"
            )
        if name == "target":
            stage.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, one core each")
    args = parser.parse_args(argv)
    try:
        if args.stage == "data":
            make_data(args.work, args.out)
        elif args.stage == "target":
            train_target(args.work, args.out / "target", args.minutes * 60, args.workers)
        else:
            train_heads(args.work, args.out, args.minutes)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_data(work: Path, out: Path) -> None:
    """Write the tokenizer to out/target, train.bin and heldout.bin (uint16 ids) to work, heldout.jsonl to out."""
    work.mkdir(parents=True, exist_ok=True)
    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    train: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for path, text in sources():
        (held_out if is_held_out(path) else train).append((path, text))
    tokenizer = train_tokenizer([text for _, text in train])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "model_max_length": 2048}
    write_json(target / "tokenizer_config.json", settings)
    eos = tokenizer.token_to_id(EOS)
    counts = {}
    for name, texts in (("train", train), ("heldout", held_out)):
        rows = [[*tokenizer.encode(text).ids, eos] for _, text in texts]
        ids = np.array([token for row in rows for token in row], np.uint16)
        ids.tofile(work / f"{name}.bin")
        with (work / f"{name}.jsonl").open("w", encoding="utf-8") as file:  # for eagle-train
            file.writelines(json.dumps({"ids": row}) + "\n" for row in rows)
        counts[name] = {"files": len(texts), "characters": sum(len(text) for _, text in texts), "tokens": len(ids)}
    prompts = held_out_prompts(tokenizer, held_out)
    with (out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts):
            row = {"question_id": number, "category": "python", "turns": [prompt]}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    log(work / "data.log.jsonl", machine() | counts | {"prompts": len(prompts)})


def sources() -> Iterator[tuple[str, str]]:
    """(relative path, text) of the standard library's modules, in one order everywhere."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts[:-1]) and not name.name.startswith("_sysconfigdata"):
            yield name.as_posix(), path.read_text(encoding="utf-8")


def is_held_out(path: str) -> bool:
    """The same files on every machine."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100 < HELD_OUT


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: any text has ids, and runs of spaces (Python's indents) are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def held_out_prompts(tokenizer: Tokenizer, files: list[tuple[str, str]]) -> list[str]:
    """The first lines of functions and classes of held-out files, PROMPT_TOKENS long, taken evenly from all."""
    low, high = PROMPT_TOKENS
    rng = np.random.default_rng(0)
    starts = []
    for _, text in files:
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            wanted, prompt = int(rng.integers(low, high)), ""
            for line in lines[node.lineno - 1 : node.end_lineno]:
                if len(tokenizer.encode(prompt + line).ids) > high:
                    break
                prompt += line
                if len(tokenizer.encode(prompt).ids) >= wanted:
                    break
            if len(tokenizer.encode(prompt).ids) >= low:
                starts.append(prompt.rstrip() + "\n")
    starts = sorted(set(starts), key=lambda text: hashlib.sha256(text.encode()).digest())
    return starts[:PROMPTS]


def train_target(work: Path, out: Path, seconds: float, workers: int) -> None:
    """Train for that many seconds in all, then write the model to `out` in fp16. Continues work/target.pt.

    workers: processes of one thread each. They wait for one another once a step; threads of one process would in
    every operator, which takes twice as long where other programs want the cores too."""
    for name in ("train", "heldout"):
        read_tokens(work / f"{name}.bin")
    rendezvous = work / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    spawn(train_worker, (workers, rendezvous, work, out, seconds), nprocs=workers)  # type: ignore[no-untyped-call]


def train_worker(rank: int, workers: int, rendezvous: Path, work: Path, out: Path, seconds: float) -> None:
    """One process of train_target. All hold the same weights and average their gradients; the first one logs,
    saves and decides when to stop."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=workers)
    train, held_out = (read_tokens(work / f"{name}.bin") for name in ("train", "heldout"))
    journal, saved = work / "target.log.jsonl", work / "target.pt"
    model = new_model()
    optimizers = make_optimizers(model)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    step, elapsed = 0, 0.0
    if saved.is_file():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        step, elapsed = state["step"], state["elapsed"]
    params = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        log(journal, machine() | {"workers": workers, "params": params, "train_tokens": len(train), "step": step})
    clock = time.perf_counter() - elapsed
    saved_at = evaluated_at = elapsed
    model.train()
    while True:
        elapsed = from_first(time.perf_counter() - clock)
        if elapsed >= seconds:
            break
        rate = schedule(elapsed / seconds)
        for group, peak in zip((g for optimizer in optimizers for g in optimizer.param_groups), peaks, strict=True):
            group["lr"] = peak * rate
        starts = np.random.default_rng(step).integers(0, len(train) - SEQUENCE - 1, BATCH)
        loss = next_token_loss(model, windows(train, starts[rank::workers]))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        if rank > 0:
            continue
        done = {"step": step, "tokens": step * BATCH * SEQUENCE, "seconds": round(elapsed, 1)}
        if step % 20 == 0:
            log(journal, done | {"loss": round(loss.item(), 4), "rate": round(rate, 4)})
        if elapsed - evaluated_at > EVALUATE_S:
            evaluated_at = elapsed
            log(journal, done | {"held_out_loss": held_out_loss(model, held_out)})
        if elapsed - saved_at > SAVE_S:
            saved_at = elapsed
            save_state(saved, model, optimizers, step, elapsed)
    distributed.destroy_process_group()
    if rank == 0:
        save_state(saved, model, optimizers, step, elapsed)
        done = {"step": step, "tokens": step * BATCH * SEQUENCE, "seconds": round(elapsed, 1), "params": params}
        log(journal, done | {"held_out_loss": held_out_loss(model, held_out), "done": True})
        model.half().save_pretrained(out)
        (out / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone


def new_model() -> LlamaForCausalLM:
    """Layers start out adding nothing, which speeds up the first steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def from_first(seconds: float) -> float:
    """The first process's clock: all must stop after the same step."""
    value = torch.tensor(seconds, dtype=torch.float64)
    distributed.broadcast(value, 0)
    return value.item()


def average_gradients(model: LlamaForCausalLM) -> None:
    """Over all processes, in one message."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / distributed.get_world_size()
    distributed.all_reduce(flat)
    for gradient, mean in zip(gradients, unflatten(flat, gradients), strict=True):
        gradient.copy_(mean)


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut one row of numbers into tensors of the shapes of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def train_heads(work: Path, out: Path, minutes: float) -> None:
    """Both heads with eagle-train, from the target's text, that many minutes each. Continues what is in `work`."""
    for kind in ("eagle1", "eagle3"):
        folder = work / kind
        arguments = ["head", str(out / "target"), "--kind", kind, "-o", str(folder), "--minutes", str(minutes)]
        arguments += ["--data", str(work / "train.jsonl"), "--eval-data", str(work / "heldout.jsonl")]
        arguments += ["--seq-len", str(SEQUENCE), "--batch-size", str(BATCH)]
        if kind == "eagle3":
            arguments += ["--draft-vocab", str(DRAFT_VOCAB)]
        if (folder / "training").is_dir():
            arguments.append("--resume")
        if eagle_train(arguments):
            raise TrainError(f"the {kind} head was not trained to the end; mend what eagle-train says above")
        (out / kind).mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(folder / name, out / kind / name)


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal (https://kellerjordan.github.io/posts/muon/), for the layers'
    matrices: where text and time are short it learns more from each token than AdamW does.

    Each process makes its share of the matrices orthogonal; all get the sum."""

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank, workers = distributed.get_rank(), distributed.get_world_size()
        for group in self.param_groups:
            updates = []
            for index, matrix in enumerate(group["params"]):
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                mine = index % workers == rank
                updates.append(orthogonal(matrix.grad.lerp(momentum, MOMENTUM)) if mine else torch.zeros_like(matrix))
            flat = torch.cat([update.flatten() for update in updates])
            distributed.all_reduce(flat)
            for matrix, update in zip(group["params"], unflatten(flat, updates), strict=True):
                rows, columns = matrix.shape
                matrix.sub_(update, alpha=group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its singular values brought near 1, by five Newton-Schulz steps."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x: torch.Tensor = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def make_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, Adam for the embedding and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim > 1]
    rest = [parameter for name, parameter in model.named_parameters() if "proj" not in name]
    return Muon(matrices, MUON_RATE), torch.optim.Adam(rest, lr=ADAM_RATE, betas=(0.9, 0.98), fused=True)


def schedule(share: float) -> float:
    """Factor of the learning rates: linear warm-up, then a cosine down to a hundredth; share of the time that is over,
    0 to 1."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def windows(tokens: Ids, starts: npt.NDArray[np.int64]) -> torch.Tensor:
    """[rows, SEQUENCE + 1] ids from each start on."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int64))


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; ids [rows, SEQUENCE + 1]."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Ids) -> float:
    """Mean cross-entropy over all held-out text, in windows side by side."""
    model.eval()
    starts = np.arange(0, len(tokens) - SEQUENCE - 1, SEQUENCE)
    losses = [float(next_token_loss(model, windows(tokens, starts[i : i + 1]))) for i in range(len(starts))]
    model.train()
    return round(float(np.mean(losses)), 4)


def read_tokens(path: Path) -> Ids:
    if not path.is_file():
        raise TrainError(f"{path} is missing; run the data stage first")
    return np.fromfile(path, np.uint16)


def save_state(
    path: Path, model: LlamaForCausalLM, optimizers: tuple[torch.optim.Optimizer, ...], step: int, elapsed: float
) -> None:
    """Beside the old one and renamed, so that an interruption leaves one of them whole."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    torch.save(state | {"step": step, "elapsed": elapsed}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def machine() -> dict[str, Any]:
    """What the figures of a log were measured on."""
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def log(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
