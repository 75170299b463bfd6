"""What a mixture of experts costs on this processor: a forward pass with every expert computed for every row, with
experts computed for the rows that are routed to them, and with the native operators, where a layer's experts are one
step.

    python -m studies experts --shape olmoe --layers 2 --precision fp32,int8,int4 --rows 1,8,32

The model has the widths of a published one and random weights, a few layers and a small vocabulary. The forms are
written to a temporary folder and take turns; the time is the median. Random rows choose experts evenly, which is the
worst case: with E experts of which a row takes k, n rows read E (1 - (1 - k/E)^n) of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from eagle_export.graphs.pair import Pair, build_graphs, open_pair
from eagle_export.graphs.weights import graph_spec, save, save_over
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.recipes.native import both_forms
from eagle_export.recipes.plan import CPU, plan
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Tree
from eagle_runtime.commands.command import Listed, Parser
from eagle_runtime.core.target import Target
from eagle_runtime.ort.operators import native_operators
from eagle_runtime.ort.session import OrtSession
from eagle_tools.markdown import markdown_table
from studies.harness import positive

VOCAB, CONTEXT, PAST = 2048, 512, 64
STEPS = "RowExactSteps"  # which native graphs of mixtures have
EACH_HEAD = {"num_attention_heads": 32, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {  # model_type -> widths of a published model
    "olmoe": {  # OLMoE-1B-7B
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        **EACH_HEAD,
    },
    "mixtral": {  # Mixtral-8x7B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **EACH_HEAD,
    },
    "gpt_oss": {  # gpt-oss-20b
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
}
EVERY, ROUTED, NATIVE = FORMS = ("all experts", "routed", "native")  # the last for int8 and int4


def random_target(shape: str, layers: int, folder: Path) -> Pair:
    """Writes a random checkpoint in bf16 and opens it."""
    torch.manual_seed(0)
    cls = FAMILIES[shape].model_class()
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "num_hidden_layers": layers}
    config = cls.config_class(**SHAPES[shape], **sizes, **ends)
    logging.disable_progress_bar()
    cls._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    logging.enable_progress_bar()
    return open_pair(folder, None)


def session_of(pair: Pair, precision: str, folder: Path, threads: int, form: str) -> OrtSession | None:
    """Writes the target's graph at a precision, rounded to nearest, and opens it. None if it has not this form, or if
    the operators of the native one are not installed."""
    if form == NATIVE and native_operators().library is None:
        return None
    recipe = plan("cpu", precision, None, None)
    graph = build_graphs(pair, recipe.traced, 1, routed=form != EVERY)["target"]
    done, native = both_forms(recipe.passes["target"], graph)
    if form == NATIVE and (native is None or not any(node.op_type == STEPS for node in native.graph)):
        return None
    folder.mkdir()
    save(graph, folder / "model.onnx")
    if form != NATIVE or native is None:
        return OrtSession(folder / "model.onnx", graph_spec("model.onnx", graph, done), threads)
    save_over(native, graph, folder / "native.onnx", "model.onnx")
    spec = graph_spec("native.onnx", native, done)
    return OrtSession(folder / "native.onnx", spec, threads, operators=native_operators())


def measure(
    pair: Pair, precision: str, rows: Sequence[int], runs: int, threads: int, scratch: Path
) -> dict[int, dict[str, float]]:
    """Returns number of rows -> form -> milliseconds of a forward pass."""
    rng = np.random.default_rng(1)
    times: dict[int, dict[str, list[float]]] = {count: {form: [] for form in FORMS} for count in rows}
    with ExitStack() as stack:
        targets = {}
        for form in FORMS:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
            if (session := session_of(pair, precision, work / "graph", threads, form)) is None:
                continue
            targets[form] = Target(stack.enter_context(session), PAST + max(rows))
            targets[form].prefill(rng.integers(0, VOCAB, PAST).tolist())
        for turn in range(runs + 1):
            for count in rows:
                tree = Tree(rng.integers(0, VOCAB, count), np.arange(count) - 1, np.zeros(count, np.float32))
                for form, target in targets.items():
                    started = time.perf_counter()
                    target.verify(tree)
                    if turn:
                        times[count][form].append(1e3 * (time.perf_counter() - started))
    return {count: {form: median(each) for form, each in forms.items() if each} for count, forms in times.items()}


def experts_read(count: int, chosen: int, rows: int) -> float:
    """Returns how many of `count` experts n rows read that each choose `chosen` of them evenly."""
    return count * (1 - (1 - chosen / count) ** rows)


def report(args: argparse.Namespace) -> str:
    """Measures the forms at each precision; returns the table."""
    positive(*args.rows, args.layers, args.threads, args.runs, names="rows, layers, threads and runs")
    if max(args.rows) > 64:  # as deep as a tree may be
        raise RequestError(f"{max(args.rows)} rows were asked for; measure 64 at most")
    lines = []
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        pair = random_target(args.shape, args.layers, Path(folder) / "source")
        experts = pair.family.experts
        assert experts is not None, "SHAPES are mixtures"
        count, chosen = experts.count(pair.config), int(pair.config.num_experts_per_tok)
        for precision in args.precision:
            for rows, forms in measure(pair, precision, args.rows, args.runs, args.threads, Path(folder)).items():
                read = experts_read(count, chosen, rows)
                cells = [f"{forms[form]:.1f}" if form in forms else "" for form in FORMS]
                ratio = f"{forms[ROUTED] / forms[NATIVE]:.1f}" if NATIVE in forms else ""
                lines.append([precision, str(rows), f"{read:.1f} of {count}", *cells, ratio])
    header = ["precision", "rows", "experts read per layer", *(f"ms, {form}" for form in FORMS), "routed / native"]
    return markdown_table(header, lines)


def add_options(parser: Parser) -> None:
    """What is timed."""
    parser.add_argument("--shape", choices=SHAPES, default="olmoe", help="whose widths the model has (default olmoe)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers of the model (default 2)")
    parser.add_argument("--precision", action=Listed, among=list(CPU), default=["fp32", "int8", "int4"], metavar="P,P")
    parser.add_argument(
        "--rows", action=Listed, of=int, default=[1, 8, 32], metavar="N,N", help="rows of a forward pass"
    )
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="runs of each form (default 15)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="for the models, which take some GB")
