import shutil, os
src='kernels/'
F=['pipeline.py','warpgroups.py','specialized.py','specialized_weight.py']
def sub(t,a,b,n=1):
    assert t.count(a)==n,(a,t.count(a)); return t.replace(a,b)
def make(name, edits):
    os.makedirs(name,exist_ok=True)
    for f in F:
        t=open(src+f).read()
        for (ff,a,b,*n) in edits:
            if ff==f: t=sub(t,a,b,*n)
        open(f'{name}/{f}','w').write(t)
    open(f'{name}/__init__.py','w').write('from .specialized import rows_specialized\nfrom .specialized_weight import weight_specialized\n')
W='warpgroups.py'; S='specialized.py'; D='specialized_weight.py'
nomma=[(W,"""        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
""",""),(W,"    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))\n","")]
noload=[(S,"                expect(bar, half_bytes, both, b_bytes, wide)\n","                if number < gl.num_programs(0):\n                    expect(bar, half_bytes, both, b_bytes, wide)\n                else:\n                    mbarrier.arrive(bar, count=1)\n                first_round = number < gl.num_programs(0)\n"),
 (S,"tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))","tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2), pred=first_round)"),
 (S,"a.index(stage * 2 + 1), pred=both)","a.index(stage * 2 + 1), pred=both & first_round)"),
 (S,"bar, left)","bar, left, pred=first_round)",2),(S,"bar, right, pred=wide)","bar, right, pred=wide & first_round)",2),
 (D,"            mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)\n            mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)\n","            first_round = tile < gl.num_programs(0)\n            mbarrier.expect(bar, half_bytes + b_bytes, pred=(both == 0) & first_round)\n            mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both & first_round)\n            mbarrier.arrive(bar, count=1, pred=first_round == 0)\n"),
 (D,"bar, left)","bar, left, pred=first_round)"),(D,"bar, right, pred=both)","bar, right, pred=both & first_round)"),(D,"bar, b_tile)","bar, b_tile, pred=first_round)")]
# w from a few tiles that stay in L2: expert 0, 1024 columns (16 tiles of 64..)
l2=[(S,"[expert, start, col * HALF]","[expert * 0, start, (col % 4) * HALF]"),(S,"[expert, start, second]","[expert * 0, start, (col % 4 + 1) * HALF]"),
    (S,"[expert, col * HALF, start]","[expert * 0, (col % 4) * HALF, start]"),(S,"[expert, second, start]","[expert * 0, (col % 4 + 1) * HALF, start]")]
nostore=[(W,"            _store_box(y, parts[i], buffer, row, row_end, first + 64 * i, expert, WEIGHT, SLOTS)","            if steps > 1000000:\n                _store_box(y, parts[i], buffer, row, row_end, first + 64 * i, expert, WEIGHT, SLOTS)")]
make('full',[]); make('loads',nomma); make('mma',noload); make('l2',l2); make('nostore',nostore); make('loadsl2',nomma+l2)
batch=[(W,"""    for i in gl.static_range(len(parts)):
        buffer = buffers.index(half * SLOTS + i % SLOTS)
""","""    if SLOTS == len(parts) and not INDEXED:
        tma.store_wait(0)
        gl.barrier()
        for i in gl.static_range(len(parts)):
            buffers.index(half * SLOTS + i).store(parts[i])
        fence_async_shared()
        gl.barrier()
        for i in gl.static_range(len(parts)):
            if WEIGHT:
                box = buffers.index(half * SLOTS + i)._reinterpret(parts[i].dtype, [1, 64, 64], y.layout)
                tma.async_copy_shared_to_global(y, [expert, row, first + 64 * i], box)
            else:
                box = buffers.index(half * SLOTS + i)._reinterpret(parts[i].dtype, [1, 1, 64, 64], y.layout)
                tma.async_copy_shared_to_global(y, [INDEX_END, row_end, INDEX_END - row_end + row, first + 64 * i], box)
    for i in gl.static_range(len(parts) if (SLOTS != len(parts) or INDEXED) else 0):
        buffer = buffers.index(half * SLOTS + i % SLOTS)
""")]
make('batch',batch)
# skew: the second warpgroup begins when half the ring is full
half=[(D,"    b_bytes: gl.constexpr = BLOCK_K * BLOCK_M * x.dtype.primitive_bitwidth // 8\n","    HALF: gl.constexpr = BLOCK_K // 2\n    b_bytes: gl.constexpr = HALF * BLOCK_M * x.dtype.primitive_bitwidth // 8\n"),
 (D,"        publish(queue, filled, free, slot, turn, n, 2 * k, N, steps | (expert << 20), WARPS)\n","        second = (2 * k + 1) * HALF\n        wide = second < K\n        word = steps | (expert << 20) | gl.where(wide, 0, NARROW_BIT)\n        publish(queue, filled, free, slot, turn, n, 2 * k, N, word, WARPS)\n"),
 (D,"            mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)\n            mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)\n","            expect(bar, half_bytes, both, b_bytes, wide)\n"),
 (D,"            b_tile = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)\n            tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_tile)\n",
 "            b_left = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, HALF], x.layout)\n            b_right = b.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, HALF], x.layout)\n            tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_left)\n            tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, second], bar, b_right, pred=wide)\n"),
 (D,"    INDEX_END,\n    advance,\n    barriers,\n","    INDEX_END,\n    NARROW_BIT,\n    advance,\n    barriers,\n    expect,\n"),
 (D,"                False, False, True, False, False, False, False,\n","                False, False, True, False, False, False, True,\n",2)]
make('half',half); make('halfbatch',half+batch)
skew=[(W,"    row, col, row_end, word = take(queue, filled, free, slot, turn)\n    while row >= 0:\n","    if half == 1:\n        mbarrier.wait(full.index(STAGES // 2), 0)\n    row, col, row_end, word = take(queue, filled, free, slot, turn)\n    while row >= 0:\n")]
make('skew',skew); make('skewbatch',skew+batch)
PI='pipeline.py'
pp=[(PI,"        mbarrier.init(empty.index(i), count=2)","        mbarrier.init(empty.index(i), count=1)"),
 (PI,"        mbarrier.init(free.index(i), count=2)","        mbarrier.init(free.index(i), count=1)"),
 (S,"    split = gl.where((2 * last <= gl.num_programs(0)) & (GATED == 0), last, 0)\n","    split = last * 0\n"),
 (S,"            wide = (number < whole) & (second < N)\n","            wide = number >= 0\n"),
 (S,"        publish(queue, filled, free, slot, turn, row, col, row_end, word, WARPS)\n","        publish(queue, filled, free, slot, turn, row, col | (stage << 20) | (phase << 24), row_end, word, WARPS)\n"),
 (S,"    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n","    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n    slot, turn = advance(slot, turn, 2)\n    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n"),
 (D,"        publish(queue, filled, free, slot, turn, n, 2 * k, N, steps | (expert << 20), WARPS)\n","        publish(queue, filled, free, slot, turn, n, (2 * k) | (stage << 20) | (phase << 24), N, steps | (expert << 20), WARPS)\n"),
 (D,"    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n","    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n    slot, turn = advance(slot, turn, 2)\n    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)\n"),
 (W,"""@gluon.jit
def multiply(
""","""@gluon.jit
def _tall(
    half, a, b, full, empty, buffers, y, row, row_end, first, expert, steps, stage, phase,
    WIDTH: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr,
    WEIGHT: gl.constexpr, HEIGHT: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    DEPTH: gl.constexpr = b.shape[2] if B_NK else b.shape[1]
    top = gl.zeros([64, WIDTH], gl.float32, mma)
    low = gl.zeros([64, WIDTH], gl.float32, mma)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a_top = a.index(stage * 2)
        a_low = a.index(stage * 2 + 1)
        if not A_MK:
            a_top = a_top.permute((1, 0))
            a_low = a_low.permute((1, 0))
        if B_NK:
            b_tile = b.index(stage * 2)._reinterpret(b.dtype, [WIDTH, DEPTH], b.layout).permute((1, 0))
        else:
            b_tile = b.index(stage * 2)._reinterpret(b.dtype, [DEPTH, WIDTH], b.layout)
        top = warpgroup_mma(a_top, b_tile, top, is_async=True)
        if HEIGHT == 2:
            low = warpgroup_mma(a_low, b_tile, low, is_async=True)
            top, low = warpgroup_mma_wait(num_outstanding=2, deps=(top, low))
        else:
            top = warpgroup_mma_wait(num_outstanding=1, deps=(top,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    if HEIGHT == 2:
        top, low = warpgroup_mma_wait(num_outstanding=0, deps=(top, low))
    else:
        top = warpgroup_mma_wait(num_outstanding=0, deps=(top,))
    if steps > 0:
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    parts = _parts(top.to(buffers.dtype))
    for i in gl.static_range(len(parts)):
        _store_box(y, parts[i], buffers.index(half * SLOTS + i % SLOTS), row, row_end, first + 64 * i, expert, WEIGHT, SLOTS)
    if HEIGHT == 2:
        parts2 = _parts(low.to(buffers.dtype))
        for i in gl.static_range(len(parts2)):
            _store_box(y, parts2[i], buffers.index(half * SLOTS + i % SLOTS), row + 64, row_end, first + 64 * i, expert, WEIGHT, SLOTS)


@gluon.jit
def multiply(
    half, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr,
    WEIGHT: gl.constexpr, INDEXED: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_N // 2
    turn = gl.to_tensor(0)
    row, col, row_end, word = take(queue, filled, free, half, turn)
    while row >= 0:
        turn = turn ^ 1
        steps = word & 0xFFFFF
        expert = (word >> 20) & 0x3FF
        stage = (col >> 20) & 0xF
        phase = (col >> 24) & 1
        first = (col & 0xFFFFF) * HALF
        if row + 64 < row_end:
            _tall(half, a, b, full, empty, buffers, y, row, row_end, first, expert, steps, stage, phase,
                  BLOCK_N, STAGES, SLOTS, A_MK, B_NK, WEIGHT, 2)
        else:
            _tall(half, a, b, full, empty, buffers, y, row, row_end, first, expert, steps, stage, phase,
                  BLOCK_N, STAGES, SLOTS, A_MK, B_NK, WEIGHT, 1)
        row, col, row_end, word = take(queue, filled, free, half, turn)
    tma.store_wait(0)


@gluon.jit
def _multiply_old(
""")]
make('pp',pp)
smemonly=[(W,"        tma.async_copy_shared_to_global(y, [expert, row, col], box)","        if col > 100000000:\n            tma.async_copy_shared_to_global(y, [expert, row, col], box)")]
make('smemonly',smemonly)
samebox=[(W,"        tma.async_copy_shared_to_global(y, [expert, row, col], box)","        tma.async_copy_shared_to_global(y, [expert * 0, row % 128, col % 256], box)")]
make('samebox',samebox)
useacc=[(W,"        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)\n","        acc = warpgroup_mma(a_tile, b_tile, acc, use_acc=step > 0, is_async=True)\n"),
 (D,"        steps = gl.cdiv(count, BLOCK_M)\n","        steps = gl.maximum(gl.cdiv(count, BLOCK_M), 1)\n"),
 (D,"        for row in range(0, count, BLOCK_M):\n","        for row in range(0, steps * BLOCK_M, BLOCK_M):\n")]
make('useacc',useacc)
early=[(W,"    half, a, b, full, empty, buffers, y, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    WIDTH","    half, a, b, full, empty, buffers, y, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    queue, filled, free, slot, turn,\n    WIDTH"),
 (W,"""    if INDEXED:
        acc = _biased(acc""","""    row_n, col_n, row_end_n, word_n = take(queue, filled, free, slot, turn)
    if INDEXED:
        acc = _biased(acc"""),
 (W,"    return stage, phase\n\n\n@gluon.jit\ndef multiply","    return stage, phase, row_n, col_n, row_end_n, word_n\n\n\n@gluon.jit\ndef multiply"),
 (W,"""            if NARROW and (word & NARROW_BIT) != 0:
                stage, phase = _tile(""","""            if NARROW and (word & NARROW_BIT) != 0:
                stage, phase, row, col, row_end, word = _tile("""),
 (W,"""            else:
                stage, phase = _tile(""","""            else:
                stage, phase, row, col, row_end, word = _tile("""),
 (W,"                    N, stride_y_m, HALF, ","                    N, stride_y_m, queue, filled, free, slot, turn, HALF, "),
 (W,"                    N, stride_y_m, BLOCK_N, ","                    N, stride_y_m, queue, filled, free, slot, turn, BLOCK_N, "),
 (W,"""                stage, phase = advance(stage, phase, STAGES)
        row, col, row_end, word = take(queue, filled, free, slot, turn)
""","""                stage, phase = advance(stage, phase, STAGES)
            row, col, row_end, word = take(queue, filled, free, slot, turn)
""")]
make('early',early); make('both',early+useacc)
peel=[(W,"""    acc = gl.zeros([64, WIDTH], gl.float32, mma)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHER:
            fence_async_shared()
""","""    acc = gl.zeros([64, WIDTH], gl.float32, mma)
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        fence_async_shared()
    a_first = a.index(stage * 2 + half)
    if not A_MK:
        a_first = a_first.permute((1, 0))
    if B_NK:
        b_first = b.index(stage * 2)._reinterpret(b.dtype, [WIDTH, DEPTH], b.layout).permute((1, 0))
    else:
        b_first = b.index(stage * 2)._reinterpret(b.dtype, [DEPTH, WIDTH], b.layout)
    acc = warpgroup_mma(a_first, b_first, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    stage, phase = advance(stage, phase, STAGES)
    for step in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHER:
            fence_async_shared()
"""),
 (W,"        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)\n","        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)\n"),
 (W,"    if steps > 0:\n        gl.barrier()\n        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)\n","    gl.barrier()\n    mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)\n")]+useacc[1:]
make('peel',peel); make('peelearly',early+peel)
