"""Requests as clients that people use send them: their fields are real, their texts are our own and short.

Each shape says who sends it and which file of that client makes it, or that we wrote it from memory.
A key of `must` is there in the answer without a stream; its value may be null.
Shapes whose `what` has the word image or document need a model that sees."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """`path`: with its query. `must`: dotted keys of the answer, such as choices.0.message.content."""

    client: str
    what: str
    path: str
    body: dict[str, Any]
    source: str
    must: tuple[str, ...] = ()


MEMORY = "from memory"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages?beta=true"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
PNG_URL = f"data:image/png;base64,{PNG}"
DRAFT = "http://json-schema.org/draft-07/schema#"

SAID = ("id", "object", "created", "model", "choices.0.index", "choices.0.finish_reason")
USED = ("usage.prompt_tokens", "usage.completion_tokens", "usage.total_tokens")
CHATTED = (*SAID, "choices.0.message.role", "choices.0.message.content", *USED)
COMPLETED = (*SAID, "choices.0.text", *USED)
MESSAGED = (
    "id",
    "type",
    "role",
    "model",
    "content",
    "stop_reason",
    "stop_sequence",
    "usage.input_tokens",
    "usage.output_tokens",
)
RESPONDED = (
    "id",
    "object",
    "status",
    "model",
    "output",
    "usage.input_tokens",
    "usage.input_tokens_details.cached_tokens",
    "usage.output_tokens",
    "usage.output_tokens_details.reasoning_tokens",
    "usage.total_tokens",
)


def schema(*names: str, optional: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An object of texts."""
    properties = {name: {"type": "string", "description": f"The {name}."} for name in (*names, *optional)}
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False} | more


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool of a chat."""
    described = {"name": name, "description": f"Use {name}.", "parameters": parameters} | more
    return {"type": "function", "function": described}


def flat(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool of a response."""
    described = {"name": name, "description": f"Use {name}.", "strict": False, "parameters": parameters}
    return {"type": "function"} | described | more


def tool(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool of a message."""
    return {"name": name, "description": f"Use {name}.", "input_schema": parameters} | more


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: str, id: str = "call_1", **more: Any) -> dict[str, Any]:
    """A call in a chat's history."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} | more


# -- Claude Code

EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
CLAUDE_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.278.abc; cc_entrypoint=cli; cch=00000;"},
    {"type": "text", "text": "You are a coding agent in a terminal.", "cache_control": HOUR},
    {"type": "text", "text": "Be brief. The folder is /home/me/app.", "cache_control": HOUR | {"scope": "global"}},
]
CLAUDE_USER = {"user_id": '{"device_id":"0f0f","account_uuid":"","session_id":"123e4567-e89b-12d3-a456-426614174000"}'}
BASH = tool(
    "Bash",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command."},
            "timeout": {"type": "number", "description": "Milliseconds."},
            "run_in_background": {"type": "boolean"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
)
READ = tool(
    "Read",
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "file_path": {"type": "string"},
            "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
            "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            "pages": {"type": "string", "pattern": r"^\d+(-\d+)?$"},
        },
        "required": ["file_path"],
        "additionalProperties": False,
    },
)
ASK = tool(
    "AskUserQuestion",
    {
        "type": "object",
        "properties": {
            "questions": {
                "type": "array",
                "minItems": 1,
                "maxItems": 4,
                "items": {
                    "type": "object",
                    "properties": {
                        "question": {"type": "string"},
                        "multiSelect": {"type": "boolean", "default": False},
                    },
                    "required": ["question"],
                },
            },
            "answers": {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
            "url": {"type": "string", "format": "uri"},
            "mode": {"anyOf": [{"type": "string", "enum": ["fast", "slow"]}, {"type": "null"}]},
        },
        "required": ["questions"],
    },
)
REMINDER = {"type": "text", "text": "<system-reminder>\nThe task list is empty.\n</system-reminder>\n"}
CLAUDE: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "system": CLAUDE_SYSTEM,
    "tools": [BASH, READ, ASK],
    "metadata": CLAUDE_USER,
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_READS = [
    {"role": "user", "content": [REMINDER, {"type": "text", "text": "Which files are here?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "List them.", "signature": "c2lnbmVk"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/none"}},
        ],
    },
]
CLAUDE_RESULTS = [
    {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.py\nb.py", "is_error": False},
    {
        "type": "tool_result",
        "tool_use_id": "toolu_02",
        "content": "<tool_use_error>File does not exist.</tool_use_error>",
        "is_error": True,
        "cache_control": EPHEMERAL,
    },
]


def claude_read(*content: dict[str, Any]) -> dict[str, Any]:
    """A turn after two calls that read files. `content`: the blocks of the user's message."""
    return CLAUDE | {"messages": [*CLAUDE_READS, {"role": "user", "content": [*content]}]}


CLAUDE_CODE = (
    Shape(
        "Claude Code",
        "first turn, with a system message after the user's",
        MESSAGES,
        CLAUDE
        | {
            "messages": [
                {"role": "user", "content": [REMINDER, {"type": "text", "text": "Hi", "cache_control": EPHEMERAL}]},
                {"role": "system", "content": "Agents that you may use: Explore, Plan."},
            ]
        },
        "a recorded request of claude-cli 2.1.239, and a public report of it",
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "results of two calls, and a system message after them",
        MESSAGES,
        CLAUDE
        | {
            "messages": [
                *CLAUDE_READS,
                {"role": "user", "content": [*CLAUDE_RESULTS, REMINDER]},
                {"role": "system", "content": [{"type": "text", "text": "The user adds: be quick."}]},
            ]
        },
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "deferred tools and references to them, without a stream",
        MESSAGES,
        {key: value for key, value in CLAUDE.items() if key != "stream"}
        | {
            "tools": [
                BASH | {"eager_input_streaming": True},
                tool("ToolSearch", schema("query", optional=("max_results",))),
                tool("WebFetch", schema("url", "prompt"), defer_loading=True),
                tool("mcp__notes__add", {"type": "object"}, defer_loading=True, strict=False),
            ],
            "messages": [
                user("Fetch example.com."),
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "toolu_3",
                            "name": "ToolSearch",
                            "input": {"query": "select:WebFetch"},
                        }
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_3",
                            "content": [{"type": "tool_reference", "tool_name": "WebFetch"}],
                        },
                        {"type": "text", "text": "Tool loaded."},
                    ],
                },
            ],
        },
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "an image in a tool's result",
        MESSAGES,
        claude_read(
            CLAUDE_RESULTS[0],
            {
                "type": "tool_result",
                "tool_use_id": "toolu_02",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}],
            },
        ),
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "a document that was read",
        MESSAGES,
        claude_read(
            *CLAUDE_RESULTS,
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQK"}},
        ),
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "the search of the web as a request of its own",
        MESSAGES,
        {
            "model": "claude-haiku-4-5-20251001",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Search the web for: rust news"}]}],
            "system": [CLAUDE_SYSTEM[0], {"type": "text", "text": "You search the web."}],
            "tools": [
                {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["example.com"], "max_uses": 8}
            ],
            "tool_choice": {"type": "tool", "name": "web_search"},
            "metadata": CLAUDE_USER,
            "max_tokens": 32000,
            "thinking": {"type": "disabled"},
            "stream": True,
        },
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "a title by a schema",
        MESSAGES,
        {
            "model": "claude-haiku-4-5-20251001",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Title for: fix the tests"}]}],
            "system": [CLAUDE_SYSTEM[0], {"type": "text", "text": "Write a title of few words."}],
            "tools": [],
            "metadata": CLAUDE_USER,
            "max_tokens": 64000,
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": schema("title")}},
            "stream": True,
        },
        "a recorded request of claude-cli 2.1.239",
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "a topic, whose answer has begun",
        MESSAGES,
        {
            "model": "claude-3-5-haiku-20241022",
            "max_tokens": 512,
            "messages": [user("Is this a new topic? Say isNewTopic and title."), {"role": "assistant", "content": "{"}],
            "system": [{"type": "text", "text": "Answer in JSON."}],
            "temperature": 0,
            "metadata": {"user_id": "user_0f_account__session_123"},
            "stop_sequences": ["\n\nHuman:"],
            "stream": True,
        },
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "a try of the quota",
        MESSAGES,
        {"model": "claude-haiku-4-5-20251001", "max_tokens": 1, "messages": [user("quota")], "metadata": CLAUDE_USER},
        MEMORY,
        MESSAGED,
    ),
    Shape(
        "Claude Code",
        "tokens of tools",
        "/v1/messages/count_tokens?beta=true",
        {
            "model": "claude-opus-4-8",
            "messages": [user("foo")],
            "tools": [BASH, READ, ASK],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        MEMORY,
        ("input_tokens",),
    ),
)

# -- Codex

APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files. Free text, not JSON.",
    "format": {
        "type": "grammar",
        "syntax": "lark",
        "definition": 'start: "*** Begin Patch" LF line+ "*** End Patch"\nline: /[^*].*/ LF\n%import common.LF\n',
    },
}
CODEX_TOOLS: list[dict[str, Any]] = [
    flat(
        "exec_command",
        {
            "type": "object",
            "properties": {
                "cmd": {"type": "string"},
                "yield_time_ms": {"type": "number"},
                "tty": {"type": "boolean"},
                "prefix_rule": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["cmd"],
            "additionalProperties": False,
        },
    ),
    flat("view_image", schema("path")),
    APPLY_PATCH,
    {"type": "web_search", "external_web_access": False, "search_context_size": "medium"},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": schema("query")},
    {
        "type": "namespace",
        "name": "mcp__notes__",
        "description": "Tools for notes.",
        "tools": [flat("add", schema("note"))],
    },
]
CODEX_SAID = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You may write in /app."}]},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/app</cwd>\n</environment_context>"}],
    },
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which files are here?"}]},
]
CODEX: dict[str, Any] = {
    "model": "gpt-oss-20b",
    "instructions": "You are a coding agent in a terminal.",
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81a0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "client_metadata": {
        "x-codex-installation-id": "8e5f2b9c-1f64-4bb1-9f0a-6a3c5a2b7d11",
        "session_id": "0199a213-81a0-7800-8aa1-bbab2a035a53",
        "x-codex-turn-metadata": '{"turn_id":"1"}',
    },
}
CODEX_MODELS = "codex-rs/protocol/src/models.rs"
CODEX_SPEC = "codex-rs/tools/src/tool_spec.rs"
CODEX_COMMON = "codex-rs/codex-api/src/common.rs"

CODEX_CLI = (
    Shape("Codex CLI", "first turn", RESPONSES, CODEX | {"input": CODEX_SAID}, CODEX_SPEC, RESPONDED),
    Shape(
        "Codex CLI",
        "a call, its output, and thoughts",
        RESPONSES,
        CODEX
        | {
            "input": [
                *CODEX_SAID,
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "List them."}],
                    "content": None,
                    "encrypted_content": None,
                },
                {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
                {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.py\n"},
            ]
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "a patch in free text",
        RESPONSES,
        CODEX
        | {
            "input": [
                *CODEX_SAID,
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I add a file."}],
                    "phase": "commentary",
                },
                {
                    "type": "custom_tool_call",
                    "status": "completed",
                    "call_id": "call_2",
                    "name": "apply_patch",
                    "input": "*** Begin Patch\n*** Add File: c.py\n+x = 1\n*** End Patch",
                },
                {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Success. Updated: A c.py"},
            ]
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "the local shell",
        RESPONSES,
        CODEX
        | {
            "model": "codex-mini-latest",
            "tools": [{"type": "local_shell"}],
            "parallel_tool_calls": False,
            "input": [
                *CODEX_SAID,
                {
                    "type": "local_shell_call",
                    "call_id": "call_3",
                    "status": "completed",
                    "action": {
                        "type": "exec",
                        "command": ["bash", "-lc", "ls"],
                        "timeout_ms": None,
                        "working_directory": "/app",
                        "env": None,
                        "user": None,
                    },
                },
                {"type": "function_call_output", "call_id": "call_3", "output": "a.py"},
            ],
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "tools that were searched, and a call by namespace",
        RESPONSES,
        CODEX
        | {
            "input": [
                *CODEX_SAID,
                {
                    "type": "tool_search_call",
                    "call_id": "call_4",
                    "status": "completed",
                    "execution": "client",
                    "arguments": {"query": "notes", "limit": 5},
                },
                {
                    "type": "tool_search_output",
                    "call_id": "call_4",
                    "status": "completed",
                    "execution": "client",
                    "tools": [
                        {
                            "type": "namespace",
                            "name": "mcp__notes__",
                            "description": "Tools for notes.",
                            "tools": [flat("add", schema("note"), defer_loading=True)],
                        }
                    ],
                },
                {
                    "type": "function_call",
                    "name": "add",
                    "namespace": "mcp__notes__",
                    "arguments": '{"note":"x"}',
                    "call_id": "call_5",
                },
                {
                    "type": "function_call_output",
                    "call_id": "call_5",
                    "output": [{"type": "input_text", "text": "Saved."}],
                },
            ]
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "an image as a call's output",
        RESPONSES,
        CODEX
        | {
            "input": [
                *CODEX_SAID,
                {"type": "function_call", "name": "view_image", "arguments": '{"path":"a.png"}', "call_id": "call_6"},
                {
                    "type": "function_call_output",
                    "call_id": "call_6",
                    "output": [{"type": "input_image", "image_url": PNG_URL, "detail": "high"}],
                },
            ]
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "an answer by a schema, without thoughts",
        RESPONSES,
        {
            "model": "gpt-oss-20b",
            "instructions": "You are a coding agent in a terminal.",
            "input": CODEX_SAID,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "include": [],
            "text": {
                "format": {
                    "type": "json_schema",
                    "strict": True,
                    "schema": schema("summary"),
                    "name": "codex_output_schema",
                }
            },
        },
        CODEX_COMMON,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "items of a long session",
        RESPONSES,
        CODEX
        | {
            "service_tier": "priority",
            "input": [
                *CODEX_SAID,
                {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "rust"}},
                {"type": "web_search_call", "action": {"type": "open_page", "url": "https://example.com"}},
                {"type": "compaction", "encrypted_content": "c2VjcmV0"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
            ],
        },
        CODEX_MODELS,
        RESPONDED,
    ),
    Shape(
        "Codex CLI",
        "tools as an item, without instructions",
        RESPONSES,
        {key: value for key, value in CODEX.items() if key not in ("instructions", "tools")}
        | {
            "parallel_tool_calls": False,
            "stream_options": {"include_obfuscation": False},
            "input": [
                {
                    "type": "additional_tools",
                    "role": "developer",
                    "tools": [
                        {
                            "type": "namespace",
                            "name": "functions",
                            "description": "Tools.",
                            "tools": [CODEX_TOOLS[0], APPLY_PATCH],
                        }
                    ],
                },
                *CODEX_SAID,
            ],
        },
        MEMORY,
        RESPONDED,
    ),
)

# -- opencode, Cline

OPENCODE_TOOLS = [
    function("bash", {"$schema": DRAFT} | schema("command", "description", optional=("workdir",))),
    function(
        "edit",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "filePath": {"type": "string"},
                "oldString": {"type": "string"},
                "newString": {"type": "string"},
                "replaceAll": {"type": "boolean"},
                "limit": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            },
            "required": ["filePath", "oldString", "newString"],
            "additionalProperties": False,
        },
    ),
]
OPENCODE: dict[str, Any] = {
    "model": "qwen3-coder",
    "max_tokens": 32000,
    "temperature": 0.55,
    "top_p": 1,
    "tools": OPENCODE_TOOLS,
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENCODE_SOURCE = "packages/opencode/src/provider/transform.ts"
AI_SDK = "vercel/ai packages/openai-compatible/src/chat/openai-compatible-chat-language-model.ts"
CLINE_TOOLS = [
    function("read_file", schema("path", optional=("task_progress",)), strict=False),
    function("attempt_completion", schema("result"), strict=False),
]
CLINE_VCR = "cline/cline sdk/packages/llms/src/tests/provider-vcr"

OPENCODE_AND_CLINE = (
    Shape(
        "opencode",
        "first turn",
        CHAT,
        OPENCODE | {"messages": [system("You are a coding agent."), system("The folder is /app."), user("Hi")]},
        OPENCODE_SOURCE,
        CHATTED,
    ),
    Shape(
        "opencode",
        "two calls at once, with thoughts",
        CHAT,
        OPENCODE
        | {
            "reasoning_effort": "high",
            "messages": [
                system("You are a coding agent."),
                user("Which files are here, and who am I?"),
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "List them.",
                    "tool_calls": [
                        call("bash", '{"command":"ls","description":"list"}'),
                        call("bash", '{"command":"whoami","description":"me"}', "call_2"),
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
                {"role": "tool", "tool_call_id": "call_2", "content": "me"},
            ],
        },
        AI_SDK,
        CHATTED,
    ),
    Shape(
        "opencode",
        "a title",
        CHAT,
        {
            "model": "qwen3-coder",
            "max_tokens": 32000,
            "temperature": 0.5,
            "messages": [system("Write a title."), user("Title for this talk:\n"), user("fix the tests")],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Cline",
        "a turn with tools",
        CHAT,
        {
            "model": "qwen3-coder",
            "max_tokens": 8192,
            "messages": [
                system("You are a coding agent."),
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<task>\nfix the tests\n</task>"},
                        {"type": "text", "text": "<environment_details>\n# Mode\nACT\n</environment_details>"},
                    ],
                },
                {"role": "assistant", "content": None, "tool_calls": [call("read_file", '{"path":"a.py"}')]},
                {"role": "tool", "tool_call_id": "call_1", "content": "x = 1"},
            ],
            "tools": CLINE_TOOLS,
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        "sdk/packages/llms/src/providers/vendors/openai-compatible.ts",
        CHATTED,
    ),
    Shape(
        "Cline",
        "a turn of an older version, without a limit",
        CHAT,
        {
            "model": "qwen3-coder",
            "messages": [
                system("Use <read_file><path></path></read_file>."),
                {"role": "user", "content": [{"type": "text", "text": "<task>hi</task>"}]},
                {"role": "assistant", "content": "<read_file><path>a.py</path></read_file>"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "[read_file for 'a.py'] Result:"},
                        {"type": "text", "text": "x = 1"},
                    ],
                },
            ],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Cline",
        "marks for a cache on the request and on a message",
        CHAT,
        {
            "cache_control": EPHEMERAL,
            "max_tokens": 32000,
            "messages": [system("Be brief."), {"cache_control": EPHEMERAL, "content": "Say OK.", "role": "user"}],
            "model": "anthropic/claude-sonnet-4.6",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        f"{CLINE_VCR}/cline-anthropic-sonnet.json",
        CHATTED,
    ),
    Shape(
        "Cline",
        "a message of the other API",
        "/v1/messages",
        {
            "max_tokens": 32000,
            "messages": [
                {"content": [{"cache_control": EPHEMERAL, "text": "Say OK.", "type": "text"}], "role": "user"}
            ],
            "model": "claude-sonnet-4-6",
            "stream": True,
            "system": [{"text": "Be brief.", "type": "text"}],
        },
        f"{CLINE_VCR}/anthropic-claude-sonnet-4-6.json",
        MESSAGED,
    ),
)

# -- Continue

FIM = "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n\nadd(1, 2)\n<|fim_middle|>"
FIM_STOPS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "/src/", "#- coding: utf-8", "```"]

CONTINUE = (
    Shape(
        "Continue",
        "a chat with tools, and a blank beside a call",
        CHAT,
        {
            "messages": [
                system("<important_rules>Be brief.</important_rules>"),
                user("Read a.py."),
                {"role": "assistant", "content": " ", "tool_calls": [call("read_file", '{"filepath":"a.py"}')]},
                {"role": "tool", "content": "x = 1", "tool_call_id": "call_1"},
            ],
            "model": "AUTODETECT",
            "max_tokens": 4096,
            "temperature": 0.5,
            "stream": True,
            "tools": [function("read_file", {"type": "object", "properties": {"filepath": {"type": "string"}}})],
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        },
        "core/llm/openaiTypeConverters.ts",
        CHATTED,
    ),
    Shape(
        "Continue",
        "an edit with a prediction",
        CHAT,
        {
            "messages": [user("Apply: rename a to b.\n```\na = 1\n```")],
            "model": "Fast-Apply",
            "max_tokens": 4096,
            "temperature": 0.01,
            "stream": True,
            "stop": ["<|im_end|>"],
            "prediction": {"type": "content", "content": "a = 1"},
            "stream_options": {"include_usage": True},
        },
        "core/llm/llms/OpenAI.ts",
        CHATTED,
    ),
    Shape(
        "Continue",
        "autocomplete at llama.cpp",
        "/completion",
        {
            "model": "qwen2.5-coder",
            "prompt": FIM,
            "stream": True,
            "n_predict": 4096,
            "stop": FIM_STOPS,
            "temperature": 0.01,
        },
        "core/llm/llms/LlamaCpp.ts",
        ("content",),
    ),
    Shape(
        "Continue",
        "autocomplete as a completion",
        COMPLETIONS,
        {
            "model": "qwen2.5-coder",
            "max_tokens": 4096,
            "temperature": 0.01,
            "stop": FIM_STOPS,
            "prompt": FIM,
            "stream": True,
        },
        "core/llm/llms/OpenAI.ts",
        COMPLETED,
    ),
    Shape(
        "Continue",
        "a response with nulls and items without a type",
        RESPONSES,
        {
            "model": "gpt-5-local",
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Say OK."},
            ],
            "temperature": None,
            "top_p": None,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": "ls", "description": "List.", "parameters": {"type": "object"}}],
            "max_output_tokens": 4096,
            "stream": True,
        },
        "core/llm/llms/OpenAI.ts",
        RESPONDED,
    ),
    Shape(
        "Editor plugins",
        "a completion between two texts",
        COMPLETIONS,
        {
            "model": "codestral-latest",
            "prompt": "def add(a, b):\n    ",
            "suffix": "\n\nadd(1, 2)\n",
            "max_tokens": 256,
            "temperature": 0,
            "stop": ["\n\n"],
            "stream": False,
        },
        MEMORY,
        COMPLETED,
    ),
)

# -- Open WebUI

OPEN_WEBUI_METADATA = {
    "user_id": "u1",
    "chat_id": "c1",
    "message_id": "m1",
    "session_id": "s1",
    "tool_ids": None,
    "files": None,
    "features": {"web_search": False, "image_generation": False, "code_interpreter": False},
    "variables": {"{{USER_NAME}}": "Me"},
    "function_calling": "native",
}
OPEN_WEBUI_PAYLOAD = "backend/open_webui/utils/payload.py"
OPEN_WEBUI_TASKS = "backend/open_webui/routers/tasks.py"

OPEN_WEBUI = (
    Shape(
        "Open WebUI",
        "a chat",
        CHAT,
        {"stream": True, "model": "local", "messages": [user("Hi")], "stream_options": {"include_usage": True}},
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Open WebUI",
        "a chat with all that its settings may add",
        CHAT,
        {
            "stream": True,
            "model": "local",
            "messages": [system("Be brief."), user("Hi")],
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repeat_penalty": 1.1,
            "repeat_last_n": 64,
            "tfs_z": 1,
            "mirostat": 0,
            "mirostat_eta": 0.1,
            "mirostat_tau": 5,
            "max_tokens": 128,
            "seed": 0,
            "stop": ["###"],
            "logit_bias": {"5": -100},
            "reasoning_effort": "medium",
            "think": False,
            "keep_alive": "5m",
            "num_ctx": 2048,
            "num_keep": 24,
            "num_batch": 512,
            "num_thread": 2,
            "num_gpu": 0,
            "use_mmap": True,
            "use_mlock": False,
        },
        OPEN_WEBUI_PAYLOAD,
        CHATTED,
    ),
    Shape(
        "Open WebUI",
        "calls of tools with an index",
        CHAT,
        {
            "stream": True,
            "model": "local",
            "messages": [
                user("Which time is it?"),
                {"role": "assistant", "content": "", "tool_calls": [call("get_time", "{}", index=0)]},
                {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
            ],
            "tools": [
                function("get_time", {"type": "object", "properties": {"zone": {"type": "string", "default": "UTC"}}})
            ],
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Open WebUI",
        "a chat with an image and with a user that is an object",
        CHAT,
        {
            "stream": True,
            "model": "pipe.local",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": PNG_URL}},
                    ],
                }
            ],
            "user": {"name": "Me", "id": "u1", "email": "me@example.com", "role": "admin"},
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Open WebUI",
        "a title",
        CHAT,
        {
            "model": "local",
            "messages": [user('### Task:\nWrite a title as JSON: { "title": "..." }\n### Chat History:\nUSER: Hi')],
            "stream": False,
            "max_completion_tokens": 1000,
        },
        OPEN_WEBUI_TASKS,
        CHATTED,
    ),
    Shape(
        "Open WebUI",
        "tags, from the browser itself",
        CHAT,
        {
            "model": "local",
            "messages": [user('### Task:\nWrite tags as JSON: { "tags": ["a"] }\n### Chat History:\nUSER: Hi')],
            "stream": False,
            "params": {},
            "options": {"temperature": 0.1, "num_ctx": 2048},
            "features": {"web_search": False},
            "session_id": "s1",
            "chat_id": "c1",
            "id": "m1",
            "background_tasks": {"title_generation": True, "tags_generation": True},
            "metadata": OPEN_WEBUI_METADATA | {"task": "tags_generation"},
        },
        MEMORY,
        CHATTED,
    ),
)

# -- SillyTavern

TAVERN: dict[str, Any] = {
    "prompt": "Me and Ada talk.\nMe: Hi!\nAda:",
    "max_new_tokens": 250,
    "max_tokens": 250,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "sampler_seed": -1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "top_p", "min_p", "xtc", "temperature"],
    "stopping_strings": ["\nMe:"],
    "stop": ["\nMe:"],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "llamacpp",
    "api_server": "http://127.0.0.1:8080/",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "repetition_penalty_range": 0,
    "seed": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "grammar_string": "",
    "repeat_penalty": 1.2,
    "tfs_z": 1,
    "repeat_last_n": 0,
    "n_predict": 250,
    "num_predict": 250,
    "num_ctx": 8192,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
    "stream": True,
    "logit_bias": [],
    "grammar": "",
    "cache_prompt": True,
}
TAVERN_TEXT = "public/scripts/textgen-settings.js"

SILLY_TAVERN = (
    Shape("SillyTavern", "a text at llama.cpp", "/completion", TAVERN, TAVERN_TEXT, ("content", "stop")),
    Shape(
        "SillyTavern",
        "a text with probabilities, bans and a range of temperatures",
        "/completion",
        TAVERN
        | {
            "stream": False,
            "logprobs": 10,
            "n_probs": 10,
            "logit_bias": [[5, -1.5], [7, False]],
            "custom_token_bans": "7",
            "banned_strings": ["shiver"],
            "samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"],
            "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
            "dynamic_temperature": True,
            "dynatemp_low": 0.5,
            "dynatemp_high": 1.5,
            "dynatemp_range": 0.5,
            "dynatemp_exponent": 1,
        },
        TAVERN_TEXT,
        ("content", "completion_probabilities"),
    ),
    Shape(
        "SillyTavern",
        "a text by a schema",
        "/completion",
        {key: value for key, value in TAVERN.items() if key not in ("grammar", "grammar_string")}
        | {"json_schema": schema("mood")},
        TAVERN_TEXT,
        ("content",),
    ),
    Shape(
        "SillyTavern",
        "an image in a text",
        "/completion",
        {
            "prompt": "USER:[img-1]What is this?\nASSISTANT:",
            "image_data": [{"data": PNG, "id": 1}],
            "temperature": 0.1,
            "stream": False,
            "stop": ["USER:", "</s>"],
        },
        "src/endpoints/backends/text-completions.js",
        ("content",),
    ),
    Shape(
        "SillyTavern",
        "a chat with names and probabilities",
        CHAT,
        {
            "messages": [
                system("You are Ada."),
                {"role": "system", "content": "Hi!", "name": "example_user"},
                {"role": "system", "content": "Hello!", "name": "example_assistant"},
                system("[Start a new Chat]"),
                {"role": "user", "content": "Hi!", "name": "Me"},
            ],
            "model": "local",
            "temperature": 1,
            "max_tokens": 300,
            "stream": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "stop": ["\nMe:"],
            "logit_bias": {},
            "seed": 5,
            "n": 1,
            "logprobs": True,
            "top_logprobs": 5,
        },
        "src/endpoints/backends/chat-completions.js",
        (*CHATTED, "choices.0.logprobs.content"),
    ),
    Shape(
        "SillyTavern",
        "a chat whose answer has begun, with fields that its user added",
        CHAT,
        {
            "messages": [system("You are Ada."), user("Hi!"), {"role": "assistant", "content": "Oh,"}],
            "model": "local",
            "temperature": 1,
            "max_tokens": 300,
            "stream": False,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_p": 1,
            "top_k": 40,
            "min_p": 0.05,
            "repeat_penalty": 1.1,
            "chat_template_kwargs": {"enable_thinking": False},
        },
        "src/endpoints/backends/chat-completions.js",
        CHATTED,
    ),
    Shape("SillyTavern", "tokens", "/tokenize", {"content": "Hi!"}, MEMORY, ("tokens",)),
)

# -- LangChain

ANSWER = schema("answer", title="Answer")

LANGCHAIN = (
    Shape(
        "LangChain",
        "two answers, with probabilities",
        CHAT,
        {
            "messages": [system("Be brief."), user("Hi")],
            "model": "local",
            "stream": False,
            "n": 2,
            "temperature": 0.7,
            "max_completion_tokens": 256,
            "seed": 5,
            "stop": ["\nObservation"],
            "logprobs": True,
            "top_logprobs": 2,
            "logit_bias": {"5": -100},
            "user": "me",
        },
        MEMORY,
        (*CHATTED, "choices.1.message.content", "choices.0.logprobs.content"),
    ),
    Shape(
        "LangChain",
        "an answer by a schema",
        CHAT,
        {
            "messages": [user("What is 1 + 1?")],
            "model": "local",
            "temperature": 0,
            "stream": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Answer", "description": "The answer.", "schema": ANSWER, "strict": True},
            },
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "LangChain",
        "an answer by a tool that must be called",
        CHAT,
        {
            "messages": [user("What is 1 + 1?")],
            "model": "local",
            "tools": [function("Answer", ANSWER)],
            "tool_choice": {"type": "function", "function": {"name": "Answer"}},
            "parallel_tool_calls": False,
            "stream": False,
        },
        MEMORY,
        (*SAID, "choices.0.message.tool_calls.0.id", "choices.0.message.tool_calls.0.function.arguments", *USED),
    ),
    Shape(
        "LangChain",
        "an agent's history, in a stream",
        CHAT,
        {
            "messages": [
                user("What is 1 + 1?"),
                {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1, "b": 1}')]},
                {"role": "tool", "content": "2", "tool_call_id": "call_1"},
            ],
            "model": "local",
            "tools": [function("add", {"type": "object", "properties": {"a": {"type": "integer"}}})],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "LangChain",
        "completions of two texts, with nulls",
        COMPLETIONS,
        {
            "model": "local",
            "prompt": ["One, two,", "Red, green,"],
            "temperature": 0.7,
            "max_tokens": 256,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "logit_bias": {},
            "seed": None,
            "logprobs": None,
            "stop": None,
        },
        "libs/partners/openai/langchain_openai/llms/base.py",
        (*COMPLETED, "choices.1.text", "choices.1.index"),
    ),
    Shape(
        "LangChain",
        "a response by a schema",
        RESPONSES,
        {
            "model": "local",
            "input": [
                {"role": "system", "content": "Be brief.", "type": "message"},
                {"role": "user", "content": "What is 1 + 1?", "type": "message"},
            ],
            "text": {"format": {"type": "json_schema", "name": "Answer", "schema": ANSWER, "strict": True}},
            "temperature": 0,
            "max_output_tokens": 256,
            "truncation": "auto",
            "stream": False,
        },
        MEMORY,
        RESPONDED,
    ),
)

# -- llama.vim, llama.vscode, llama.cpp's page

VIM = "autoload/llama.vim"
VIM_TIMES = tuple(
    f"timings/{part}_{name}" for part in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")
)
EXTRA = [{"text": "def sub(a, b):\n    return a - b\n", "time": 1738281600, "filename": "b.py"}]
INFILL: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def add(a, b):\n",
    "input_suffix": "\n\nadd(1, 2)\n",
    "input_extra": EXTRA,
    "prompt": "    return",
    "n_predict": 128,
}
WARM: dict[str, Any] = INFILL | {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
VSCODE = "src/llama-server.ts"

LLAMA_CPP = (
    Shape(
        "llama.vim",
        "a warm cache, with an empty name of a model",
        "/infill",
        WARM
        | {
            "temperature": 0.0,
            "stream": False,
            "cache_prompt": True,
            "t_max_prompt_ms": 1,
            "t_max_predict_ms": 1,
            "response_fields": [""],
            "model": "",
        },
        VIM,
    ),
    Shape(
        "llama.vim",
        "a line",
        "/infill",
        INFILL
        | {
            "stop": [],
            "n_indent": 4,
            "top_k": 40,
            "top_p": 0.90,
            "samplers": ["top_k", "top_p", "infill"],
            "stream": False,
            "cache_prompt": True,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 1000,
            "response_fields": ["content", *VIM_TIMES, "truncated", "tokens_cached"],
            "model": "",
        },
        VIM,
        ("content", *VIM_TIMES, "truncated", "tokens_cached"),
    ),
    Shape(
        "llama.vim",
        "a warm cache for an instruction",
        CHAT,
        {
            "id_slot": 0,
            "messages": [system("Edit the text.\n--- SELECTION\na = 1\n"), user("")],
            "samplers": [],
            "n_predict": 0,
            "stream": False,
            "cache_prompt": True,
            "response_fields": [""],
            "model": "",
        },
        VIM,
    ),
    Shape(
        "llama.vim",
        "an instruction, in a slot that may not be",
        CHAT,
        {
            "id_slot": 7,
            "messages": [system("Edit the text.\n--- SELECTION\na = 1\n"), user("INSTRUCTION: rename a to b")],
            "min_p": 0.1,
            "temperature": 0.1,
            "samplers": ["min_p", "temperature"],
            "stream": True,
            "cache_prompt": True,
            "model": "",
        },
        VIM,
        ("choices.0.message.content",),
    ),
    Shape(
        "llama.vscode",
        "a warm cache",
        "/infill",
        WARM | {"cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1, "lora": [{"id": 0, "scale": 0.5}]},
        VSCODE,
    ),
    Shape(
        "llama.vscode",
        "some lines to choose from",
        "/infill",
        INFILL
        | {
            "n_cmpl": 3,
            "top_k": 40,
            "top_p": 0.99,
            "stream": False,
            "samplers": ["top_k", "top_p", "infill"],
            "cache_prompt": True,
            "n_indent": 4,
            "t_max_prompt_ms": 500,
            "t_max_predict_ms": 2500,
            "model": "qwen2.5-coder",
        },
        VSCODE,
        ("0.content", "2.content"),
    ),
    Shape(
        "llama.vscode",
        "an edit",
        CHAT,
        {
            "messages": [system("You edit code.\n"), user("Rename a to b:\na = 1")],
            "stream": False,
            "cache_prompt": True,
            "temperature": 0.8,
            "top_p": 0.95,
        },
        VSCODE,
        ("choices.0.message.content",),
    ),
    Shape(
        "llama.vscode",
        "an agent's turn",
        CHAT,
        {
            "messages": [
                system("You are a coding agent."),
                user("Which files are here?"),
                {"role": "assistant", "content": None, "tool_calls": [call("list_directory", "{}")]},
                {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
            ],
            "stream": True,
            "tools": [
                function("list_directory", {"type": "object", "properties": {}, "required": []}, strict=True),
                function("run_terminal_command", schema("command")),
            ],
            "tool_choice": "auto",
            "max_tokens": 4096,
        },
        VSCODE,
        CHATTED,
    ),
    Shape(
        "llama.vscode",
        "a prompt of an agent's turn",
        "/apply-template",
        {
            "messages": [system("You are a coding agent."), user("Hi")],
            "model": "local",
            "tools": [function("run_terminal_command", schema("command"))],
            "tool_choice": "auto",
        },
        VSCODE,
        ("prompt",),
    ),
    Shape(
        "llama.vscode",
        "tokens of a prompt",
        "/tokenize",
        {"content": "You are a coding agent.\n", "add_special": False, "parse_special": True},
        VSCODE,
        ("tokens",),
    ),
    Shape(
        "llama.cpp's page",
        "a chat",
        CHAT,
        {
            "messages": [user("Hi"), {"role": "assistant", "content": "Hello."}, user("Say OK.")],
            "stream": True,
            "return_progress": True,
            "model": "local",
            "reasoning_format": "auto",
            "temperature": 0.8,
            "max_tokens": -1,
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
            "xtc_probability": 0,
            "xtc_threshold": 0.1,
            "typ_p": 1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
            "backend_sampling": False,
            "timings_per_token": True,
        },
        "tools/server/webui/src/lib/services/chat.service.ts",
        (*CHATTED, "timings.prompt_n", "timings.prompt_ms", "timings.predicted_n", "timings.predicted_ms"),
    ),
)

# -- vLLM's fields, OpenRouter's, Ollama's

HARNESS = "lm_eval/models/openai_completions.py"

OTHERS = (
    Shape(
        "lm-eval",
        "how likely two texts are, by their tokens",
        COMPLETIONS,
        {
            "model": "local",
            "prompt": [[1, 5, 6, 7, 8], [1, 9, 10, 11]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
        HARNESS,
        ("choices.1.index", "choices.1.logprobs.token_logprobs", "choices.1.logprobs.top_logprobs"),
    ),
    Shape(
        "lm-eval",
        "a completion",
        COMPLETIONS,
        {
            "prompt": ["Question: 1 + 1?\nAnswer:"],
            "model": "local",
            "max_tokens": 256,
            "temperature": 0,
            "stop": ["Question:", "</s>", "<|im_end|>", "\n\n"],
            "seed": 1234,
        },
        HARNESS,
        ("choices.0.index", "choices.0.text"),
    ),
    Shape(
        "lm-eval",
        "a chat",
        CHAT,
        {
            "messages": [user("1 + 1?")],
            "model": "local",
            "max_tokens": 256,
            "temperature": 0,
            "stop": ["Question:", "</s>", "<|im_end|>", "\n\n"],
            "seed": 1234,
        },
        HARNESS,
        ("choices.0.index", "choices.0.message.content"),
    ),
    Shape(
        "vLLM's clients",
        "a chat with fields of older versions",
        CHAT,
        {
            "model": "local",
            "messages": [user("What is 1 + 1?")],
            "max_tokens": 64,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "length_penalty": 1.0,
            "stop_token_ids": [2],
            "include_stop_str_in_output": False,
            "ignore_eos": False,
            "min_tokens": 0,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "echo": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "guided_json": ANSWER,
            "guided_decoding_backend": "xgrammar",
            "priority": 0,
            "cache_salt": "me",
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "vLLM's clients",
        "a chat by one of some texts",
        CHAT,
        {
            "model": "local",
            "messages": [user("Is it good?")],
            "max_tokens": 16,
            "structured_outputs": {"choice": ["good", "bad"]},
            "return_token_ids": False,
            "truncate_prompt_tokens": None,
            "prompt_logprobs": None,
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "instructor",
        "a tool that must be called",
        CHAT,
        {
            "messages": [user("Ada is 30.")],
            "model": "local",
            "tools": [
                function(
                    "Person",
                    {
                        "properties": {
                            "name": {"title": "Name", "type": "string"},
                            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Age"},
                            "friend": {"anyOf": [{"$ref": "#/$defs/Friend"}, {"type": "null"}], "default": None},
                        },
                        "$defs": {"Friend": {"properties": {"name": {"type": "string"}}, "type": "object"}},
                        "required": ["name"],
                        "type": "object",
                    },
                )
            ],
            "tool_choice": {"type": "function", "function": {"name": "Person"}},
        },
        "instructor/process_response.py",
        (*SAID, "choices.0.message.tool_calls.0.function.arguments", *USED),
    ),
    Shape(
        "OpenRouter's clients",
        "a chat with routes and thoughts",
        CHAT,
        {
            "model": "local",
            "models": ["local", "other"],
            "route": "fallback",
            "provider": {"order": ["a"], "allow_fallbacks": True, "sort": "price", "data_collection": "deny"},
            "transforms": ["middle-out"],
            "plugins": [{"id": "web", "max_results": 3}],
            "reasoning": {"effort": "high", "exclude": False},
            "usage": {"include": True},
            "include_reasoning": True,
            "verbosity": "low",
            "top_a": 0,
            "repetition_penalty": 1,
            "max_tokens": 4096,
            "user": "me",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}]},
                user("Hi"),
                {
                    "role": "assistant",
                    "content": "Hello.",
                    "reasoning": "Greet.",
                    "reasoning_details": [{"type": "reasoning.text", "text": "Greet.", "format": None, "index": 0}],
                },
                user("Say OK."),
            ],
            "stream": True,
        },
        MEMORY,
        CHATTED,
    ),
    Shape(
        "Ollama's clients",
        "a chat with options",
        CHAT,
        {
            "model": "local",
            "messages": [user("What is 1 + 1?")],
            "stream": False,
            "think": "low",
            "keep_alive": -1,
            "format": ANSWER,
            "options": {"num_ctx": 4096, "num_predict": 64, "temperature": 0, "stop": ["###"]},
        },
        MEMORY,
        CHATTED,
    ),
)

SHAPES: tuple[Shape, ...] = (
    *CLAUDE_CODE,
    *CODEX_CLI,
    *OPENCODE_AND_CLINE,
    *CONTINUE,
    *OPEN_WEBUI,
    *SILLY_TAVERN,
    *LANGCHAIN,
    *LLAMA_CPP,
    *OTHERS,
)
