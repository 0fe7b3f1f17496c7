"""Chat templates of the families in use, written after their documented prompt formats, and conversations for them."""

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}
    {{- '<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- content }}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] ~ eos_token }}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""

ZEPHYR = """\
{% for message in messages %}
{% if loop.first and message['role'] not in ['system', 'user'] %}{% continue %}{% endif %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

GEMMA = """\
{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}{% if message.role == 'system' %}\
{% set ns.first = message.content + '\\n\\n' %}{% else %}\
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' ~ role ~ '\\n' ~ (ns.first if loop.index0 <= 1 else '') ~ message['content'] | trim }}<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "zephyr": ZEPHYR, "gemma": GEMMA}

ASK = [{"role": "user", "content": 'What is 2 < 3 & "é" 🤖?\n'}]
TALK = [*ASK, {"role": "assistant", "content": "True."}, {"role": "user", "content": "  Why? "}]
SYSTEM = [{"role": "system", "content": " Be brief. "}, *TALK]
UNFINISHED = [*ASK, {"role": "assistant", "content": "It is "}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"z": "é<>", "a": [1, 2.5, None]}}}]
