"""lm-eval against a server, which tokenizes for it: tasks of a few lines, what they score and what each document did.

Everything is on this machine: the documents are written by this program, and nothing is asked of a hub.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from calls import call, run
from lm_eval.tasks import TaskManager

URL = sys.argv[1]
FOLDER = tempfile.TemporaryDirectory()
TASKS = TaskManager(include_defaults=False)  # its own ten thousand take seconds to list
TURN = "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"}
DOCUMENTS = [
    {
        "question": f"What is the capital of {country}?",
        "answer": f"The capital of {country} is {capital}.",
        "begun": f"The capital of {country}",
        "endings": [f" is {name}." for name in CAPITALS.values()],
        "index": list(CAPITALS).index(country),
    }
    for country, capital in CAPITALS.items()
]


def task(name, kind, **fields):
    path = Path(FOLDER.name) / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": kind,
        "metadata": {"version": 1},
        **fields,
    }


CHOICE = task(
    "choice",
    "multiple_choice",
    doc_to_text=TURN + "{{begun}}",
    doc_to_choice="{{endings}}",
    doc_to_target="index",
    target_delimiter="",
    metric_list=[{"metric": "acc"}],
)
GENERATE = task(
    "generate",
    "generate_until",
    doc_to_text=TURN,
    doc_to_target="{{answer}}",
    generation_kwargs={"until": ["<|im_end|>", "\n"], "max_gen_toks": 32},
    metric_list=[{"metric": "exact_match"}],
)
CHAT = {**GENERATE, "task": "chat", "doc_to_text": "{{question}}"}
ROLLING = task(
    "rolling",
    "loglikelihood_rolling",
    doc_to_text="",
    doc_to_target="{{answer}}",
    metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
)


def evaluate(kind, path, done, **fields):
    told = lm_eval.simple_evaluate(
        model=kind,
        model_args={"model": "demo", "base_url": URL + path, "max_length": 2048, "num_concurrent": 1, **fields},
        tasks=[done],
        task_manager=TASKS,
        bootstrap_iters=0,
        apply_chat_template=kind == "local-chat-completions",
    )
    [name] = told["results"]
    return {
        "scores": {key: value for key, value in told["results"][name].items() if isinstance(value, float)},
        "responses": [sample["resps"] for sample in told["samples"][name]],
    }


@call
def choice():
    return evaluate("local-completions", "/v1/completions", CHOICE)


@call
def choice_in_batches():
    return evaluate("local-completions", "/v1/completions", CHOICE, batch_size=3, num_concurrent=3)


@call
def generate():
    return evaluate("local-completions", "/v1/completions", GENERATE)


@call
def generate_from_text():
    """Prompts as text, in place of tokens."""
    return evaluate("local-completions", "/v1/completions", GENERATE, tokenized_requests=False)


@call
def rolling():
    return evaluate("local-completions", "/v1/completions", ROLLING)


@call
def chat():
    return evaluate("local-chat-completions", "/v1/chat/completions", CHAT)


run()
