"""The activation between the two GEMMs of an MoE layer, and its gradient: rows in, rows out, whatever their number.

Which activation, with a gate or without, and how gate and up lie are chosen at run time by ``flags`` (see
kernels/rowops/__init__.py): a row kernel is bound by memory and does not feel a branch that all of it takes. (It does
feel arithmetic: see ``_product``.) Arithmetic is in fp32 and each result is rounded once.

``limit``, ``alpha``, ``beta`` and ``linear_beta`` are the bits of float32 numbers (``Activation.words``).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Flags; kernels/rowops/__init__.py and kernels/activations.py have equal values.
_KIND: tl.constexpr = tl.constexpr(7)
_SILU: tl.constexpr = tl.constexpr(0)
_GELU: tl.constexpr = tl.constexpr(1)
_GELU_TANH: tl.constexpr = tl.constexpr(2)
_SWIGLU: tl.constexpr = tl.constexpr(3)
_RELU2: tl.constexpr = tl.constexpr(4)
_SITU: tl.constexpr = tl.constexpr(5)
_SWIGLUSTEP: tl.constexpr = tl.constexpr(6)
_GATED: tl.constexpr = tl.constexpr(8)
_INTERLEAVED: tl.constexpr = tl.constexpr(16)
_USED: tl.constexpr = tl.constexpr(32)
_WEIGHTED: tl.constexpr = tl.constexpr(64)
_WRITES_DH: tl.constexpr = tl.constexpr(128)
_WRITES_A: tl.constexpr = tl.constexpr(256)
_WRITES_DWEIGHTS: tl.constexpr = tl.constexpr(512)
_NARROW: tl.constexpr = tl.constexpr(4096)
_NARROW_DWEIGHTS: tl.constexpr = tl.constexpr(8192)

_FAR: tl.constexpr = tl.constexpr(150.0)  # from here on a sigmoid is 0 or 1 in fp32, and squares are still finite


@triton.jit
def _number(bits):
    """The float32 number with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tanh(x):
    """tanh(x) within 4e-7 of itself: x P(x^2) / Q(x^2) of the least relative error in [-8, 8]; beyond, its value at 8.

    It takes the special-function unit one division; with an exponential more, the kernel would wait for that unit.
    """
    x = tl.clamp(x, -8.0, 8.0, propagate_nan=tl.PropagateNan.ALL)
    s = x * x
    p = ((1.52302863e-08 * s + 2.18945703e-05) * s + 0.00357159255) * s + 0.134444934
    q = ((8.52239387e-07 * s + 0.0003411283) * s + 0.0261644222) * s + 0.467778207
    return x * (p * s + 0.999999994) / (q * s + 1.0)


@triton.jit
def _act(g, flags, limit, alpha, beta):
    """act(g) and act'(g) of a gate.

    Except for relu2 and situ, act(g) = g * s(g): s is a sigmoid of a polynomial, or for gelu (1 + erf) / 2.
    """
    kind = flags & _KIND
    near = tl.clamp(g, -_FAR, _FAR, propagate_nan=tl.PropagateNan.ALL)
    square = near * near
    if kind == _SITU:
        bound = _number(beta)
        s = tl.sigmoid(near)
        t = _tanh(g * (1.0 / bound))
        act = bound * t * s
        slope = s * ((1.0 - t * t) + bound * t * (1.0 - s))
    else:
        if kind == _GELU:
            s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
            slope = 0.3989422804014327 * tl.exp(-0.5 * square)
        else:
            linear = tl.where(kind == _GELU_TANH, 1.5957691216057308, tl.where(kind == _SWIGLU, _number(alpha), 1.0))
            cubic = tl.where(kind == _GELU_TANH, 0.07135481627155, 0.0)
            s = tl.sigmoid(near * (linear + cubic * square))
            slope = s * (1.0 - s) * (linear + 3.0 * cubic * square)
        positive = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        is_relu2 = kind == _RELU2
        act = tl.where(is_relu2, positive * positive, g * s)
        slope = tl.where(is_relu2, 2.0 * positive, s + near * slope)
        if kind == _SWIGLUSTEP:
            most = _number(limit)
            slope = tl.where(act > most, 0.0, slope)
            act = tl.minimum(act, most, propagate_nan=tl.PropagateNan.ALL)
    return act, slope


@triton.jit
def _product(gate, up, flags, limit, alpha, beta, linear_beta):
    """act(gate) * v(up), with a branch for each activation that has only its own operations.

    By ``_act`` the forward kernel takes 1.1 x as long.
    """
    kind = flags & _KIND
    if kind == _SILU:
        act = gate * tl.sigmoid(gate)
    elif kind == _GELU:
        act = gate * (0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)))
    elif kind == _GELU_TANH:
        act = gate * tl.sigmoid(gate * (1.5957691216057308 + 0.07135481627155 * gate * gate))
    elif kind == _SWIGLU:
        most = _number(limit)
        gate = tl.minimum(gate, most, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -most, most, propagate_nan=tl.PropagateNan.ALL) + _number(beta)
        act = gate * tl.sigmoid(_number(alpha) * gate)
    elif kind == _SITU:
        bound = _number(beta)
        act = bound * _tanh(gate * (1.0 / bound)) * tl.sigmoid(gate)
        bound = _number(linear_beta)
        if bound > 0.0:
            up = bound * _tanh(up * (1.0 / bound))
    elif kind == _SWIGLUSTEP:
        most = _number(limit)
        act = tl.minimum(gate * tl.sigmoid(gate), most, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -most, most, propagate_nan=tl.PropagateNan.ALL)
    else:
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        act = positive * positive
    return act * up


@triton.jit
def _gate_and_up(h, at, inside, columns, first, flags, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up of rows' columns [first, first + BLOCK), in fp32; without a gate h itself and ones.

    ``at`` is the offset of each row in h, ``inside`` a mask of rows.
    """
    if INTERLEAVED:
        both = 2 * first + tl.arange(0, 2 * BLOCK)
        wide = inside[:, None] & (both < 2 * columns)[None, :]
        pair = tl.load(h + at[:, None] + both[None, :], mask=wide, other=0.0)
        gate, up = tl.split(tl.reshape(pair, (pair.shape[0], BLOCK, 2)))
    else:
        col = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < columns)[None, :]
        place = h + at[:, None] + col[None, :]
        gate = tl.load(place, mask=mask, other=0.0)
        up = tl.load(place + columns, mask=mask & ((flags & _GATED) != 0), other=1.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _limited(gate, up, flags, limit, beta, linear_beta):
    """(min(gate, most), v(up), most, most_up): the limits of the gate and of up, infinite where there is none."""
    kind = flags & _KIND
    most = tl.where(kind == _SWIGLU, _number(limit), float("inf"))
    most_up = tl.where(kind == _SWIGLUSTEP, _number(limit), most)
    gate = tl.minimum(gate, most, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -most_up, most_up, propagate_nan=tl.PropagateNan.ALL)
    up += tl.where(kind == _SWIGLU, _number(beta), 0.0)
    if kind == _SITU:
        bound = _number(linear_beta)
        if bound > 0.0:
            up = bound * _tanh(up * (1.0 / bound))
    return gate, up, most, most_up


@triton.jit
def _row_of(flags, columns):
    """The columns of one row of h."""
    return tl.where((flags & _GATED) != 0, 2, 1) * columns


@triton.jit
def _end_of(used, M, flags):
    """The rows that belong to an expert."""
    end = M
    if (flags & _USED) != 0:
        end = tl.minimum(tl.load(used), M)
    return end


@triton.jit
def activation(h, a, used, M, columns, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """a[i] = act(gate of h[i]) * up of h[i]; without a gate act(h[i]).

    h [M, 2*columns] (or [M, columns]), a [M, columns], rows dense; ``used`` int32 [1]: rows from there on are neither
    read nor written. A program does BLOCK columns of ROWS rows at a time, until there are no more.
    """
    blocks = tl.cdiv(columns, BLOCK)
    end = _end_of(used, M, flags)
    tile = tl.program_id(0)
    tiles = tl.cdiv(end, ROWS) * blocks
    while tile < tiles:
        row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        first = tile % blocks * BLOCK
        inside = row < end
        of_h = row * _row_of(flags, columns)
        if (flags & _INTERLEAVED) != 0:
            gate, up = _gate_and_up(h, of_h, inside, columns, first, flags, BLOCK, True)
        else:
            gate, up = _gate_and_up(h, of_h, inside, columns, first, flags, BLOCK, False)
        col = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < columns)[None, :]
        result = _product(gate, up, flags, limit, alpha, beta, linear_beta).to(a.dtype.element_ty)
        tl.store(a + (row * columns)[:, None] + col[None, :], result, mask=mask)
        tile += tl.num_programs(0)


@triton.jit
def _backward(
    h,
    da,
    row_weights,
    flat,
    dh,
    a,
    row,
    inside,
    columns,
    flags,
    limit,
    alpha,
    beta,
    linear_beta,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """One row's dh and a, and its routing weight's gradient: dot(da, act(h)).

    The weight is loaded after the row, because its index is loaded first and the row must not wait for both.
    """
    sums = tl.zeros((row.shape[0], BLOCK), tl.float32)
    narrow = row_weights.to(tl.pointer_type(h.dtype.element_ty), bitcast=True)
    weighted = inside & ((flags & _WEIGHTED) != 0)
    is_narrow = (flags & _NARROW) != 0
    of_h = row * _row_of(flags, columns)
    of_a = row * columns
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (col < columns)[None, :]
        place = of_a[:, None] + col[None, :]
        gate, up = _gate_and_up(h, of_h, inside, columns, first, flags, BLOCK, INTERLEAVED)
        d = tl.load(da + place, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(row_weights + flat, mask=weighted & (not is_narrow), other=1.0)[:, None]
        scale *= tl.load(narrow + flat, mask=weighted & is_narrow, other=1.0).to(tl.float32)[:, None]
        kept_gate, kept_up, most, most_up = _limited(gate, up, flags, limit, beta, linear_beta)
        act, slope = _act(kept_gate, flags, limit, alpha, beta)
        whole = act * kept_up
        sums += tl.where(mask, d * whole, 0.0)
        tl.store(a + place, (scale * whole).to(a.dtype.element_ty), mask=mask & ((flags & _WRITES_A) != 0))
        d *= scale
        dgate = tl.where(gate > most, 0.0, d * kept_up * slope).to(dh.dtype.element_ty)
        dup = tl.where(tl.abs(up) > most_up, 0.0, d * act)
        if (flags & _KIND) == _SITU:
            bound = _number(linear_beta)
            if bound > 0.0:
                t = kept_up * (1.0 / bound)
                dup *= 1.0 - t * t
        dup = dup.to(dh.dtype.element_ty)
        writes = (flags & _WRITES_DH) != 0
        if INTERLEAVED:
            both = 2 * first + tl.arange(0, 2 * BLOCK)
            pair = tl.reshape(tl.join(dgate, dup), (row.shape[0], 2 * BLOCK))
            wide = inside[:, None] & (both < 2 * columns)[None, :]
            tl.store(dh + of_h[:, None] + both[None, :], pair, mask=wide & writes)
        else:
            at = dh + of_h[:, None] + col[None, :]
            tl.store(at, dgate, mask=mask & writes)
            tl.store(at + columns, dup, mask=mask & writes & ((flags & _GATED) != 0))
    return tl.sum(sums, 1)


@triton.jit
def activation_grad(
    h,
    da,
    row_weights,
    index,
    used,
    dh,
    a,
    dweights,
    M,
    columns,
    index_step,
    flags,
    limit,
    alpha,
    beta,
    linear_beta,
    BLOCK: tl.constexpr,
):
    """dh[i] = act'(h[i]) * t(i) * da[i], a[i] = t(i) * act(h[i]), dweights[index[i]] = dot(da[i], act(h[i])).

    h and dh [M, 2*columns] (or [M, columns]), da and a [M, columns], rows dense. With WEIGHTED t(i) =
    row_weights[index[i]], float32, else 1; ``index`` points at int32 words, a step of 2 means int64. NARROW and
    NARROW_DWEIGHTS say that row_weights and dweights are of h's dtype. Only what ``flags`` ask for is written. Of rows
    from ``used`` on nothing is read or written, but dweights, a zero. A program does a row at a time, until there are
    no more, and adds its columns up in a fixed order.
    """
    end = _end_of(used, M, flags)
    is_narrow = (flags & _NARROW_DWEIGHTS) != 0
    narrow = dweights.to(tl.pointer_type(h.dtype.element_ty), bitcast=True)
    number = tl.program_id(0)
    while number < end:
        row = number.to(tl.int64) + tl.arange(0, 1)
        flat = row
        if (flags & (_WEIGHTED | _WRITES_DWEIGHTS)) != 0:
            flat = tl.load(index + row * index_step).to(tl.int64)
        dot = tl.zeros((1,), tl.float32)
        if (flags & _INTERLEAVED) != 0:  # two loops: with both orders in one loop it takes 1.1 x as long
            dot = _backward(
                h,
                da,
                row_weights,
                flat,
                dh,
                a,
                row,
                row < end,
                columns,
                flags,
                limit,
                alpha,
                beta,
                linear_beta,
                BLOCK,
                True,
            )
        else:
            dot = _backward(
                h,
                da,
                row_weights,
                flat,
                dh,
                a,
                row,
                row < end,
                columns,
                flags,
                limit,
                alpha,
                beta,
                linear_beta,
                BLOCK,
                False,
            )
        writes = (row < end) & ((flags & _WRITES_DWEIGHTS) != 0)
        tl.store(dweights + flat, dot, mask=writes & (not is_narrow))
        tl.store(narrow + flat, dot.to(h.dtype.element_ty), mask=writes & is_narrow)
        number += tl.num_programs(0)
    if (flags & _WRITES_DWEIGHTS) != 0:
        for more in tl.range(end + tl.program_id(0) * BLOCK, M, tl.num_programs(0) * BLOCK):
            row = tl.arange(0, BLOCK).to(tl.int64) + more
            flat = tl.load(index + row * index_step, mask=row < M, other=0).to(tl.int64)
            tl.store(dweights + flat, tl.zeros((BLOCK,), tl.float32), mask=(row < M) & (not is_narrow))
            tl.store(narrow + flat, tl.zeros((BLOCK,), h.dtype.element_ty), mask=(row < M) & is_narrow)
