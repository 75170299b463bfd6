"""EleutherAI's lm-evaluation-harness: tasks of its own making, whose figures are compared with the server's answers."""

# mypy: ignore-errors
import json
import math
import os
from pathlib import Path

import lm_eval
import requests
from lm_eval.tasks import TaskManager
from report import MODEL, URL, report

DOCS = [
    {"text": "def f(x):\n    return", "choices": ["x", "None", "self.x + 1"]},
    {"text": "class A:\n    def", "choices": ["__init__(self):", "f(self):"]},
]
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: docs.jsonl}}
test_split: test
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}


def evaluated(task, **more):
    """A task's samples, and its metrics. more: arguments of the model."""
    folder = Path("tasks")
    folder.mkdir(exist_ok=True)
    Path("docs.jsonl").write_text("\n".join(map(json.dumps, DOCS)))
    (folder / f"{task}.yaml").write_text(f"task: own_{task}{COMMON}{TASKS[task]}")
    address = {"base_url": f"{URL}/v1/completions", "tokenizer_backend": "huggingface"}
    arguments = {"model": MODEL, "tokenizer": os.environ["EAGLE_BUNDLE"], "max_length": 512, **address, **more}
    tasks = {"tasks": [f"own_{task}"], "task_manager": TaskManager(include_path=str(folder))}
    found = lm_eval.simple_evaluate(model="local-completions", model_args=arguments, log_samples=True, **tasks)
    return found["samples"][f"own_{task}"], found["results"][f"own_{task}"]


def asked(text, **fields):
    body = {"prompt": text, "temperature": 0, **fields}
    return requests.post(f"{URL}/v1/completions", json=body, timeout=60).json()["choices"][0]


def told(text):
    """The log-probabilities of a text's tokens, each of which is a character."""
    return asked(text, echo=True, logprobs=1, max_tokens=0)["logprobs"]["token_logprobs"]


def choice(**more):
    samples, results = evaluated("choice", **more)
    for sample, doc in zip(samples, DOCS, strict=True):
        expected = [sum(told(f"{doc['text']} {one}")[len(doc["text"]) :]) for one in doc["choices"]]
        ours = [response[0][0] for response in sample["resps"]]
        if not all(math.isclose(*pair, abs_tol=1e-3) for pair in zip(ours, expected, strict=True)):
            return False
    return 0 <= results["acc,none"] <= 1


def rolling():
    samples, results = evaluated("rolling")
    return all(sample["resps"][0][0] < 0 for sample in samples) and results["byte_perplexity,none"] > 1


def written():
    samples, _ = evaluated("written")
    expected = [asked(doc["text"], max_tokens=8, stop=["\n\n"])["text"] for doc in DOCS]
    return [sample["resps"][0][0] for sample in samples] == expected


report(
    {
        "multiple choice": choice,
        "several prompts in a request": lambda: choice(batch_size=3),
        "several requests at once": lambda: choice(num_concurrent=3),
        "perplexity": rolling,
        "generation": written,
    }
)
