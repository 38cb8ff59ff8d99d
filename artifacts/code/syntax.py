"""Digests of the syntax trees of Python sources, equal on every Python that parses them.

Uses ``ast`` and ``hashlib`` alone, so that any Python from 3.10 on can run this file by itself.
"""

from __future__ import annotations

import ast
import hashlib


def syntax_sha256(source: bytes | str) -> bytes:
    """Digest a module, less its comments, docstrings, layout and module-level imports."""
    return hashlib.sha256(canonical(source).encode("ascii")).digest()


def function_sha256(source: str) -> bytes:
    """Digest a function's arguments and statements: less its name, decorators, annotations, comments and docstring.

    Raises
    ------
    ValueError, SyntaxError
        for a source that is not one function.
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

    A node is written as its class and its fields, ordered by name, a constant as its type and value. Fields that are
    None or empty are left out: newer Pythons have more of them. Text in an f-string, which Pythons split differently,
    is written as one constant.
    """
    body = _undocumented(ast.parse(source))
    return "\n".join(_text(one) for one in body if not isinstance(one, (ast.Import, ast.ImportFrom)))


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
    present = [f"{name}={_text(one)}" for name, one in fields.items() if one is not None and one != []]
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
