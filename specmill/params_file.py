"""Reading params.yaml, saying what is wrong with it, and describing it.

YAML is read with ruamel (YAML 1.2), as DVC does: PyYAML reads the `5e-05` that
`dvc exp run -S train.lr=5e-5` writes as a string.

Run      python -m specmill.params_file      (make docs: writes docs/params.md)
"""

import argparse
import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from specmill import paths
from specmill.files import write_atomically
from specmill.params import Params
from specmill.section import Section

REFERENCE = Path("docs/params.md")


def read_yaml(path: Path) -> Any:
    """Read YAML 1.2, as DVC does; raises ValueError naming a file that is none or is not there."""
    try:
        return YAML(typ="safe").load(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); params.yaml is in the repository, complete "
            "ones for other runs are in profiles/"
        ) from None
    # a date that does not exist and an !!int that is none are no syntax errors
    except (YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None


def load_params(path: Path) -> Params:
    """Read and check `path`.

    Raises:
        ValueError: when it cannot be read or is not YAML; naming every key that is unknown, missing
            or wrong.
    """
    raw = read_yaml(path)
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        lines = "\n".join(_explained(item) for item in error.errors())
        raise ValueError(
            f"{path} is not valid (every key is described in docs/params.md):\n{lines}"
        ) from None


def _explained(error: Any) -> str:
    """One line on one wrong key; an unknown one gets the nearest known."""
    location = [str(part) for part in error["loc"]]
    line = f"  {'.'.join(location) or 'params'}: {error['msg'].removeprefix('Value error, ')}"
    if error["type"] == "extra_forbidden":
        known = _keys_beside(location)
        near = get_close_matches(location[-1], known, n=1, cutoff=0.5)
        return f"  {'.'.join(location)}: there is no such key" + (
            f"; did you mean {'.'.join([*location[:-1], near[0]])}?" if near
            else f"; there are {', '.join(known)}"
        )  # fmt: skip
    if error["type"] == "missing":
        return f"  {'.'.join(location)}: is missing"
    if error["type"] == "value_error" and isinstance(error["input"], dict | BaseModel):
        return line
    return f"{line} (got {error['input']!r})"


def _keys_beside(location: list[str]) -> list[str]:
    """Names of the fields where an unknown key was found."""
    section: Any = Params
    for depth, part in enumerate(location[:-1]):
        # the name of a row or head is no field, nor an index
        named = len(location[:depth]) == 1 and _is_mapping(location[0])
        if part in _fields(section) and not named:
            section = _sections_in(_fields(section)[part].annotation)[0]
    return list(_fields(section))


def _fields(section: type[Section]) -> dict[str, FieldInfo]:
    """Fields by the key that params.yaml has for them."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _is_mapping(name: str) -> bool:
    """Whether a section of params.yaml holds named entries of one kind."""
    return get_origin(Params.model_fields[name].annotation) is dict


def _sections_in(annotation: Any) -> list[type[Section]]:
    """Section classes inside a type such as `list[Dataset]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for inner in get_args(annotation) for found in _sections_in(inner)]


def reference(params: Path) -> str:
    """docs/params.md: every key with its type, its value in `params` and what it means."""
    values = read_yaml(params)
    lines = [
        "# Parameters",
        "",
        "Made from `specmill/params.py` by `make docs`; a test keeps it current. *Value* is that "
        "of `params.yaml`. Change one there, or for one experiment with `dvc exp run -S "
        "section.key=value`. An unknown key or a wrong type is refused before anything runs.",
    ]
    for name, field in Params.model_fields.items():
        (section,) = _sections_in(field.annotation)
        about = " ".join((section.__doc__ or "").split())
        if _is_mapping(name):
            lines += ["", f"## {name}.NAME", "", about, "", *_table(section, {})]
        else:
            lines += ["", f"## {name}", "", about, "", *_table(section, values[name])]
        nested: dict[type[Section], list[str]] = {}
        for key, inner in _fields(section).items():
            for kind in _sections_in(inner.annotation):
                nested.setdefault(kind, []).append(key)
        for kind, keys in nested.items():
            heading = " and ".join(f"{name}.{key}" for key in keys)
            about = " ".join((kind.__doc__ or "").split())
            lines += ["", f"### {heading}", "", about, "", *_table(kind, values[name].get(keys[0]))]
    return "\n".join(lines) + "\n"


def _table(section: type[Section], values: Any) -> list[str]:
    """Rows of one section; keys that are sections themselves follow in a table of their own."""
    lines = ["| key | type | value | |", "| --- | --- | --- | --- |"]
    schema = section.model_json_schema()
    for name, field in _fields(section).items():
        value = ""
        if isinstance(values, dict) and name in values:
            value = f"`{_as_yaml(values[name])}`"
        elif not field.is_required():
            value = f"`{_as_yaml(field.get_default(call_default_factory=True))}` if left out"
        about = " ".join((field.description or "").split())
        kind = _type(schema["properties"][name])
        lines.append(f"| `{name}` | {kind} | {value} | {about} |")
    return lines


def _as_yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_yaml, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words: `integer >= 1`, `number > 0`, `list of integer >= 1`."""
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{option}`" for option in schema.get("enum", [schema.get("const")]))
    kind = str(schema["type"])
    if kind == "array":
        items = _type(schema["items"])
        return "text or list, see below" if items == "section" else f"list of {items}"
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]}" for name, sign in limits.items() if name in schema]
    plain = {"object": "mapping", "string": "text"}.get(kind, kind)
    return f"{plain} {', '.join(bounds)}".strip()


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m specmill.params_file",
        description=f"Write {REFERENCE} from specmill/params.py and params.yaml.",
    ).parse_args()
    write_atomically(REFERENCE, reference(paths.PARAMS).encode())
    sys.stderr.write(f"{REFERENCE} written\n")
