"""Chat templates in the style of known families, written for the tests: what they write around answers."""

OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>Call: <tool_call>{% endif %}"
CHATML_TOOLS = (
    "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'Be kind.' }}"
    + TOOLS
    + "<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% elif m.role != 'system' %}<|im_start|>{{ m.role }}\nCONTENT<|im_end|>\n{% endif %}{% endfor %}"
)
# Writes thoughts behind the last message of the user alone; without thoughts it opens with an empty one.
WITHOUT_THOUGHTS = (
    "{% if m.role == 'assistant' and loop.index0 < last.user %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
)
LAST_USER = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
EMPTY_THOUGHT = "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"

QWEN2 = CHATML_TOOLS.replace("CONTENT", "{{ m.content }}") + OPENING
QWEN3 = LAST_USER + CHATML_TOOLS.replace("CONTENT", WITHOUT_THOUGHTS) + OPENING + EMPTY_THOUGHT
# As the real one: thoughts of a row of calls stay, with other line breaks; the last message gets an empty one.
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if loop.first and tools %}{{ tools | tojson }} Write"
    ' {"name": .., "parameters": ..}.{{ "\n\n" }}{% endif %}'
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    LAST_USER + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined %}{{ raise_exception('a call has an id') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
# No opening behind an answer of a tool, only behind the user's.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}<|tool|>{{ m.content }}<|/tool|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'user' %}<|Assistant|>{% endif %}"
)
# Opens a thought in each prompt, of which it writes nothing later.
THINKER = DEEPSEEK.replace("'user' %}<|Assistant|>{% endif %}", "'user' %}<|Assistant|><think>\n{% endif %}")
# A turn has no end of its own: the token that opens the next one ends it.
GLM = (
    "[gMASK]{% if tools %}<|system|>\n{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
COHERE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role != 'tool' %}"
    "<|turn|><|{{ m.role }}|>{{ m.content | trim }}<|/turn|>{% else %}"
    "<|turn|><|system|><results>{{ m.content | upper }}</results><|/turn|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|><|assistant|>{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{{ '=' if m.role != 'assistant' else eos_token }}{% endfor %}"

SPECIAL = (  # noqa: SIM905
    "<eos> <bos> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <start_of_turn> "
    "<end_of_turn> <|end|> <|system|> <|user|> <|assistant|> <|User|> <|Assistant|> <|tool|> <|/tool|> [INST] [/INST] "
    "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [gMASK] <|observation|> <|turn|> <|/turn|>"
).split()
# Tokens of their own that are not special, as in Qwen.
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Tokens at which a model stops.
STOPS = ["<eos>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|user|>", "<|observation|>"]
STOPS += ["<|/turn|>"]
