"""Functions that the loading warp and the multiplying warpgroups share: experts' rows, barriers, the queue of tiles.

Operands pass through a ring of stages: barrier ``full`` says that a stage's bytes are there, ``empty`` that the
warpgroups have read them. The loading warp announces each tile in a queue of two slots, which both warpgroups read, or
(pingpong.py) one each. In dW's pingpong kernel a warp of its own announces the tiles, also to the loading warp.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Names that changed in Triton 3.8 or 3.9. A view is memory seen with another dtype, shape and layout.
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
ANY_VIEW: gl.constexpr = gl.constexpr(triton.__version__.startswith("3.7."))  # 3.7 does not check a view's end

INDEX_END: gl.constexpr = gl.constexpr(0x40000000)
NARROW_BIT: gl.constexpr = gl.constexpr(1 << 30)  # set in a tile's word if only the left half of its columns exists
WHOLE_BIT: gl.constexpr = gl.constexpr(1 << 30)  # in a tile's column: all gathered rows have an index
# Values of ``flags``, like in kernels/portable_plain/rows.py and kernels/portable_plain/tiles.py.
GATHER_FLAG: gl.constexpr = gl.constexpr(1)
SCATTER_FLAG: gl.constexpr = gl.constexpr(2)
WEIGHT_FLAG: gl.constexpr = gl.constexpr(4)
BIAS_FLAG: gl.constexpr = gl.constexpr(8)
ZERO_TAIL_FLAG: gl.constexpr = gl.constexpr(16)
INDEXED_FLAGS: gl.constexpr = gl.constexpr(1 | 2 | 4)
MOVED_FLAGS: gl.constexpr = gl.constexpr(2 | 4 | 8)  # results with these flags can't be stored by TMA


@gluon.jit
def tile_of(ring, i, PARTS: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """[HEIGHT, WIDTH] of a ring, from its part i * PARTS on.

    Triton 3.7 lets a view end anywhere. Later versions only allow views at multiples of a tile's size. For a tile
    wider than PARTS the view then begins at the ring's start, and the PTX has the offset that its products add
    (aot/compile/ptx.py).
    """
    SIZE: gl.constexpr = ring.shape[1] * ring.shape[2]
    STEP: gl.constexpr = PARTS * SIZE // (HEIGHT * WIDTH)
    TILES: gl.constexpr = ring.shape[0] * SIZE // (HEIGHT * WIDTH)
    if ANY_VIEW:
        tile = view(ring.index(i * PARTS), ring.dtype, [HEIGHT, WIDTH], ring.layout)
    elif STEP * HEIGHT * WIDTH == PARTS * SIZE:
        tile = view(ring, ring.dtype, [TILES, HEIGHT, WIDTH], ring.layout).index(i * STEP)
    else:
        _further(i * (PARTS * SIZE * ring.dtype.primitive_bitwidth // 8))
        tile = view(ring, ring.dtype, [TILES, HEIGHT, WIDTH], ring.layout).index(0)
    return tile


@gluon.jit
def _further(offset_bytes):
    """Mark in the PTX the register with the offset, in units of 16 bytes, of the next products' right operands."""
    gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 4; // products of what is so much further: $0",
        "=r,r",
        [offset_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def _add_capped(a, b):
    return gl.minimum(a + b, 0x7FFFFFFF)


@gluon.jit
def counts(m_sizes, m_sizes_step, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The number of rows of each expert in m_sizes, [EXPERTS] uint32, clamped to [0, M]."""
    expert = gl.arange(0, EXPERTS, layout=LAYOUT)
    word = m_sizes + expert * m_sizes_step
    low = gl.load(word, mask=expert < E, other=0).to(gl.int64)
    high = gl.load(word + (m_sizes_step - 1), mask=expert < E, other=0).to(gl.int64)
    wide = (high << 32) | (low & 0xFFFFFFFF)
    count = gl.where(m_sizes_step == 1, low, wide)
    return gl.minimum(gl.maximum(count, 0), M.to(gl.int64)).to(gl.uint32)


@gluon.jit
def expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows, end row) of every expert, [EXPERTS] int32: no row passes M."""
    count = counts(m_sizes, m_sizes_step, M, E, EXPERTS, LAYOUT)
    end = gl.associative_scan(count, 0, _add_capped)
    limit = M.to(gl.uint32)
    start = gl.minimum(end - count, limit)
    end = gl.minimum(end, limit)
    return (end - start).to(gl.int32), end.to(gl.int32)


@gluon.jit
def barriers(STAGES: gl.constexpr, FULL: gl.constexpr, READERS: gl.constexpr, TAKERS: gl.constexpr):
    """(full, empty): barriers of each stage of operands. (queue, filled, free): two slots that announce tiles.

    READERS is the number of warpgroups that read each stage: both, or one if they take tiles in turns. TAKERS is the
    number of readers of each slot: these warpgroups, and in dW's pingpong kernel the loading warp.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=READERS)
    for i in gl.static_range(2):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=TAKERS)
    return full, empty, queue, filled, free


@gluon.jit
def publish(queue, filled, free, slot, phase, a, b, c, d, WARPS: gl.constexpr, e=0, f=0):
    """Put six numbers into a slot of the queue, once its last content is taken."""
    mbarrier.wait(free.index(slot), phase ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    i = gl.arange(0, 8, layout=layout)
    first = gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d)))
    queue.index(slot).store(gl.where(i == 4, e, gl.where(i == 5, f, first)))
    gl.barrier()
    mbarrier.arrive(filled.index(slot), count=1)


@gluon.jit
def take(queue, filled, free, slot, phase):
    """The next four numbers of the queue."""
    a, b, c, d, _e, _f = take_all(queue, filled, free, slot, phase, 4)
    return a, b, c, d


@gluon.jit
def take_all(queue, filled, free, slot, phase, WARPS: gl.constexpr):
    """The next six numbers of the queue."""
    mbarrier.wait(filled.index(slot), phase)
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    i = gl.arange(0, 8, layout=layout)
    values = queue.index(slot).load(layout)
    a = gl.sum(gl.where(i == 0, values, 0), 0)
    b = gl.sum(gl.where(i == 1, values, 0), 0)
    c = gl.sum(gl.where(i == 2, values, 0), 0)
    d = gl.sum(gl.where(i == 3, values, 0), 0)
    e = gl.sum(gl.where(i == 4, values, 0), 0)
    f = gl.sum(gl.where(i == 5, values, 0), 0)
    gl.barrier()
    mbarrier.arrive(free.index(slot), count=1)
    return a, b, c, d, e, f


@gluon.jit
def begin():
    """Return the first (stage, phase) of the ring and the first (slot, phase) of the queue."""
    zero = gl.to_tensor(0)
    return zero, zero, zero, zero


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def grouped(inner, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(row tile, column tile) of an expert's tile: GROUP_M row tiles share a column before the next."""
    per_group = GROUP_M * tiles_n
    group = inner // per_group
    first = group * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    rest = inner - group * per_group
    return first + rest % height, rest // height


@gluon.jit
def expect(bar, A_BYTES: gl.constexpr, both, B_BYTES: gl.constexpr, wide):
    """Set how many bytes a stage's barrier waits for: one or both halves of the rows, and of the columns."""
    mbarrier.expect(bar, A_BYTES + B_BYTES, pred=(both == 0) & (wide == 0))
    mbarrier.expect(bar, 2 * A_BYTES + B_BYTES, pred=both & (wide == 0))
    mbarrier.expect(bar, A_BYTES + 2 * B_BYTES, pred=(both == 0) & wide)
    mbarrier.expect(bar, 2 * A_BYTES + 2 * B_BYTES, pred=both & wide)


@gluon.jit
def draw(counter):
    """Request the counter's next number for the first lane of a warp, without waiting; ``told`` waits for it.

    Triton's own atomic waits for its result at once, which delays loads. With it pingpong dW, whose tiles are short,
    takes up to 1.04 x as long; forward and dX take as long as without it (docs/inside/trials.md, pingpong-dealt).
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0; "
        "@first atom.global.gpu.relaxed.add.u32 $0, [$1], 1;}",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def told(drawn):
    """Wait for the number of ``draw``, and return it in all lanes."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [drawn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_tile(counter, drawn, dealt, total):
    """The number of the next tile: ``dealt`` tiles were assigned beforehand, ``drawn`` is the counter's value.

    Every program takes one number past the last tile. The program with the last of these sets the counter to zero.
    """
    if drawn == total - dealt + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    return dealt + drawn


@gluon.jit
def zero_tail(y, m_sizes, m_sizes_step, M, E, width, stride_y_m, EXPERTS: gl.constexpr):
    """Set ``width`` columns of the rows that belong to no expert to zero. For four warps."""
    experts: gl.constexpr = gl.BlockedLayout([EXPERTS // 128], [32], [4], [0])
    wanted = gl.sum(counts(m_sizes, m_sizes_step, M, E, EXPERTS, experts).to(gl.int64), 0)
    used = gl.minimum(wanted, M.to(gl.int64)).to(gl.int32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for row in range(used + 4 * gl.program_id(0), M, 4 * gl.num_programs(0)):
        m = row + gl.arange(0, 4, layout=gl.SliceLayout(1, layout)).to(gl.int64)
        for col in range(0, width, 256):
            n = col + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
            address = y + m[:, None] * stride_y_m + n[None, :]
            gl.store(
                address, gl.zeros([4, 256], y.dtype.element_ty, layout), mask=(m < M)[:, None] & (n < width)[None, :]
            )
