"""GuideLLM's command line against a server: a short benchmark of each kind of request, and what it counts, as JSON.

Prompts are made up by it, of a tokenizer in a folder.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

URL, TOKENIZER = sys.argv[1:]
GUIDELLM = str(Path(sys.executable).with_name("guidellm"))
RUNS = {
    "completions": ("request_format=/v1/completions", "turns=1"),
    "chat": ("request_format=/v1/chat/completions", "turns=1"),
    "responses": ("request_format=/v1/responses", "turns=1"),
    # Turns that go on by `previous_response_id`; a run whose first turn has to be a call, or is an error.
    "history": ("request_format=/v1/responses,server_history=true", "turns=2"),
    "calls": ("request_format=/v1/chat/completions", "turns=2,tool_call_turns=1"),
}


def benchmark(name, folder):
    """Requests by status, and the means of their tokens."""
    asked, turns = RUNS[name]
    report = folder / f"{name}.json"
    command = (
        *(GUIDELLM, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model=demo,{asked}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens=16,{turns}"),
        *("--output", f"kind=json,path={report}"),
    )
    subprocess.run(command, check=True, stdout=sys.stderr)
    [told] = json.loads(report.read_text())["benchmarks"]
    return {
        "requests": {status: len(told["requests"][status]) for status in ("successful", "errored", "incomplete")},
        "output_tokens": told["metrics"]["output_token_count"]["successful"]["mean"],
        "prompt_tokens": told["metrics"]["prompt_token_count"]["successful"]["mean"],
    }


with tempfile.TemporaryDirectory() as name:
    print(json.dumps({run: benchmark(run, Path(name)) for run in RUNS}))
