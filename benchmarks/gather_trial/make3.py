from make2 import *
def g3(fence=True, opaque=True, step=False):
    e=[x for x in g1 if x[0]!=S or 'flat, inside' not in x[1]]
    e=[x for x in e if 'stage, phase = advance' not in x[1]]
    e+=[(S,"""            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            x_at = x + (gl.where(inside, source, 0).to(gl.int64)[:, None] * stride_x_m + k[None, :])
""","""            upper = gl.convert_layout(_source(moved, row, row_end, stride_x_m, LANES), gl.SliceLayout(1, ROWS))
            lower = gl.convert_layout(_source(moved, row + 64, row_end, stride_x_m, LANES), gl.SliceLayout(1, ROWS))
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            upper_at = _opaque(x + (upper[:, None] + k[None, :]))
            lower_at = _opaque(x + (lower[:, None] + k[None, :]))
"""),
 (S,"            stage, phase = advance(stage, phase, STAGES)\n        number =","""            if GATHER:
                a_upper = a.index(stage * 2)
                a_lower = a.index(stage * 2 + 1)
                if start + BLOCK_K <= K:
                    async_copy.async_copy_global_to_shared(a_upper, upper_at)
                    if both:
                        async_copy.async_copy_global_to_shared(a_lower, lower_at)
                else:
                    in_k = (start + k < K)[None, :]
                    async_copy.async_copy_global_to_shared(a_upper, upper_at, mask=in_k)
                    async_copy.async_copy_global_to_shared(a_lower, lower_at, mask=in_k & both)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                upper_at += BLOCK_K
                lower_at += BLOCK_K
            stage, phase = advance(stage, phase, STAGES)
        number ="""),
 (S,"""@gluon.jit
def _load_rows(
""",'''@gluon.jit
def _opaque(pointer):
    """The same pointers, each in registers of its own in a loop."""
    word = pointer.to(gl.int64, bitcast=True)
    word = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [word], dtype=gl.int64, is_pure=True, pack=1)
    return gl.max_contiguous(gl.multiple_of(word.to(pointer.dtype, bitcast=True), [1, 16]), [1, 8])


@gluon.jit
def _source(moved, row, row_end, stride_x_m, LAYOUT: gl.constexpr):
    """Where in x each of 64 rows is; past the end the last row's place."""
    index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
    m = gl.minimum(row + gl.arange(0, 64, layout=LAYOUT), row_end - 1)
    flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
    source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
    return gl.where(inside, source, 0).to(gl.int64) * stride_x_m


@gluon.jit
def _load_rows(
'''),
 ]
    if not opaque:
        e=[(f,a,b.replace("_opaque(x + (upper[:, None] + k[None, :]))","x + (upper[:, None] + k[None, :])").replace("_opaque(x + (lower[:, None] + k[None, :]))","x + (lower[:, None] + k[None, :])"),*r) for f,a,b,*r in e]
    if not fence:
        e+=[(W,"        if GATHER:\n            fence_async_shared()\n","")]
    return e
make('g3',g3()); make('g3nf',g3(False)); make('g3no',g3(True,False))
