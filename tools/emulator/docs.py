"""The instruction table of docs/emulator.md, generated from the code."""

from collections import defaultdict

from mok.tools.emulator import encode_mem, encode_ops
from mok.tools.emulator.alu_table import TABLE

BEGIN, END = "<!-- instructions: generated -->", "<!-- end -->"


def instruction_table() -> str:
    """Markdown: every mnemonic that is implemented, and how."""
    from mok.tools.emulator.emulator import handlers

    assert encode_mem  # registers its encoders on import
    compiled: dict[str, list[str]] = defaultdict(list)
    python = dict(handlers())
    families = {name.split(".")[0] for name in python}
    for name, function in encode_ops.HANDLERS.items():
        if function is not encode_mem.python_op and (
            name not in families or name in ("cp", "fence")
        ):
            compiled[function.__name__.strip("_")].append(name)
    lines = ["| instruction | executed by | what it does |", "| --- | --- | --- |"]
    for group, names in sorted(compiled.items()):
        text = ", ".join(f"`{n}`" for n in sorted(names))
        lines.append(f"| {text} | compiled interpreter | {group.replace('_', ' ')} |")
    handled: dict[str, list[str]] = defaultdict(list)
    for name, function in sorted(python.items()):
        summary = (function.__doc__ or "").strip().split("\n\n")[0].rstrip(".")
        handled[" ".join(summary.split())].append(name)
    for summary, names in handled.items():
        text = ", ".join(f"`{n}`" for n in names)
        lines.append(f"| {text} | Python | {summary} |")
    ops = ", ".join(f"`{name}`" for name in TABLE)
    return "\n".join(lines) + f"\n\nRegister operations ({len(TABLE)}): {ops}."


def update(text: str) -> str:
    """A document with its generated part replaced."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{instruction_table()}\n{END}{tail}"
