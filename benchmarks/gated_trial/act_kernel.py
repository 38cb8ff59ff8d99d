import triton
import triton.language as tl


@triton.jit
def act(h, y, total, I, OAI: tl.constexpr, BLOCK: tl.constexpr):
    off = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if OAI:
        two = tl.program_id(0).to(tl.int64) * BLOCK * 2 + tl.arange(0, 2 * BLOCK)
        pair = tl.load(h + two, mask=two < 2 * total, other=0.0).to(tl.float32)
        gate, up = tl.split(pair.reshape([BLOCK, 2]))
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        r = (up + 1.0) * gate * (1.0 / (1.0 + tl.exp(-1.702 * gate)))
    else:
        m = off // I
        at = h + m * (2 * I) + off % I
        gate = tl.load(at, mask=off < total, other=0.0).to(tl.float32)
        up = tl.load(at + I, mask=off < total, other=0.0).to(tl.float32)
        r = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(y + off, r.to(y.dtype.element_ty), mask=off < total)
