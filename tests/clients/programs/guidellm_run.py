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


def benchmark(path, folder):
    """Requests by status, and the means of their tokens."""
    report = folder / f"{path.replace('/', '-')}.json"
    command = (
        *(GUIDELLM, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model=demo,request_format={path}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    subprocess.run(command, check=True, stdout=sys.stderr)
    [told] = json.loads(report.read_text())["benchmarks"]
    metrics = told["metrics"]
    return {
        "requests": {name: len(told["requests"][name]) for name in ("successful", "errored", "incomplete")},
        "output_tokens": metrics["output_token_count"]["successful"]["mean"],
        "prompt_tokens": metrics["prompt_token_count"]["successful"]["mean"],
    }


with tempfile.TemporaryDirectory() as name:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
    print(json.dumps({path: benchmark(path, Path(name)) for path in paths}))
