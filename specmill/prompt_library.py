"""What Python's own library gives to prompts: functions with docstrings, paragraphs of topics.

PSF licence, nothing to download. Both follow the Python that runs this: another one gives others.
"""

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOO_LONG = 1500  # characters of a function or a paragraph
LEFT_OUT = {"test", "idlelib", "lib2to3", "turtledemo", "site-packages", "this", "antigravity"}


def functions() -> list[dict[str, str]]:
    """Public functions with a docstring, in order of module and line.

    Returns:
        Values for the slots `module`, `name`, `signature`, `doc` (its first paragraph) and `body`
        (the source; empty where it is longer than `TOO_LONG`).
    """
    folder = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).with_suffix("").parts
        if inside[0] in sys.stdlib_module_names and not LEFT_OUT & set(inside):
            module = ".".join(part for part in inside if part != "__init__")
            found += list(functions_of(module, path.read_text(errors="replace")))
    return found


def functions_of(module: str, source: str) -> Iterator[dict[str, str]]:
    """The public functions of one module's source that have a docstring."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if doc:
            yield {
                "module": module,
                "name": node.name,
                "signature": f"{node.name}({ast.unparse(node.args)})",
                "doc": doc.split("\n\n")[0],
                "body": body if body.count("\n") >= 4 and len(body) <= TOO_LONG else "",
            }


def topics() -> list[dict[str, str]]:
    """Paragraphs of 300 characters and more of the manual's topics, for the slot `topic_text`."""
    from pydoc_data.topics import topics as texts  # half a megabyte that only this needs

    return [
        {"topic_text": paragraph}
        for name in sorted(texts)
        for paragraph in paragraphs(texts[name])
        if 300 <= len(paragraph) <= TOO_LONG
    ]


def paragraphs(text: str) -> list[str]:
    """Paragraphs with their words in single spaces; grammars and code are left out."""
    blocks = re.split(r"\n\s*\n", text)
    prose = [block for block in blocks if "::=" not in block and not block.startswith("    ")]
    return [" ".join(block.split()) for block in prose]
