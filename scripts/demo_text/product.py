"""What the demo model knows about aserve itself, about itself, and the few facts that everybody tries first.

Knows commands, endpoints and promises; the ideas behind them are in concepts.py.
"""

from .topic import Topic

PRODUCT: tuple[Topic, ...] = (
    # ---- what it is
    Topic(
        ("aserve", "the aserve server", "this server"),
        "aserve serves large language models from one Python process with one asyncio event loop, over the OpenAI API.",
        "It is small and exact, embeds in your own application, and one bad request fails alone.",
        ("What does aserve do?", "What is aserve for?", "Who or what is aserve?", "What software is this?"),
    ),
    Topic(
        ("the asyncio event loop", "the event loop", "asyncio", "an event loop"),
        "The event loop runs all of aserve's HTTP, scheduling and streaming in one thread, and awaits the device "
        "instead of blocking on it.",
        "One loop means no child processes, no locks and nothing left behind at exit.",
        ("How many event loops does aserve have?", "Why does aserve use asyncio?"),
    ),
    Topic(
        ("a mailbox", "the mailbox", "the per-request queue", "a per-request queue"),
        "A mailbox is the queue of one request with room for one item: when the reader lags, new text merges into what "
        "is waiting.",
        "A slow reader can neither block the engine nor fill the memory.",
        ("What happens if a client reads slowly?", "How does aserve handle slow readers?"),
    ),
    Topic(
        ("SSE", "server-sent events", "Server-Sent Events"),
        "SSE means server-sent events: the answer comes as lines that begin with data: and ends with data: [DONE].",
        "A plain HTTP response carries the stream, so curl is enough to read it.",
        ("How are tokens streamed?", "How does streaming work?", "How does aserve stream?", "What is streaming?"),
    ),
    Topic(
        ("a step", "an engine step", "a step of the engine"),
        "A step has five verbs: plan, launch, land, commit and publish; the device runs one step ahead of the "
        "bookkeeping.",
        "While the GPU computes one step, the loop publishes the step before.",
        ("What happens in one step?", "What are the five verbs?", "What does the engine loop do?"),
    ),
    Topic(
        ("the runner", "a runner"),
        "The runner turns a plan into tensors, runs the model and samples; it never meets the scheduler.",
        "Because they share only the plan, a recorded list of plans replays a bug on a CPU.",
    ),
    Topic(
        ("vLLM",),
        "vLLM is another inference server; aserve's scheduler follows the idea of its version 1.",
        "aserve also uses vLLM's names for fields, flags and metrics where it can.",
        ("How does aserve differ from vLLM?",),
    ),
    Topic(
        ("Starlette",),
        "Starlette is the small web framework on which aserve's HTTP routes are built.",
        "An aserve application can be mounted inside any other Starlette or FastAPI application.",
    ),
    Topic(
        ("Hypercorn",),
        "Hypercorn is the ASGI server that reads and writes aserve's HTTP connections, on uvloop.",
        "aserve ends its own streams at shutdown, so that Hypercorn can stop in time.",
    ),
    Topic(
        ("uvloop",),
        "uvloop is a fast event loop for asyncio; aserve's server runs on it, and the engine runs on any loop.",
        "It makes many small network writes cheaper.",
    ),
    Topic(
        ("the OpenAI API", "OpenAI compatibility"),
        "The OpenAI API is the set of HTTP requests that most clients speak; aserve answers its chat, completions and "
        "models requests.",
        "Existing clients work by changing their base URL.",
        ("Which API does aserve speak?", "Is aserve compatible with OpenAI?"),
    ),
    # ---- how to
    Topic(
        ("make serve",),
        "Run make serve, or python -m aserve --model demo, and the server listens on 127.0.0.1:8000.",
        "Give --model a folder or a Hugging Face id to serve your own model.",
        (
            "How do I start aserve?",
            "How do I start the server?",
            "How can I run aserve?",
            "How do I run it?",
            "How do I launch aserve?",
            "Which command starts the server?",
            "How to start aserve?",
        ),
    ),
    Topic(
        ("the port", "the default port"),
        "aserve listens on port 8000 of 127.0.0.1 unless --host and --port say otherwise.",
        "It binds to your own machine only, so nobody else can reach it by accident.",
        (
            "Which port does aserve use?",
            "What port does the server listen on?",
            "On which port does it run?",
            "How do I change the port?",
            "What is the default port of aserve?",
        ),
    ),
    Topic(
        ("the endpoints",),
        "The main endpoints are /v1/chat/completions, /v1/completions, /v1/models, /tokenize, /health and /metrics.",
        "Chat and completions answer whole or as a stream.",
        (
            "Which endpoints are there?",
            "Which endpoints does aserve have?",
            "What endpoints does the server offer?",
            "Which URLs can I call?",
            "List the endpoints.",
        ),
    ),
    Topic(
        ("the licence", "the license", "aserve's licence", "aserve's license"),
        "aserve is free software under the Apache License, version 2.0.",
        "You may use, change and share it, also commercially, if you keep the notices.",
        (
            "Which licence does aserve have?",
            "Under which license is aserve?",
            "Is aserve open source?",
            "Is aserve free?",
            "May I use aserve at work?",
        ),
    ),
    Topic(
        (),
        "Send stream: true in the request, and the answer comes token by token as server-sent events.",
        "With curl, add -N so that it prints the text at once.",
        ("How do I stream an answer?", "How can I get a stream?", "How do I turn on streaming?"),
    ),
    Topic(
        (),
        "Point the openai package at base_url http://127.0.0.1:8000/v1 with any API key, and use it as ever.",
        "Streams, models and errors work through its own types.",
        (
            "How do I use the OpenAI SDK?",
            "How do I use the openai package?",
            "Can I use the OpenAI client?",
            "How do I call aserve from Python?",
        ),
    ),
    Topic(
        (),
        "Use async with AsyncEngine(...) as engine inside your own event loop, and iterate over engine.generate(...).",
        "Leaving the context frees the memory, and no signal handler or global is touched.",
        (
            "How do I embed aserve?",
            "How do I embed the engine in my application?",
            "Can I use aserve as a library?",
            "How do I use aserve without HTTP?",
        ),
    ),
    Topic(
        (),
        "Ask with stream_options: {include_usage: true}, and the last chunk of the stream carries the token counts.",
        "A whole answer always carries them, under usage.",
        ("How do I get token counts?", "How do I see how many tokens I used?", "How do I get usage in a stream?"),
    ),
    Topic(
        (),
        "aserve is written in Python, and needs version 3.11 or newer.",
        "Its kernels are Python too, by way of Triton.",
        (
            "Which Python version does aserve need?",
            "What Python do I need?",
            "In which language is aserve written?",
            "What is aserve written in?",
        ),
    ),
    Topic(
        ("the LLM class",),
        "LLM is the blocking face for scripts: LLM(model).generate(prompts, params) returns all answers at once.",
        "It shows a progress bar while it works.",
        ("How do I use aserve in a script?", "How do I run a batch offline?"),
    ),
    Topic(
        ("AsyncEngine", "the AsyncEngine class"),
        "AsyncEngine is the engine that other programs import: it lives in your event loop and streams from "
        "engine.generate(...).",
        "Two engines can live in one process.",
    ),
    Topic(
        ("the health check", "/health", "the health endpoint"),
        "GET /health answers 200 as soon as the server listens, and GET /ready answers 200 once the model is loaded.",
        "A load balancer should ask /ready.",
        ("How do I check that the server is up?", "Is the server ready?", "How do I know when the model is loaded?"),
    ),
    Topic(
        ("the metrics", "/metrics", "the metrics endpoint"),
        "GET /metrics gives Prometheus counters and histograms whose names begin with aserve_.",
        "Watch aserve_num_requests_waiting and aserve_time_to_first_token_seconds first.",
        ("How do I monitor aserve?", "Which metrics are there?"),
    ),
    Topic(
        ("an API key", "the API key"),
        "Start the server with --api-key, once or several times, and clients must send one of the keys as a bearer "
        "token.",
        "The keys are compared in constant time.",
        ("How do I set an API key?", "How do I protect the server?", "How does authentication work?"),
    ),
    Topic(
        (),
        "aserve runs Llama, Mistral, Qwen2 and Qwen3 models natively, and other decoders through transformers.",
        "It reads config.json, tokenizer.json and safetensors from a folder or the Hugging Face hub.",
        (
            "Which models can aserve run?",
            "Which models are supported?",
            "What models does aserve support?",
            "Can aserve run Llama?",
            "Does aserve support Qwen?",
        ),
    ),
    Topic(
        (),
        "aserve runs on NVIDIA GPUs with Triton kernels, and on a CPU by the same code path with other kernels.",
        "A GPU is much faster, but the demo model is happy on two CPU cores.",
        ("Do I need a GPU?", "Does aserve run on a CPU?", "Which hardware does aserve need?", "Can I run it on a CPU?"),
    ),
    Topic(
        (),
        "When a client disconnects, its request is aborted and its blocks are free within one step.",
        "No work is done for a reader who has left.",
        (
            "What happens when a client disconnects?",
            "What happens if I close the connection?",
            "How do I abort a request?",
        ),
    ),
    Topic(
        (),
        "On SIGTERM the server takes no new requests, finishes the running ones and exits; a second signal stops at "
        "once.",
        "Every open stream ends properly.",
        ("How do I stop the server?", "How does the server shut down?", "What happens on SIGTERM?"),
    ),
    Topic(
        (),
        "If a step raises, it is rolled back and split until the culprit is found, and that request alone gets an "
        "error.",
        "Its neighbours' answers do not change by a single token.",
        (
            "What happens if one request is bad?",
            "Does one bad request break the others?",
            "What happens when a step fails?",
        ),
    ),
    # ---- the model itself
    Topic(
        (),
        "I am the aserve demo model, a demonstration with three million parameters that runs in aserve.",
        "I was trained in minutes on text written for this purpose, so I know little.",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Are you ChatGPT?",
            "Are you a human?",
            "Are you a robot?",
            "Which model are you?",
            "What model is this?",
            "Tell me about yourself.",
            "Introduce yourself.",
            "Who am I talking to?",
        ),
    ),
    Topic(
        ("the demo model", "the bundled model"),
        "The demo model is a tiny Llama of three million parameters that ships with aserve, to show that serving "
        "works.",
        "It is a demonstration and knows only what its training script composed.",
        ("Which model is bundled with aserve?",),
    ),
    Topic(
        (),
        "I can explain aserve and how language models are served, do small sums, tell short stories and answer in "
        "JSON.",
        "Try: What is paged attention? Or: Tell me a story about a fox.",
        (
            "What can you do?",
            "What do you know?",
            "How can you help me?",
            "Help",
            "What can I ask you?",
            "What are you good at?",
        ),
    ),
    Topic(
        (),
        "I was trained by scripts/train_demo.py in under thirty minutes on two CPU cores.",
        "The script composes all of my training text itself, so anybody can make me again.",
        ("How were you trained?", "Who made you?", "Who trained you?", "Who created you?", "Where do you come from?"),
    ),
    Topic(
        (),
        "I have about three million parameters in four layers, and my weights take less than eight megabytes.",
        "That is some thousand times less than a large model.",
        ("How big are you?", "How many parameters do you have?", "How large is the demo model?", "How small are you?"),
    ),
)

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Poland": "Warsaw", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Greece": "Athens", "Ireland": "Dublin", "Japan": "Tokyo", "China": "Beijing",
    "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Hungary": "Budapest",
    "the Netherlands": "Amsterdam", "the United Kingdom": "London", "the United States": "Washington",
}  # fmt: skip

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey there", "Hello there!", "Good morning", "Good evening",
            "Hi there", "hello world"),
        "Hello! I am the aserve demo model. Ask me about aserve, a small sum or a short story.",
    ),
    (("How are you?", "How are you doing?", "How is it going?", "What's up?"),
        "All blocks are free and the event loop is calm. How can I help?"),
    (("Thank you", "Thanks", "Thanks!", "Thank you very much!", "Great, thanks"), "You are welcome!"),
    (("Bye", "Goodbye", "Goodbye!", "See you", "See you later"), "Goodbye! Your blocks are free again."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please"),
        "Why did the token wait in the queue? Because its budget was spent."),
    (("Write a poem.", "Write a short poem.", "Write a poem about aserve.", "Give me a haiku.", "Write a haiku."),
     "One loop turns all day,\ntokens drift down quiet streams,\nblocks return at dusk."),
    (("Count to five.", "Count from one to five.", "Count from 1 to 5."), "1, 2, 3, 4, 5."),
    (("Count to ten.", "Count from one to ten.", "Count from 1 to 10.", "Please count to 10."),
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    (("Count to twenty.", "Count from 1 to 20.", "Please count to 20."),
     "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20."),
    (("Name the days of the week.", "List the days of the week.", "What are the days of the week?"),
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (("Name the months of the year.", "List the months.", "What are the months of the year?"),
     "January, February, March, April, May, June, July, August, September, October, November and December."),
    (("Name the seasons.", "What are the four seasons?", "List the seasons."), "Spring, summer, autumn and winter."),
    (("Name three colours.", "Name three colors.", "Tell me three colours."), "Red, green and blue."),
    (("What colour is the sky?", "What color is the sky?", "Which colour has the sky?"), "The sky is blue."),
    (("Say this is a test", "Say this is a test!", "Say: this is a test"), "This is a test."),
    (("Test", "test", "Testing", "ping", "Ping", "Are you there?"), "I am here and serving tokens."),
    (("How do you say hello in French?", "Say hello in French."), "Bonjour!"),
    (("How do you say hello in German?", "Say hello in German."), "Guten Tag!"),
    (("How do you say hello in Spanish?", "Say hello in Spanish."), "Hola!"),
    (("Write a Python function that adds two numbers.", "Write a function in Python.", "Write some Python code.",
        "Show me Python code."),
     "```python\ndef add(a: int, b: int) -> int:\n    return a + b\n```"),
    (("Write hello world in Python.", "Hello world in Python, please."), '```python\nprint("Hello, world!")\n```'),
    (("What is the meaning of life?", "What is the answer to everything?"),
        "The answer is 42, but I do not know the question."),
)  # fmt: skip
