"""The chat templates in a model file's header. Renders nothing."""

from collections.abc import Mapping

from pipeinfer.models.gguf.header import Value

KEY = "tokenizer.chat_template"


def template_of(metadata: Mapping[str, Value]) -> str | None:
    """The default template, in Jinja; None if the file has none."""
    value = metadata[KEY].value if KEY in metadata else None
    return value if isinstance(value, str) and value.strip() else None


def named_templates(metadata: Mapping[str, Value]) -> dict[str, str]:
    """Name -> further templates of the file, for uses such as tools."""
    found = {key.removeprefix(f"{KEY}."): value.value for key, value in metadata.items() if key.startswith(f"{KEY}.")}
    return {name: text for name, text in found.items() if isinstance(text, str)}
