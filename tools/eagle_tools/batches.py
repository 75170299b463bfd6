"""Tokens per second of several answers at once, beside llama.cpp and PyTorch with the same weights:

    python -m eagle_tools.batches BUNDLE --prompts QUESTIONS --target FOLDER --llama-server PROGRAM --widths 1,2,4,8

Groups of `width` prompts are answered one group after another, greedily, each answer with the same number of tokens; a
group's time counts from the reading of its prompts to the end of its last answer. All systems take turns group by
group. Every answer of ours is compared with the one that its request gets alone, without drafts.

With --llama-server the same requests also go over HTTP: to llama.cpp's server, with as many slots as there are requests
at once, and to eagle-serve (served.py). Several bundles, each with its --target, make one table each."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser, run_command
from eagle_tools.bench.machine import describe, physical_cores
from eagle_tools.bench.peers import converted_peers
from eagle_tools.markdown import markdown_table
from eagle_tools.peers.engine import LLAMA_CPP, Format
from eagle_tools.peers.gguf_tokens import with_tokens
from eagle_tools.peers.source import open_source
from eagle_tools.questions import prompt_ids, read_sets
from eagle_tools.served import check_program, eagle_serve, llama_server, served
from eagle_tools.turns import PAUSE, starting_order

ROOM = 8  # tokens of a context beyond a prompt and its answer
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
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
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
    """Answer the prompts in whole groups, the systems by turns, a different one first. Before, each answers the first
    group without its first tokens, which is not counted: so a server that keeps what it has read knows none of the
    prompts."""
    groups = [prompts[first : first + width] for first in range(0, len(prompts) - width + 1, width)]
    timed = {name: Timed(name, width, [], []) for name in systems}
    for answer in systems.values():
        answer([ids[1:] for ids in groups[0]], count)
    for number, group in enumerate(groups):
        for index in starting_order(len(systems), number):
            name, answer = list(systems.items())[index]
            time.sleep(PAUSE)
            began = time.perf_counter()
            answers = answer(group, count)
            timed[name].rates.append(width * count / (time.perf_counter() - began))
            timed[name].answers.extend(answers)
    return list(timed.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """A bundle, and the same weights as other systems take them; None: they are not compared."""

    bundle: Path
    target: Path | None


def ours_at(
    model: EagleModel, pair: Pair, threads: int, width: int, room: int, http: bool, stack: ExitStack
) -> dict[str, Answer]:
    """Our systems by name; those over HTTP run until the stack is closed."""
    systems = {}
    for name, method in (("vanilla", "vanilla"), (model.default_method, None)):
        systems[f"ours, {name}"] = ours(model, method)
    if http:
        for name in ("vanilla", model.default_method):
            command = eagle_serve(pair.bundle, name, width, threads, room)
            systems[f"eagle-serve, {name}"] = stack.enter_context(served(command)).answers
    return systems


def llama_at(
    args: argparse.Namespace, target: Path, threads: int, width: int, room: int, stack: ExitStack
) -> dict[str, Answer]:
    """llama.cpp with a target's weights, in this process or as the server that was given. Raises RequestError."""
    formats = [Format(LLAMA_CPP, args.format)]
    (made,) = converted_peers(open_source(target), formats, args.peer_folder, threads, print)
    if args.llama_server is None:
        return {f"llama.cpp {args.format}": llama(made.path, threads, room, width)}
    weights = with_tokens(made.path, target / "tokenizer.json")
    command = llama_server(args.llama_server, weights, width, threads, room)
    return {f"llama-server {args.format}": stack.enter_context(served(command)).answers}


def run(args: argparse.Namespace) -> None:
    """Prints a table of each bundle, systems by widths, and how many of our answers differ."""
    targets = args.target or [None] * len(args.bundle)
    if len(targets) != len(args.bundle):
        raise RequestError(f"there are {len(args.bundle)} bundles but {len(targets)} --target; give one for each")
    if args.llama_server is not None:
        if not args.target:
            raise RequestError("--llama-server needs the weights to serve; give --target FOLDER for each bundle")
        check_program(args.llama_server)
    for bundle, target in zip(args.bundle, targets, strict=True):
        _table(args, Pair(bundle, target))


def _table(args: argparse.Namespace, pair: Pair) -> None:
    threads = args.threads or physical_cores()
    with EagleModel.load(pair.bundle, backend=args.backend, threads=threads, check_hashes="once") as model:
        prompts = [prompt_ids(model, one.turns[0])[: args.most_prompt] for one in read_sets(args.prompts, args.count)]
        prompts = prompts[: args.total]
        if len(prompts) < max(args.widths):
            raise RequestError(f"there are {len(prompts)} prompts, but a width of {max(args.widths)}; raise --count")
        count = args.max_new_tokens
        room = max(map(len, prompts)) + count + ROOM
        alone = [ours(model, "vanilla")([ids], count)[0] for ids in prompts]
        torch = {} if pair.target is None else {"PyTorch fp32": pytorch(pair.target, threads)}
        rows, differ = [], 0
        for width in args.widths:
            with ExitStack() as stack:
                mine = ours_at(model, pair, threads, width, room, args.llama_server is not None, stack)
                systems = dict(mine)
                if pair.target is not None:
                    systems |= {**llama_at(args, pair.target, threads, width, room, stack), **torch}
                for timed in measure(systems, prompts, width, count):
                    rate = statistics.median(timed.rates)
                    rows.append([str(width), timed.system, f"{rate:.0f}", f"{rate / width:.0f}", str(len(timed.rates))])
                    if timed.system in mine:
                        differ += sum(a != b for a, b in zip(timed.answers, alone, strict=False))
    said = f"{pair.bundle.name}, {model.backend}, {len(prompts)} prompts, {count} tokens each, greedy"
    print(f"{said}; {', '.join(describe(threads))}\n", flush=True)
    print(markdown_table(["at once", "system", "tokens/s, all", "each", "groups"], rows))
    print(f"answers of ours that differ from those alone: {differ}\n", flush=True)


def _parser() -> Parser:
    parser = Parser(prog="python -m eagle_tools.batches", description="Times several answers at once.")
    parser.add_argument("bundle", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, metavar="FILE", help="as of eagle-bench"
    )
    parser.add_argument("--count", type=int, default=4, metavar="N", help="questions of each set (default 4)")
    parser.add_argument("--total", type=int, default=24, metavar="N", help="prompts at most (default 24)")
    parser.add_argument(
        "--most-prompt", type=int, default=256, metavar="N", help="tokens of a prompt that are kept (256)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="of each answer (default 64)")
    parser.add_argument(
        "--widths", action=Listed, of=int, default=[1, 2, 4, 8], metavar="1,2,4", help="answers at once"
    )
    parser.add_argument("--backend", default="auto", help="as of eagle-bench")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a forward pass, all systems alike (default: cores)"
    )
    parser.add_argument(
        "--target",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="a bundle's weights, for llama.cpp and PyTorch; one for each bundle",
    )
    parser.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="llama.cpp's server, to compare over HTTP")
    parser.add_argument("--format", default="q4_0", help="of llama.cpp's weights (q4_0)")
    parser.add_argument("--peer-folder", type=Path, metavar="FOLDER", help="where these are kept (the user's cache)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the program."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


if __name__ == "__main__":
    raise SystemExit(main())
