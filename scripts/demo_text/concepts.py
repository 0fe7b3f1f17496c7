"""What the demo model knows about serving language models: one topic, one answer, one follow-up.

Knows the ideas of the field, not aserve's own commands (those are in product.py), and nothing of how a question is
worded around a name (wording.py).
"""

from .topic import Topic

CONCEPTS: tuple[Topic, ...] = (
    # ---- memory
    Topic(
        ("paged attention", "PagedAttention", "paging the KV cache"),
        "Paged attention keeps the KV cache in fixed-size blocks that may lie anywhere in memory, and reads them "
        "through a block table.",
        "It wastes almost no memory, because a sequence takes a new block only when the last one is full.",
        ("How does attention work over blocks?", "Which idea stores keys and values in pages?"),
    ),
    Topic(
        ("the KV cache", "a KV cache", "KV cache", "the key-value cache"),
        "The KV cache stores the keys and values of all earlier tokens, so that each step computes the new tokens "
        "only.",
        "Without it every new token would compute the whole text again.",
        ("Where are keys and values kept?", "Why do we cache keys and values?"),
    ),
    Topic(
        ("a block table", "the block table", "block table"),
        "A block table lists the blocks of one sequence in order: entry i holds tokens i * block_size and on.",
        "Thanks to it the blocks of a sequence need not lie next to each other.",
        ("How does a sequence find its blocks?", "What maps positions to blocks?"),
    ),
    Topic(
        ("a KV block", "a block", "a cache block"),
        "A block is a fixed number of token slots in the KV cache, 16 by default, and the unit in which memory is "
        "given out.",
        "Equal blocks never fragment memory: any free block is as good as any other.",
        ("How big is a block?", "How many tokens fit in a block?", "What is the block size?"),
    ),
    Topic(
        ("the block pool", "a block pool", "block pool"),
        "The block pool counts the references to each KV block and hands out free ones, least recently used first.",
        "Reference counts let several sequences share one block safely.",
        ("Who hands out the blocks?", "What counts the references to blocks?"),
    ),
    Topic(
        ("prefix caching", "the prefix cache", "automatic prefix caching", "a prefix cache"),
        "Prefix caching keeps the blocks of earlier prompts under a chained hash, so that a prompt with the same "
        "beginning skips that work.",
        "A shared system prompt is then computed once, and the first token comes sooner.",
        ("How are shared prompts reused?", "How does aserve reuse a common prefix?"),
    ),
    Topic(
        ("copy on write", "copy-on-write"),
        "Copy on write lets two sequences share a block until one of them writes to it; only then is the block copied.",
        "It makes several answers to one prompt cheap in memory.",
    ),
    Topic(
        ("a sequence", "a running sequence"),
        "A sequence is one answer in the making: its tokens, its block table and its two counters.",
        "A request for one answer is one sequence.",
    ),
    # ---- scheduling
    Topic(
        ("a batch", "a batch of tokens"),
        "A batch is all the tokens that one step computes, from many sequences at once.",
        "The weights are read once for all of it, which makes large batches efficient.",
    ),
    Topic(
        ("continuous batching", "in-flight batching", "iteration-level batching"),
        "Continuous batching forms a new batch at every step: finished sequences leave and waiting ones join at once.",
        "Short requests need not wait for long ones, and the device stays busy.",
        ("How are requests batched?", "How does aserve batch requests?"),
    ),
    Topic(
        ("chunked prefill", "chunked prefilling", "prefill chunking"),
        "Chunked prefill splits a long prompt over several steps, so that it shares each step with the sequences that "
        "are decoding.",
        "Nobody's stream stalls while somebody's long prompt is read.",
        ("What happens to a long prompt?", "Why are long prompts split?"),
    ),
    Topic(
        ("the unified scheduler", "the scheduler", "aserve's scheduler", "unified scheduling"),
        "The scheduler knows no prefill and no decode phase: every step hands out a token budget so that each "
        "sequence's num_computed catches up with its num_tokens.",
        "Chunked prefill, prefix caching and resumption after preemption are all that one idea.",
        ("How does scheduling work?", "How does aserve schedule requests?", "Who decides what a step computes?"),
    ),
    Topic(
        ("num_computed", "num_computed and num_tokens", "the num_computed counter"),
        "num_computed is how many tokens of a sequence are already in the KV cache, and num_tokens is how many it has; "
        "scheduling makes the first catch up with the second.",
        "A new prompt, a cached prefix and a resumed sequence differ only in these two numbers.",
        ("What does num_computed catch up with?", "What does num_tokens count?"),
    ),
    Topic(
        ("the token budget", "a token budget", "max_num_batched_tokens"),
        "The token budget is the most tokens that one step computes; running sequences are served first, then new "
        "ones.",
        "A small budget keeps streams smooth, and a large one reads prompts faster.",
        ("How many tokens does a step compute?", "What limits the size of a step?"),
    ),
    Topic(
        ("preemption", "preempting a sequence", "a preemption"),
        "Preemption takes the blocks of a running sequence when memory is short; the sequence waits and is computed "
        "again later.",
        "It lets the server admit more work than the worst case would allow, and lose no request.",
        ("What happens when the KV cache is full?", "What happens when memory runs out?"),
    ),
    Topic(
        ("the watermark", "a watermark"),
        "The watermark is a small share of blocks kept free at admission, so that running sequences can grow.",
        "Without it a new request could force a preemption in the very next step.",
    ),
    Topic(
        ("prefill", "the prefill phase", "prefilling"),
        "Prefill is computing the tokens of the prompt: many tokens at once, limited by arithmetic.",
        "It decides the time to the first token.",
        ("How is a prompt processed?",),
    ),
    Topic(
        ("decode", "the decode phase", "decoding"),
        "Decode is computing one new token at a time for each sequence, limited by memory bandwidth.",
        "Batching helps most here, because the weights are read once for the whole batch.",
        ("How are new tokens made?",),
    ),
    Topic(
        ("speculative decoding", "speculation", "a draft model"),
        "Speculative decoding lets a cheap draft guess several tokens, which the large model then checks in one step.",
        "Right guesses save steps, and the rejection rule keeps the output distribution exact.",
        ("How can guesses speed up decoding?",),
    ),
    # ---- sampling
    Topic(
        ("temperature", "the temperature", "sampling temperature"),
        "Temperature divides the logits before sampling: 0 always takes the likeliest token, and higher values are "
        "more random.",
        "Use 0 for facts and about 0.7 to 1 for stories.",
        ("What does temperature do?", "How do I make answers less random?"),
    ),
    Topic(
        ("top-p", "top_p", "nucleus sampling", "top-p sampling"),
        "Top-p keeps the smallest set of tokens whose probabilities add up to p, and samples among them.",
        "It cuts off the unlikely tail, however long that tail is.",
        ("What does top_p do?", "What does top-p do?"),
    ),
    Topic(
        ("top-k", "top_k", "top-k sampling"),
        "Top-k keeps the k likeliest tokens and samples among them; 0 turns it off.",
        "It is a simple guard against very unlikely tokens.",
        ("What does top_k do?", "What does top-k do?"),
    ),
    Topic(
        ("min-p", "min_p", "min-p sampling"),
        "Min-p drops every token whose probability is below min_p times that of the likeliest token.",
        "The cut adapts to how sure the model is.",
        ("What does min_p do?", "What does min-p do?"),
    ),
    Topic(
        ("a seed", "the seed", "seed"),
        "A seed fixes the random numbers of a request, so that the same request gives the same tokens again.",
        "It makes a sampled answer reproducible.",
        ("How do I get the same answer twice?", "How can sampling be reproducible?", "What does the seed do?"),
    ),
    Topic(
        ("greedy decoding", "greedy sampling", "greedy search"),
        "Greedy decoding takes the likeliest token at every step; ask for it with temperature 0.",
        "It is deterministic, which is good for tests and facts.",
        ("How do I turn off randomness?",),
    ),
    Topic(
        ("sampling parameters", "the sampling parameters"),
        "The sampling parameters are temperature, top_p, top_k, min_p and seed, and each request has its own.",
        "One batch can mix greedy and random requests.",
        ("Which sampling parameters are there?", "How can I control sampling?"),
    ),
    Topic(
        ("stop strings", "stop sequences"),
        "Stop strings end the answer as soon as one of them is complete; the stop string itself is left out.",
        "A stream holds back only the text that might still become a stop string.",
        ("How do I stop at a word?", "What does the stop field do?"),
    ),
    Topic(
        ("max_tokens", "the max_tokens field", "max_completion_tokens"),
        "max_tokens is the most tokens that an answer may have; an answer cut there has finish_reason length.",
        "It bounds the time and the memory that a request can take.",
        ("How do I limit the length of an answer?", "How can I get shorter answers?"),
    ),
    Topic(
        ("logits", "the logits"),
        "Logits are the scores that the model gives to every token of the vocabulary; softmax turns them into "
        "probabilities.",
        "Sampling works on them: temperature, top-k and top-p all change the logits.",
    ),
    Topic(
        ("softmax", "the softmax"),
        "Softmax turns scores into probabilities: the exponential of each, divided by the sum of all.",
        "Its results are positive and add up to one.",
    ),
    Topic(
        ("beam search", "a beam search"),
        "Beam search keeps the few best partial answers at every step and extends each of them.",
        "It finds likelier answers than greedy decoding, for more work.",
    ),
    # ---- text
    Topic(
        ("a prompt", "the prompt"),
        "A prompt is the text that the model continues: in a chat, all messages put through the chat template.",
        "A clear prompt is the easiest way to a better answer.",
    ),
    Topic(
        ("a token", "tokens"),
        "A token is a piece of text, often a word or a part of one, with a number that the model reads.",
        "Prices, limits and speeds of language models are counted in tokens.",
    ),
    Topic(
        ("tokenization", "a tokenizer", "the tokenizer", "tokenizing"),
        "Tokenization cuts text into tokens and maps each to a number; the tokenizer of a model does it both ways.",
        "POST /tokenize shows the tokens of a text.",
        ("How is text turned into numbers?", "How does text become tokens?"),
    ),
    Topic(
        ("byte-level BPE", "BPE", "byte pair encoding"),
        "Byte-level BPE starts from bytes and merges the most frequent pairs into longer tokens, so that any text can "
        "be encoded.",
        "No text is ever unknown to it, not even an emoji.",
    ),
    Topic(
        ("the detokenizer", "a detokenizer", "detokenization", "incremental detokenization"),
        "The detokenizer turns tokens back into text as they come, and never sends half a character.",
        "Any chunking of the tokens gives the same text.",
        ("How do tokens become text again?",),
    ),
    Topic(
        ("a chat template", "the chat template", "chat template"),
        "A chat template turns a list of messages into the one text that the model was trained to continue.",
        "A wrong template makes a good model look bad.",
        ("How do messages become a prompt?",),
    ),
    Topic(
        ("finish_reason", "the finish reason", "a finish reason"),
        "finish_reason says why an answer ended: stop at its natural end or at a stop string, length at the token "
        "limit.",
        "Check it before you trust that an answer is complete.",
        ("How do I know why an answer ended?",),
    ),
    # ---- measures
    Topic(
        ("TTFT", "time to first token", "the time to first token"),
        "TTFT is the time to first token: from sending a request until its first token arrives.",
        "It is mostly queueing and prefill, so a prefix cache and chunked prefill help it.",
        ("Which number measures the wait for the first token?",),
    ),
    Topic(
        ("inter-token latency", "ITL", "the inter-token latency"),
        "Inter-token latency is the time between one token of a stream and the next.",
        "Readers feel it as the speed of the text.",
        ("Which number measures the gap between tokens?",),
    ),
    Topic(
        ("throughput", "the throughput"),
        "Throughput is how many tokens per second the server produces over all requests together.",
        "Larger batches raise it, at some cost in latency.",
    ),
    # ---- devices
    Topic(
        ("a Triton kernel", "Triton", "Triton kernels", "the Triton language"),
        "A Triton kernel is a GPU program written in Python; aserve's attention, RoPE, norm and sampling kernels are "
        "written so.",
        "Each kernel has a twin in plain torch, and a test that the two agree.",
        ("How are the GPU kernels written?", "In which language are the kernels written?"),
    ),
    Topic(
        ("a CUDA stream", "CUDA streams", "CUDA stream"),
        "A CUDA stream is a queue of GPU work that runs in order; aserve launches a step on its own stream and awaits "
        "an event.",
        "The event loop goes on serving while the GPU computes.",
        ("How does the GPU work beside the event loop?",),
    ),
    Topic(
        ("a CUDA graph", "CUDA graphs", "CUDA graph"),
        "A CUDA graph records many kernel launches once and replays them with one call.",
        "It removes the launch cost, which dominates small decode steps.",
    ),
    # ---- models
    Topic(
        ("a language model", "an LLM", "a large language model", "LLM"),
        "A language model predicts the next token of a text; repeating that step writes an answer.",
        "Serving one well means doing that step for many people at once.",
        ("How does a language model write?",),
    ),
    Topic(
        ("a transformer", "the transformer", "the transformer architecture"),
        "A transformer is a stack of layers, each with attention, which mixes tokens, and an MLP, which works on each "
        "token.",
        "It reads all tokens of a prompt in parallel, which suits GPUs.",
    ),
    Topic(
        ("attention", "self-attention", "the attention mechanism"),
        "Attention lets each token take a weighted sum of the values of earlier tokens, weighted by query times key.",
        "It is how a model looks back at what was said.",
    ),
    Topic(
        ("grouped-query attention", "GQA", "grouped query attention"),
        "Grouped-query attention shares each key and value head among several query heads.",
        "It makes the KV cache several times smaller.",
    ),
    Topic(
        ("sliding window attention", "a sliding window", "the sliding window"),
        "Sliding window attention lets each token see only the last few thousand tokens.",
        "Its cost does not grow with the length of the text.",
    ),
    Topic(
        ("RoPE", "rotary position embedding", "rotary embeddings"),
        "RoPE rotates queries and keys by an angle that grows with the position, so that attention sees distances.",
        "Scaling its angles stretches a model to longer contexts.",
    ),
    Topic(
        ("RMSNorm", "RMS norm", "root mean square norm"),
        "RMSNorm divides a vector by its root mean square and multiplies it by a learned weight.",
        "It keeps the numbers in range from layer to layer.",
    ),
    Topic(
        ("safetensors", "a safetensors file", "the safetensors format"),
        "Safetensors is a file format for weights that is only numbers and a header, so loading it runs no code.",
        "That is why aserve refuses .bin and .pt files.",
    ),
    Topic(
        ("quantization", "quantizing a model"),
        "Quantization stores weights in fewer bits, such as 8 or 4, to save memory and bandwidth.",
        "Decode gets faster, because it is limited by reading the weights.",
    ),
    Topic(
        ("LoRA", "a LoRA adapter", "low-rank adaptation"),
        "LoRA adapts a model by adding a small product of two thin matrices to some of its weights.",
        "Many adapters can share one large model.",
    ),
    Topic(
        ("an embedding", "the embedding of a token", "token embeddings"),
        "An embedding is the vector that stands for a token inside the model.",
        "Similar tokens have similar vectors.",
    ),
    Topic(
        ("the context length", "the context window", "context length"),
        "The context length is the most tokens that prompt and answer may have together.",
        "A prompt that is too long is refused with both numbers, never cut in silence.",
        ("How long may a prompt be?", "What happens if my prompt is too long?"),
    ),
)
