"""Runs cases of the passes over rows (JSON on standard input) under Triton's interpreter, against torch in float64."""

from __future__ import annotations

import json
import sys
from typing import Any

import quick_interpreter  # noqa: F401
import torch

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import reference, rowops
from pretuned.kernels.activations import Activation
from pretuned.kernels.rowops import activation, gather_combine, place, sort, zero_rows
from pretuned.runtime.ops.activation import RowActivation, by_torch

SPECIAL = (0.0, 0.01, 0.75, 0.7501, 1.2, 1.4999, 1.5, 1.5001, 2.0, 2.0001, 7.0, 7.1, 30.0, 60.0, 1e4, 1e20)
FAR = 2**31 - 1  # an index that no row has
GUARD = 3.0  # what a result holds where the kernel must not write
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def run(case: dict[str, Any]) -> list[str]:
    """Return the faults, in words."""
    own = {
        "special": run_special,
        "combine": run_combine,
        "gather": run_gather,
        "place_rows": run_place,
        "sort_slots": run_sort,
        "clear": run_clear,
    }
    return own.get(case["pass"], run_activation)(case)


def launch(op: RowOp, case: dict[str, Any], values: dict[str, Any]) -> None:
    kernel = getattr(gather_combine, op.value, None) or getattr(activation, op.value)
    rows = rowops.rows_at_once(op)
    count = rowops.programs(op, case["M"], case["columns"], case["block"], rows)
    grid = values.pop("grid", min(count, case["programs"] or count))
    values = {"M": case["M"], "columns": case["columns"]} | values
    constants = rowops.constants(rowops.RowOpSpec(op, DType.BF16)) | {"BLOCK": case["block"]}
    kernel[(grid,)](*(values[name] for name, _ in rowops.arguments(op)), **constants)


def run_activation(case: dict[str, Any]) -> list[str]:
    M, columns, used = case["M"], case["columns"], case["used"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    function = Activation(case["activation"], **case["numbers"])
    act = RowActivation(function, case["gated"], case["interleaved"])
    g = torch.Generator().manual_seed(case["seed"])
    h = (4 * torch.randn(M, columns * (2 if act.gated else 1), generator=g)).to(dtype)
    da = torch.randn(M, columns, generator=g).to(dtype)
    weights = torch.rand(M, generator=g).to(dtype if case["narrow"] else torch.float32)
    index = torch.randperm(M, generator=g).to(torch.int64 if case["wide"] else torch.int32)
    end = M if used is None else min(used, M)
    h[end:], da[end:] = float("nan"), float("nan")  # rows of no expert hold anything
    flags = act.flags | (rowops.USED if used is not None else 0)
    fresh = {"a": torch.full((M + 1, columns), GUARD, dtype=dtype)}
    words = function.words
    arguments: dict[str, Any] = {"h": h, "used": torch.tensor([used or 0], dtype=torch.int32)}
    wide = h[:end].double().requires_grad_()
    want = by_torch(wide, act)
    scale = torch.ones(end, 1, dtype=torch.float64)
    if case["pass"] == "activation":
        launch(RowOp.ACTIVATION, case, arguments | fresh | words | {"flags": flags})
        return compared("a", fresh["a"], want.detach(), end, dtype)
    if case["weighted"]:
        scale = weights.double()[index.long()][:end, None]
    writes = case["writes"]
    for name, flag in (("dh", rowops.WRITES_DH), ("a", rowops.WRITES_A), ("dweights", rowops.WRITES_DWEIGHTS)):
        flags |= flag if name in writes else 0
    flags |= rowops.WEIGHTED if case["weighted"] else 0
    flags |= rowops.NARROW | rowops.NARROW_DWEIGHTS if case["narrow"] else 0
    kind = dtype if case["narrow"] else torch.float32
    fresh |= {
        "dh": torch.full((M + 1, h.shape[1]), GUARD, dtype=dtype),
        "dweights": torch.full((M + 1,), GUARD, dtype=kind),
    }
    arguments |= {
        "da": da,
        "row_weights": weights,
        "index": index.view(torch.int32),
        "index_step": 2 if case["wide"] else 1,
    }
    launch(RowOp.ACTIVATION_GRAD, case, arguments | fresh | words | {"flags": flags})
    (dh,) = torch.autograd.grad(want, wide, da[:end].double() * scale)
    dots = torch.zeros(M, dtype=torch.float64)
    dots[index[:end].long()] = (da[:end].double() * want.detach()).sum(1)
    wrong = compared("dh", fresh["dh"], dh, end if "dh" in writes else 0, dtype)
    wrong += compared("a", fresh["a"], want.detach() * scale, end if "a" in writes else 0, dtype)
    return wrong + compared("dweights", fresh["dweights"], dots, M if "dweights" in writes else 0, kind)


def run_special(case: dict[str, Any]) -> list[str]:
    """Each pair of numbers around the limits, tiny and huge ones, infinities and NaN: the value and the gradient."""
    act = RowActivation(Activation(case["activation"], **case["numbers"]), case["gated"], case["interleaved"])
    special = torch.tensor(SPECIAL + tuple(-x for x in SPECIAL) + (1e-30, torch.inf, -torch.inf, torch.nan))
    pairs = (
        torch.stack(torch.meshgrid(special, special, indexing="ij"), -1).view(-1, 2) if act.gated else special[:, None]
    )
    h = (pairs if act.interleaved else pairs.T).reshape(1, -1)
    I = len(pairs)  # noqa: E741
    a, dh, leaf = torch.empty(1, I), torch.empty_like(h), h.double().requires_grad_()
    words = act.function.words
    none, how = torch.zeros(1, dtype=torch.int32), case | {"M": 1, "columns": I}
    values: dict[str, Any] = words | {"h": h, "a": a, "used": none, "flags": act.flags}
    launch(RowOp.ACTIVATION, how, dict(values))
    want = by_torch(h, act)
    size = (1 + pairs.abs()).nan_to_num(1.0, 1.0).prod(1)  # of what is added up
    wrong = [f"{pairs[i].tolist()}: {float(a[0, i])}, not {float(want[0, i])}" for i in differing(a, want, size)]
    more = {
        "da": torch.ones(1, I),
        "row_weights": special,
        "index": none,
        "dh": dh,
        "dweights": special,
        "index_step": 1,
    }
    launch(RowOp.ACTIVATION_GRAD, how, values | more | {"flags": act.flags | rowops.WRITES_DH})
    slope = torch.autograd.grad(by_torch(leaf, act).sum(), leaf)[0].float()  # (in float32 1e20 cubed is inf)
    usual = pairs.isfinite().all(1)
    got, slope = ((x.view(I, -1).T if act.interleaved else x.view(-1, I))[:, usual] for x in (dh, slope))
    return wrong + [f"slope at {pairs[usual][i].tolist()}" for i in differing(got, slope, size[usual])]


def differing(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> list[int]:
    """The columns that differ by more than float32's rounding of numbers of this size.

    Neither may be finite where the other is not; torch's gelu of inf is inf or NaN, by where it is in memory.
    """
    same = ((got - want).abs() <= 1e-6 * size + 1e-5 * want.abs()) | ~(got.isfinite() | want.isfinite())
    return [int(i) for i in (~same).any(0).nonzero()]


def run_gather(case: dict[str, Any]) -> list[str]:
    """A row a program, or ``by_token``: of a permutation, or with as many ``repeated`` entries of the index."""
    T, M, columns, top_k, used = case["M"], case["M"] * case["top_k"], case["columns"], case["top_k"], case["used"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    g = torch.Generator().manual_seed(case["seed"])
    x, out = torch.randn(T, columns, generator=g).to(dtype), torch.full((M + 1, columns), GUARD, dtype=dtype)
    index = torch.randperm(M, generator=g).to(torch.int64 if case["wide"] else torch.int32)
    index[: case["repeated"]] = index[-1]
    end = M if used is None else min(used, M)
    picked = index.clone()
    index[end:] = FAR  # rows of no expert are not to be read
    arguments = {
        "x": x,
        "index": index.view(torch.int32),
        "used": torch.tensor([used or 0], dtype=torch.int32),
        "out": out,
    }
    arguments |= {"index_step": 2 if case["wide"] else 1, "flags": 0 if used is None else rowops.USED, "top_k": top_k}
    case = case | {"M": M}
    if case["by_token"]:
        noted = torch.randint(-3, M + 3, (2 + M,), generator=g, dtype=torch.int32)  # what stands in fresh memory
        noted[-1] = int(GUARD)
        looks = -(-M // rowops.NOTED_ROWS)
        notes = {"out": noted, "top_k": M, "flags": arguments["flags"] | rowops.NOTES, "grid": looks}
        launch(RowOp.GATHER, case, arguments | notes)
        arguments |= {"used": noted, "flags": rowops.BY_TOKEN, "grid": T + looks}
        if noted[0] != end or noted[-1] != GUARD:
            return [f"notes: {noted[0]} rows, wanted {end}, and past the end {noted[-1]}"]
    launch(RowOp.GATHER, case, arguments)
    return compared("out", out, x[picked.long() // top_k].double(), end, dtype)


def run_sort(case: dict[str, Any]) -> list[str]:
    M, E, block = case["M"], case["E"], case["block"]
    g = torch.Generator().manual_seed(case["seed"])
    ids = torch.randint(-1, E + 1, (M,), generator=g) if case["others"] else torch.randint(0, E, (M,), generator=g)
    if case["one_expert"]:
        ids[:] = E - 1
    if case["others"] and case["wide"]:
        ids[::5] += 2**32  # its low word alone is an expert's
    chunks = -(-M // block)
    guards = {
        "experts": chunks * block,
        "order": M,
        "places": M,
        "bounds": E + 1,
        "m_sizes": E,
        "counts": chunks * (E + 1),
    }
    arguments: dict[str, Any] = {
        name: torch.full((size + 1,), int(GUARD), dtype=torch.int64 if name == "order" else torch.int32)
        for name, size in guards.items()
    }
    arguments["ids"] = (ids if case["wide"] else ids.int()).view(torch.int32)
    arguments |= {"E": E, "ids_step": 2 if case["wide"] else 1}
    steps = [(rowops.COUNTS, chunks), (rowops.ADDS, -(-(E + 1) // rowops.SORTED_EXPERTS)), (rowops.PLACES, chunks)]
    for flags, grid in [(rowops.COUNTS | rowops.PLACES, 1)] if chunks == 1 else steps:
        values = arguments | {"M": M, "flags": flags}
        sort.sort_slots[(grid,)](*(values[name] for name, _ in rowops.arguments(RowOp.SORT_SLOTS)), BLOCK=block)
    experts = torch.where((ids >= 0) & (ids < E), ids, E)
    m_sizes = torch.bincount(experts, minlength=E + 1)[:E]
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), m_sizes.cumsum(0)])
    order = experts.sort(stable=True).indices
    places = torch.where(experts < E, order.argsort(), -1)
    want = {"experts": experts, "order": order, "places": places, "bounds": bounds, "m_sizes": m_sizes}
    wrong = [
        name for name, expected in want.items() if not torch.equal(arguments[name][: len(expected)].long(), expected)
    ]
    return wrong + [f"{name}: past its end" for name in guards if arguments[name][-1] != GUARD]


def run_place(case: dict[str, Any]) -> list[str]:
    M, E, room, block, wide, apart = (case[name] for name in ("M", "E", "room", "block", "wide", "starts"))
    g = torch.Generator().manual_seed(case["seed"])
    m_sizes = torch.randint(-2, case["most"] + 1, (E,), generator=g)
    starts = torch.randint(-3, M + 3, (E,), generator=g) if apart else torch.arange(E) * room
    if wide:
        m_sizes[::4] += 2**33  # its low word alone is a count
        m_sizes[1::5] -= 2**40
    if wide and apart:
        starts[::3] += 2**32
    kind = torch.int64 if wide else torch.int32
    outputs = {name: torch.full((n + 1,), int(GUARD), dtype=torch.int32) for name, n in _placed(M, E)}
    arguments: dict[str, Any] = {
        "m_sizes": m_sizes.to(kind).view(torch.int32),
        "starts": starts.to(kind).view(torch.int32),
        "M": M,
        "E": E,
        "room": room,
        "m_sizes_step": 1 + wide,
        "starts_step": 1 + wide if apart else 0,
    }
    place.place_rows[(E,)](
        *((arguments | outputs)[name] for name, _ in rowops.arguments(RowOp.PLACE_ROWS)), BLOCK=block
    )
    index: list[int] = []
    want: dict[str, list[int]] = {"counts": [], "bounds": [0]}
    for start, count in zip(starts.tolist(), m_sizes.tolist(), strict=True):
        most = min(M - start, room) if 0 <= start < M else 0
        own = min(max(count, 0), most, M - len(index))
        index += range(start, start + own)
        want["counts"].append(own)
        want["bounds"].append(len(index))
    want["index"] = index + [0] * (M - len(index))
    wrong = [
        f"{name}: {outputs[name].tolist()}, not {expected}"
        for name, expected in want.items()
        if outputs[name].tolist()[:-1] != expected
    ]
    return wrong + [f"{name}: past its end" for name in outputs if outputs[name][-1] != GUARD]


def _placed(M: int, E: int) -> list[tuple[str, int]]:
    return [("index", M), ("counts", E), ("bounds", E + 1)]


def run_clear(case: dict[str, Any]) -> list[str]:
    M, E, block, columns, rows, index_end = (case[name] for name in ("M", "E", "block", "columns", "rows", "index_end"))
    g = torch.Generator().manual_seed(case["seed"])
    m_sizes = torch.randint(-1, max(1, case["most"]) + 1, (E,), generator=g)
    index = torch.randint(-2, rows + 3, (M,), generator=g)
    if case["named"]:
        index[torch.randperm(M, generator=g)[:rows]] = torch.arange(min(rows, M))
    wide = case["wide"]
    if wide:
        index[::7] += 2**32  # its low word alone is a row's
        index[3::7] = -(2**63)
    y, named = torch.full((rows + 1, columns), GUARD), torch.zeros(rows + 1, dtype=torch.int8)
    named[rows] = 7
    arguments: dict[str, Any] = {
        "y": y,
        "named": named,
        "index": (index if wide else index.int()).view(torch.int32),
        "m_sizes": (m_sizes.int() if wide else m_sizes).view(torch.int32),
        "M": M,
        "rows": rows,
        "columns": columns,
        "E": E,
        "index_end": index_end,
        "m_sizes_step": 1 if wide else 2,
        "index_step": 2 if wide else 1,
    }
    for flags, grid in ((rowops.NAMES, -(-M // block)), (0, -(-rows // rowops.CLEARED_ROWS))):
        values = arguments | {"flags": flags}
        zero_rows.clear[(grid,)](*(values[name] for name, _ in rowops.arguments(RowOp.CLEAR)), BLOCK=block)
    part = reference.taking_part(m_sizes, index, index_end, M)
    want = torch.zeros(rows + 1, dtype=torch.bool)
    want[index[part]] = True
    want[rows] = True  # the guard
    wrong = [] if torch.equal((y == GUARD).all(1), want) else ["which rows are left as they were"]
    wrong += [] if torch.equal((y == 0).all(1), ~want) else ["which rows are zero"]
    return wrong + ([] if named[rows] == 7 else ["named: past its end"])


def run_combine(case: dict[str, Any]) -> list[str]:
    T, columns, top_k, E = case["M"], case["columns"], case["top_k"], 5
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    g = torch.Generator().manual_seed(case["seed"])
    M = T * top_k
    y, bias = torch.randn(M, columns, generator=g).to(dtype), torch.randn(E, columns, generator=g).to(dtype)
    experts = torch.randint(-2, E + 2, (M,), generator=g, dtype=torch.int32)
    places, weights = torch.randperm(M, generator=g, dtype=torch.int32), torch.rand(M, generator=g)
    here = (experts >= 0) & (experts < E)
    y[places[~here].long()] = float("nan")
    want = y[places.long()].double()
    places[~here] = -1
    weights[~here] = float("nan")
    weights = weights.to(dtype) if case["narrow"] else weights
    flags = (rowops.WEIGHTED if case["weighted"] else 0) | (rowops.NARROW if case["narrow"] else 0)
    flags |= rowops.BIASED | rowops.WEIGHTED if case["biased"] else 0
    arguments = {"y": y, "experts": experts, "places": places, "row_weights": weights, "bias": bias, "top_k": top_k}
    out = torch.full((T + 1, columns), GUARD, dtype=dtype)
    launch(RowOp.COMBINE, case, arguments | {"out": out, "flags": flags})
    if case["biased"]:
        want += bias[experts.clamp(0, E - 1).long()].double()
    if case["weighted"] or case["biased"]:
        want *= weights[:, None].double()
    return compared("out", out, torch.where(here[:, None], want, 0).view(T, top_k, columns).sum(1), T, dtype)


def compared(name: str, got: torch.Tensor, want: torch.Tensor, rows: int, dtype: torch.dtype) -> list[str]:
    wrong = []
    if not (got[rows:] == GUARD).all():
        wrong.append(f"{name}: rows from {rows} on were written")
    error = (got[:rows].double() - want[:rows]).norm() / want[:rows].norm().clamp(min=1e-30)
    if rows and not error < TOLERANCE[dtype]:
        wrong.append(f"{name}: off by {float(error):.2e}")
    return wrong


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
