import os
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
W='warpgroups.py'; S='specialized.py'; D='specialized_weight.py'; P='pipeline.py'
def lead(n):
    return [(P,"    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())","    filled = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())"),
    (P,"        mbarrier.init(filled.index(i), count=1)\n","        mbarrier.init(filled.index(i), count=1)\n        mbarrier.init(filled.index(2 + i), count=1)\n"),
    (W,"    half, a, b, full, empty, buffers, y, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    WIDTH","    half, a, b, full, empty, buffers, y, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    ahead,\n    WIDTH"),
    (W,"    acc = gl.zeros([64, WIDTH], gl.float32, mma)\n","    acc = gl.zeros([64, WIDTH], gl.float32, mma)\n    told = gl.minimum(steps, %d) - 1\n"%n),
    (W,"        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)\n","        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)\n        if half == 0:\n            mbarrier.arrive(ahead, count=1, pred=step == told)\n"),
    (W,"    if INDEXED:\n        acc = _biased(acc","    if half == 0:\n        mbarrier.arrive(ahead, count=1, pred=steps == 0)\n    if INDEXED:\n        acc = _biased(acc"),
    (W,"    row, col, row_end, word = take(queue, filled, free, slot, turn)\n    while row >= 0:\n        slot, turn = advance(slot, turn, 2)\n",
       "    if half == 1:\n        mbarrier.wait(filled.index(2 + slot), turn)\n    row, col, row_end, word = take(queue, filled, free, slot, turn)\n    while row >= 0:\n        ahead = filled.index(2 + slot)\n        slot, turn = advance(slot, turn, 2)\n"),
    (W,"        row, col, row_end, word = take(queue, filled, free, slot, turn)\n    if not INDEXED","        if half == 1:\n            mbarrier.wait(filled.index(2 + slot), turn)\n        row, col, row_end, word = take(queue, filled, free, slot, turn)\n    if half == 0:\n        mbarrier.arrive(filled.index(2 + slot), count=1)\n    if not INDEXED"),
    (W,"                    N, stride_y_m, HALF, ","                    N, stride_y_m, ahead, HALF, "),
    (W,"                    N, stride_y_m, BLOCK_N, ","                    N, stride_y_m, ahead, BLOCK_N, "),
    ]
if __name__=="__main__":
    make('full',[])
    for n in (1,2,3,4,5,6): make(f'lead{n}',lead(n))
