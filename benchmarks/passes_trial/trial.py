# ruff: noqa
import sys, json, statistics
sys.path.insert(0, sys.argv[1])
import method, torch, triton, triton.language as tl

@triton.jit
def g_row(x, index, out, M, columns, top_k, BLOCK: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(index + row * 2) // top_k).to(tl.int64)
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        v = tl.load(x + token * columns + col, mask=col < columns, other=0.0, eviction_policy=LD)
        tl.store(out + row * columns + col, v, mask=col < columns, eviction_policy=ST)

@triton.jit
def g_rows(x, index, out, M, columns, top_k, BLOCK: tl.constexpr, R: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr):
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    token = (tl.load(index + row * 2, mask=row < M, other=0) // top_k).to(tl.int64)
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        m = (col < columns)[None, :] & (row < M)[:, None]
        v = tl.load(x + token[:, None] * columns + col[None, :], mask=m, other=0.0, eviction_policy=LD)
        tl.store(out + row[:, None] * columns + col[None, :], v, mask=m, eviction_policy=ST)

@triton.jit
def g_flat(x, index, out, M, columns, top_k, BLOCK: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr, PIECES: tl.constexpr):
    # a program: a piece of BLOCK columns of one row
    pieces = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    col = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(index + row * 2) // top_k).to(tl.int64)
    v = tl.load(x + token * columns + col, mask=col < columns, other=0.0, eviction_policy=LD)
    tl.store(out + row * columns + col, v, mask=col < columns, eviction_policy=ST)

@triton.jit
def g_token(x, inv, out, M, columns, top_k, BLOCK: tl.constexpr, K: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr):
    # a program a token: read once, written top_k times
    t = tl.program_id(0).to(tl.int64)
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        v = tl.load(x + t * columns + col, mask=col < columns, other=0.0, eviction_policy=LD)
        for s in tl.static_range(K):
            row = tl.load(inv + t * top_k + s).to(tl.int64)
            tl.store(out + row * columns + col, v, mask=col < columns, eviction_policy=ST)

@triton.jit
def a_flat(h, a, n, columns, BLOCK: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr):
    # n vectors of 8
    i = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    per = columns // 8
    row = (i // per).to(tl.int64)
    c = (i - row.to(tl.int32) * per) * 8
    at = (row * 2 * columns + c)[:, None] + tl.arange(0, 8)[None, :]
    m = (i < n)[:, None]
    g = tl.load(h + at, mask=m, other=0.0, eviction_policy=LD).to(tl.float32)
    u = tl.load(h + at + columns, mask=m, other=0.0, eviction_policy=LD).to(tl.float32)
    o = g / (1.0 + tl.exp(-g)) * u
    tl.store(a + i.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :], o.to(a.dtype.element_ty), mask=m, eviction_policy=ST)

@triton.jit
def a_row(h, a, columns, BLOCK: tl.constexpr, ST: tl.constexpr, LD: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    m = col < columns
    g = tl.load(h + row * 2 * columns + col, mask=m, other=0.0, eviction_policy=LD).to(tl.float32)
    u = tl.load(h + row * 2 * columns + columns + col, mask=m, other=0.0, eviction_policy=LD).to(tl.float32)
    tl.store(a + row * columns + col, (g / (1.0 + tl.exp(-g)) * u).to(a.dtype.element_ty), mask=m, eviction_policy=ST)

clock = method.Clock()
E1, N1 = "evict_first", ""
L1 = "evict_last"
res = []
MODELS = {"qwen3-30b": (128, 2048, 768, 8), "qwen3-next": (512, 2048, 512, 10), "deepseek-v3": (256, 7168, 2048, 8), "mixtral-8x7b": (8, 4096, 14336, 2), "gpt-oss-20b": (32, 2880, 2880, 4), "olmoe": (64, 2048, 1024, 8)}
for name, (E, H, I, k) in MODELS.items():
    for T in (1024, 8192):
        M = T * k
        x = method.activations(T, H, torch.bfloat16)
        ids = torch.rand(T, E, device="cuda").topk(k, 1).indices.reshape(-1)
        index = ids.sort(stable=True).indices
        inv = torch.empty(M, dtype=torch.int32, device="cuda"); inv[index] = torch.arange(M, dtype=torch.int32, device="cuda")
        rnd = torch.randperm(M, device="cuda")
        out = torch.empty(M, H, dtype=torch.bfloat16, device="cuda")
        want = x[index // k]
        fs = {}
        i2 = index.view(torch.int32) if False else index
        ix = index.view(torch.int32)
        def reg(n, f, chk=True):
            out.fill_(0); f(); torch.cuda.synchronize()
            if chk and not torch.equal(out, want): print("WRONG", n); return
            fs[n] = clock.capture(f)
        for st in (N1, E1):
            for ld in (N1, L1):
                tag = ("F" if st else "-") + ("L" if ld else "-")
                reg(f"row2048x4{tag}", lambda: g_row[(M,)](x, ix, out, M, H, k, 2048, st, ld, num_warps=4))
        reg("row1024x4FL", lambda: g_row[(M,)](x, ix, out, M, H, k, 1024, E1, L1, num_warps=4))
        reg("row2048x8FL", lambda: g_row[(M,)](x, ix, out, M, H, k, 2048, E1, L1, num_warps=8))
        reg("row1024x2FL", lambda: g_row[(M,)](x, ix, out, M, H, k, 1024, E1, L1, num_warps=2))
        for R, B, w in ((2, 2048, 4), (4, 1024, 4), (4, 2048, 8), (8, 512, 4)):
            reg(f"rows{R}.{B}x{w}FL", lambda: g_rows[(-(-M // R),)](x, ix, out, M, H, k, B, R, E1, L1, num_warps=w))
        for B, w in ((1024, 4), (1024, 2), (512, 2)):
            reg(f"flat{B}x{w}FL", lambda: g_flat[(M * -(-H // B),)](x, ix, out, M, H, k, B, E1, L1, 1, num_warps=w))
        for B, w in ((2048, 4), (1024, 4), (1024, 2)):
            reg(f"tok{B}x{w}F", lambda: g_token[(T,)](x, inv, out, M, H, k, B, k, E1, N1, num_warps=w))
            reg(f"tok{B}x{w}-", lambda: g_token[(T,)](x, inv, out, M, H, k, B, k, N1, N1, num_warps=w))
        o2 = torch.empty_like(out)
        fs["copy"] = clock.capture(lambda: o2.copy_(out))
        fs["zero"] = clock.capture(lambda: o2.zero_())
        r = {n: round(statistics.median(t), 1) for n, t in zip(fs, clock.rounds_us(list(fs.values()), 9))}
        print(name, T, "gather floor %.1f" % ((M + T) * H * 2 / 4.3e6), r, flush=True); res.append((name, T, "gather", r))
        del out, o2, want, fs
        h = method.activations(M, 2 * I, torch.bfloat16); a = torch.empty(M, I, dtype=torch.bfloat16, device="cuda")
        fs = {}
        for st in (N1, E1):
            for ld in (N1, E1):
                tag = ("F" if st else "-") + ("F" if ld else "-")
                for B, w in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
                    f = lambda: a_flat[(-(-M * I // B),)](h, a, M * I // 8, I, B, st, ld, num_warps=w); f(); fs[f"aflat{B}x{w}{tag}"] = clock.capture(f)
                for B, w in ((1024, 4), (512, 2), (256, 1)):
                    f = lambda: a_row[(M * -(-I // B),)](h, a, I, B, st, ld, num_warps=w); f(); fs[f"arow{B}x{w}{tag}"] = clock.capture(f)
        r = {n: round(statistics.median(t), 1) for n, t in zip(fs, clock.rounds_us(list(fs.values()), 9))}
        print(name, T, "act floor %.1f" % (M * I * 6 / 4.3e6), r, flush=True); res.append((name, T, "act", r))
        del h, a, fs
        torch.cuda.empty_cache()
json.dump(res, open(sys.argv[2], "w"))
