"""Tokens per second of several answers at once, beside llama.cpp and PyTorch with the same weights:

    python -m eagle_tools.batches BUNDLE --prompts QUESTIONS --target FOLDER --widths 1,2,4,8

Groups of `width` prompts are answered one group after another, greedily, each answer with the same number of tokens; a
group's time counts from the reading of its prompts to the end of its last answer. All systems take turns group by
group. Every answer of ours is compared with the one that its request gets alone, without drafts."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser, run_command
from eagle_runtime.machine.user_cache import cache_folder
from eagle_tools.markdown import markdown_table
from eagle_tools.peers.convert import convert
from eagle_tools.peers.engine import LLAMA_CPP, Format
from eagle_tools.peers.source import open_source
from eagle_tools.questions import read_sets

Answers = list[list[int]]
Answer = Callable[[Sequence[list[int]], int], Answers]  # prompts, tokens of each answer


@dataclass(frozen=True, slots=True)
class Timed:
    """system: what answered; width: prompts at once; rates: tokens per second of each group, all answers together;
    answers: to the prompts in order."""

    system: str
    width: int
    rates: list[float]
    answers: Answers


def ours(model: EagleModel, method: str | None) -> Answer:
    """EagleModel.batch with a method; None: the default."""

    def answer(prompts: Sequence[list[int]], count: int) -> Answers:
        settings = {"max_new_tokens": count, "ignore_eos": True, "temperature": 0.0, "method": method}
        out: Answers = [[] for _ in prompts]
        for number, piece in model.batch(prompts, width=len(prompts), **settings):
            out[number] += piece.token_ids
        return out

    return answer


def llama(path: Path, threads: int, room: int, width: int) -> Answer:
    """llama.cpp: one batch of a row for each answer. room: tokens of a prompt and its answer."""
    import llama_cpp
    import numpy as np
    from llama_cpp._internals import LlamaBatch, LlamaContext, LlamaModel

    llama_cpp.llama_backend_init()
    model = LlamaModel(path_model=str(path), params=llama_cpp.llama_model_default_params(), verbose=False)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = room * width
    params.n_seq_max, params.kv_unified = width, False
    params.n_threads = params.n_threads_batch = threads
    context = LlamaContext(model=model, params=params, verbose=False)
    batch, vocab = LlamaBatch(n_tokens=room * width, embd=0, n_seq_max=1, verbose=False), int(model.n_vocab())

    def best(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """rows: token, position, answer, whether its logits are wanted -> the likeliest token after each wanted one."""
        one = batch.batch
        one.n_tokens = len(rows)
        for i, (token, position, number, wanted) in enumerate(rows):
            one.token[i], one.pos[i], one.logits[i] = token, position, wanted
            one.n_seq_id[i], one.seq_id[i][0] = 1, number
        context.decode(batch)
        wanted_rows = sum(wanted for *_, wanted in rows)
        logits = np.ctypeslib.as_array(context.get_logits(), (wanted_rows, vocab))
        return [int(token) for token in logits.argmax(-1)]

    def answer(prompts: Sequence[list[int]], count: int) -> Answers:
        for number in range(width):
            context.kv_cache_seq_rm(number, 0, -1)
        out: Answers = []
        for number, ids in enumerate(prompts):
            rows = [(token, place, number, place == len(ids) - 1) for place, token in enumerate(ids)]
            out.append(best(rows))
        for made in range(1, count):
            rows = [(out[n][-1], len(ids) + made - 1, n, True) for n, ids in enumerate(prompts)]
            for tokens, token in zip(out, best(rows), strict=True):
                tokens.append(token)
        return out

    return answer


def pytorch(folder: Path, threads: int) -> Answer:
    """transformers' generate over a batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()

    def answer(prompts: Sequence[list[int]], count: int) -> Answers:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
            )
        answers: Answers = out[:, longest:].tolist()
        return answers

    return answer


def measure(systems: dict[str, Answer], prompts: Sequence[list[int]], width: int, count: int) -> list[Timed]:
    """Answer the prompts in whole groups, the systems by turns; the first group once more before, which is not
    counted."""
    groups = [prompts[first : first + width] for first in range(0, len(prompts) - width + 1, width)]
    timed = {name: Timed(name, width, [], []) for name in systems}
    for answer in systems.values():
        answer(groups[0], count)
    for group in groups:
        for name, answer in systems.items():
            began = time.perf_counter()
            answers = answer(group, count)
            timed[name].rates.append(width * count / (time.perf_counter() - began))
            timed[name].answers.extend(answers)
    return list(timed.values())


def peers(args: argparse.Namespace, prompts: Sequence[list[int]], threads: int, width: int) -> dict[str, Answer]:
    """The other systems with the weights of --target, if that is given. Raises RequestError."""
    if args.target is None:
        return {}
    (made,) = convert(
        open_source(args.target), [Format(LLAMA_CPP, args.format)], cache_folder() / "peers", threads, print
    )
    room = max(map(len, prompts)) + args.max_new_tokens
    return {
        f"llama.cpp {args.format}": llama(made.path, threads, room, width),
        "PyTorch fp32": pytorch(args.target, threads),
    }


def run(args: argparse.Namespace) -> None:
    """Prints a table, systems by widths, and how many of our answers differ."""
    with EagleModel.load(args.bundle, backend=args.backend, check_hashes="once") as model:
        questions = read_sets(args.prompts, args.count)
        texts = [model.text.encode([{"role": "user", "content": one.turns[0]}]) for one in questions]
        prompts = [ids[: args.most_prompt] for ids in texts][: args.total]
        if len(prompts) < max(args.widths):
            raise RequestError(f"there are {len(prompts)} prompts, but a width of {max(args.widths)}; raise --count")
        mine = {"ours, vanilla": ours(model, "vanilla"), f"ours, {model.default_method}": ours(model, None)}
        alone = [mine["ours, vanilla"]([ids], args.max_new_tokens)[0] for ids in prompts]
        rows, differ = [], 0
        for width in args.widths:
            systems = {**mine, **peers(args, prompts, model.threads or 1, width)}
            for timed in measure(systems, prompts, width, args.max_new_tokens):
                rate = statistics.median(timed.rates)
                rows.append([str(width), timed.system, f"{rate:.0f}", f"{rate / width:.0f}", str(len(timed.rates))])
                if timed.system in mine:
                    differ += sum(a != b for a, b in zip(timed.answers, alone, strict=False))
        print(markdown_table(["at once", "system", "tokens/s, all", "each", "groups"], rows))
        print(f"answers of ours that differ from those alone: {differ}")


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> Parser:
    parser = Parser(prog="python -m eagle_tools.batches", description="Times several answers at once.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, metavar="FILE", help="as of eagle-bench"
    )
    parser.add_argument("--count", type=int, default=4, metavar="N", help="questions of each set (default 4)")
    parser.add_argument("--total", type=int, default=24, metavar="N", help="prompts at most (default 24)")
    parser.add_argument(
        "--most-prompt", type=int, default=256, metavar="N", help="tokens of a prompt that are kept (256)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    parser.add_argument("--widths", type=_widths, default=(1, 2, 4, 8), metavar="A,B", help="answers at once: 1,2,4,8")
    parser.add_argument("--backend", default="auto", help="as of eagle-bench")
    parser.add_argument("--target", type=Path, metavar="FOLDER", help="the same weights, for llama.cpp and PyTorch")
    parser.add_argument("--format", default="q4_0", help="of llama.cpp's weights (q4_0)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the program."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


if __name__ == "__main__":
    raise SystemExit(main())
