"""Digests of Python sources' syntax trees: comments and layout don't count, all Pythons from 3.10 on agree.

Imports ``ast`` and ``hashlib`` alone, so that any of these Pythons can run this file by itself.
"""

from __future__ import annotations

import ast
import hashlib


def syntax_sha256(source: bytes | str) -> bytes:
    """Digest a module without its comments, docstrings, layout and module-level imports."""
    return hashlib.sha256(canonical(source).encode("ascii")).digest()


def function_sha256(source: str) -> bytes:
    """Digest a function's arguments and statements without its name, decorators, annotations and docstring.

    Raises
    ------
    ValueError, SyntaxError
        if ``source`` is not a single function.
    """
    (node,) = ast.parse(source).body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"a {type(node).__name__}, wanted a function")
    node.name, node.returns, node.decorator_list = "", None, []
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return hashlib.sha256(_text(node).encode("ascii")).digest()


def canonical(source: bytes | str) -> str:
    """Return the syntax tree that ``syntax_sha256`` digests, as ASCII text.

    A node is written as its class and its fields, ordered by name; a constant as its type and value. Fields that are
    None or empty are left out, because newer Pythons have more of them. Adjacent texts in an f-string are joined,
    because Pythons split them differently.
    """
    body = _undocumented(ast.parse(source))
    return "\n".join(_text(node) for node in body if not isinstance(node, (ast.Import, ast.ImportFrom)))


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, ast.Constant):
        return f"<{type(value.value).__name__} {value.value!a}>"  # repr depends on the Python's Unicode, ascii does not
    if not isinstance(value, ast.AST):
        return ascii(value)
    fields = {name: getattr(value, name, None) for name in sorted(value._fields)}
    if isinstance(value, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        fields["body"] = _undocumented(value)
    elif isinstance(value, ast.JoinedStr):
        fields["values"] = _merged(value.values)
    present = [f"{name}={_text(field)}" for name, field in fields.items() if field is not None and field != []]
    return f"{type(value).__name__}({', '.join(present)})"


def _undocumented(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return the statements of a node without its docstring."""
    return node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]


def _merged(parts: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with adjacent texts joined and empty ones left out."""
    merged: list[ast.expr] = []
    for part in parts:
        text = part.value if isinstance(part, ast.Constant) else None
        before = merged[-1].value if merged and isinstance(merged[-1], ast.Constant) else None
        if isinstance(text, str) and isinstance(before, str):
            merged[-1] = ast.Constant(before + text)
        elif text != "":
            merged.append(part)
    return merged
