"""Trains the demo pair's target: a small Llama, about an hour on CPU cores (see train_demo_pair.py)."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_runtime.base.errors import EagleError
from eagle_runtime.base.files import replacing

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=480,
    num_hidden_layers=8,  # EAGLE-3 taps three different layers from 7 on
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)
SEQUENCE, BATCH = 512, 4  # tokens of a row, rows of a step (of all processes together)
LONG, LONG_FROM, LONG_EVERY = 4096, 0.6, 4  # long rows: tokens, from which share of the time on, in which steps
MUON_RATE, MOMENTUM, ADAM_RATE = 0.01, 0.95, 3e-3  # the learning rates are those after warm-up
WARM_UP = 0.02  # share of the time
EVALUATE_S, SAVE_S = 600.0, 240.0  # seconds between held-out losses and between checkpoints

Ids = npt.NDArray[np.uint16]


class TrainError(EagleError):
    """The training cannot start or continue."""


def train_target(work: Path, out: Path, seconds: float, workers: int) -> None:
    """Train for that many seconds in all, then write the model to `out` in fp16. Continues work/target.pt.

    workers: processes of one thread each. Processes wait for one another once a step, threads of one process in every
    operator, which takes twice as long while other programs use the cores."""
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
    step, tokens, elapsed = 0, 0, 0.0
    if saved.is_file():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        step, tokens, elapsed = state["step"], state["tokens"], state["elapsed"]
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
        is_long = elapsed / seconds >= LONG_FROM and step % LONG_EVERY == 0
        length, rows = (LONG, workers) if is_long else (SEQUENCE, BATCH)
        starts = np.random.default_rng(step).integers(0, len(train) - length - 1, rows)
        loss = next_token_loss(model, windows(train, starts[rank::workers], length))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, tokens = step + 1, tokens + length * rows
        if rank > 0:
            continue
        done = {"step": step, "tokens": tokens, "seconds": round(elapsed, 1)}
        if step % 20 == 0:
            log(journal, done | {"loss": round(loss.item(), 4), "rate": round(rate, 4)})
        if elapsed - evaluated_at > EVALUATE_S:
            evaluated_at = elapsed
            log(journal, done | held_out_losses(model, held_out))
        if elapsed - saved_at > SAVE_S:
            saved_at = elapsed
            save_state(saved, model, optimizers, step, tokens, elapsed)
    distributed.destroy_process_group()
    if rank == 0:
        save_state(saved, model, optimizers, step, tokens, elapsed)
        done = {"step": step, "tokens": tokens, "seconds": round(elapsed, 1), "params": params}
        log(journal, done | held_out_losses(model, held_out) | {"done": True})
        model.generation_config.do_sample = False  # its template is of code to complete, whose likeliest text is wanted
        model.half().save_pretrained(out)
        (out / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read


def new_model() -> LlamaForCausalLM:
    """Returns an untrained model. Its layers add nothing at first, which speeds up the first steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def from_first(seconds: float) -> float:
    """Returns the first process's time in every process, so that all stop after the same step."""
    value = torch.tensor(seconds, dtype=torch.float64)
    distributed.broadcast(value, 0)
    return value.item()


def average_gradients(model: LlamaForCausalLM) -> None:
    """Average the gradients over all processes, in one message."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / distributed.get_world_size()
    distributed.all_reduce(flat)
    for gradient, mean in zip(gradients, unflatten(flat, gradients), strict=True):
        gradient.copy_(mean)


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one row of numbers as tensors of the shapes of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


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
    """Returns the matrix with its singular values near 1, by five Newton-Schulz steps."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    x: torch.Tensor = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def make_optimizers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Returns Muon for the layers' matrices and Adam for the embedding and the norms."""
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim > 1]
    rest = [parameter for name, parameter in model.named_parameters() if "proj" not in name]
    return Muon(matrices, MUON_RATE), torch.optim.Adam(rest, lr=ADAM_RATE, betas=(0.9, 0.98), fused=True)


def schedule(share: float) -> float:
    """Returns the factor of the learning rates: linear warm-up, then a cosine down to 0.01. share: elapsed share of the
    time, 0 to 1."""
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def windows(tokens: Ids, starts: npt.NDArray[np.int64], length: int) -> torch.Tensor:
    """Returns ids [rows, length + 1], one row from each start."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy in nats. ids: [rows, length + 1]."""
    logits = model(ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, tokens: Ids) -> dict[str, float]:
    """Returns the mean cross-entropy over the held-out text, in adjacent windows of each length."""
    model.eval()
    means = {}
    for name, length in (("held_out_loss", SEQUENCE), ("held_out_long_loss", LONG)):
        starts = np.arange(0, len(tokens) - length - 1, length)
        losses = [float(next_token_loss(model, windows(tokens, starts[i : i + 1], length))) for i in range(len(starts))]
        means[name] = round(float(np.mean(losses)), 4)
    model.train()
    return means


def read_tokens(path: Path) -> Ids:
    if not path.is_file():
        raise TrainError(f"{path} is missing; run the data stage first")
    return np.fromfile(path, np.uint16)


def save_state(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: tuple[torch.optim.Optimizer, ...],
    step: int,
    tokens: int,
    elapsed: float,
) -> None:
    """Save the training state; an interruption leaves the old file or the new one."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    with replacing(path) as new:
        torch.save(state | {"step": step, "tokens": tokens, "elapsed": elapsed}, new)


def machine() -> dict[str, Any]:
    """Returns the machine and versions, for the log."""
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
